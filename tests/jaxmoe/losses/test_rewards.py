# SPDX-License-Identifier: Apache-2.0
"""Rewards before they become advantages: the length penalty, and where token rewards stand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.losses import overlong_penalty, token_rewards

EPS = float(np.finfo(np.float32).eps)
# two turns with a tool's output between them; one true token; none; all
MASK = jnp.asarray([[0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0], [0] * 7, [1] * 7], bool)
LAST = [5, 2, None, 6]
REWARDS = jnp.asarray([1.0, -2.0, 4.0, 8.0])


@pytest.mark.paper
def test_dapos_length_penalty_has_three_regions():
    # DAPO, arXiv:2503.14476 eq. 13 and §4.1: 16384 tokens expected, 4096 more punished softly
    lengths = jnp.asarray([0, 16_384, 16_385, 18_432, 20_479, 20_480, 30_000], jnp.int32)
    actual = overlong_penalty(lengths, max_tokens=20_480, buffer=4096)
    want = [0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1]
    np.testing.assert_array_equal(actual, np.float32(want))


def test_a_buffer_of_full_length_penalises_every_token():
    actual = overlong_penalty(jnp.arange(6, dtype=jnp.int32), max_tokens=4, buffer=4)
    np.testing.assert_array_equal(actual, [0, -0.25, -0.5, -0.75, -1, -1])


@pytest.mark.parametrize("buffer", [-1, 0, 11])
def test_a_buffer_outside_the_answers_length_is_refused(buffer):
    with pytest.raises(
        ValueError, match=rf"buffer must be in \(0, max_tokens=10\], got {buffer}\."
    ):
        overlong_penalty(jnp.asarray([3], jnp.int32), max_tokens=10, buffer=buffer)


def test_the_reward_stands_at_the_last_true_token():
    actual = token_rewards(REWARDS, MASK)
    want = np.zeros(MASK.shape)
    for i, column in enumerate(LAST):
        if column is not None:
            want[i, column] = REWARDS[i]
    np.testing.assert_array_equal(actual, want)


def test_the_kl_penalty_is_at_true_tokens_only():
    kl = jnp.asarray(np.random.default_rng(0).random(MASK.shape), jnp.float32)
    actual = token_rewards(REWARDS, MASK, kl, kl_coef=0.5)
    want = token_rewards(REWARDS, MASK) - jnp.where(MASK, 0.5 * kl, 0.0)
    np.testing.assert_array_equal(actual, want)
    assert not np.asarray(actual)[~np.asarray(MASK)].any() and float(actual[0, 1]) < 0
    paid = np.where(MASK, np.float64(kl), 0.0).sum(1)
    totals = np.array([1.0, -2.0, 0.0, 8.0]) - 0.5 * paid
    np.testing.assert_allclose(actual.sum(axis=1), totals, rtol=16 * EPS)


@pytest.mark.parametrize("value", [1000.0, np.inf, np.nan])
def test_what_stands_at_false_tokens_never_matters(value):
    dirty = jnp.where(MASK, 0.25, value)
    actual = token_rewards(REWARDS, MASK, dirty, kl_coef=0.5)
    want = token_rewards(REWARDS, MASK, jnp.full(MASK.shape, 0.25), kl_coef=0.5)
    np.testing.assert_array_equal(actual, want)
