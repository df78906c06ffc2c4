# SPDX-License-Identifier: Apache-2.0
"""Returns, GAE and whitening over turns with tool output between them; leave-one-out groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.losses import (
    bootstrapped_gae,
    discounted_returns,
    gae,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
    token_rewards,
    whiten,
    whitened_bootstrapped_gae,
    whitened_gae,
)

EPS = float(np.finfo(np.float32).eps)
# two turns with three tokens of tool output between them, and padding behind
MASK = jnp.asarray([[True, True, False, False, False, True, True, False]])
TRUE = np.flatnonzero(np.asarray(MASK)[0])
EIGHT_FLOATS = st.lists(st.floats(-4, 4, width=32), min_size=8, max_size=8)


def gae_by_loop(rewards, values, discount, trace):
    """float64, over true tokens only."""
    advantages, next_value, last = [], 0.0, 0.0
    for reward, value in zip(rewards[::-1], values[::-1], strict=True):
        last = reward + discount * next_value - value + discount * trace * last
        next_value = value
        advantages.append(last)
    return np.array(advantages[::-1])


@pytest.mark.paper
@given(
    EIGHT_FLOATS, EIGHT_FLOATS, st.sampled_from([1.0, 0.9, 0.5]), st.sampled_from([1.0, 0.95, 0.0])
)
def test_tool_output_is_skipped_as_if_absent(rewards, values, discount, trace):
    # verl tests/trainer/ppo/test_core_algos_on_cpu.py, test_multi_turn_compute_gae_advantage_return
    r, v = (jnp.asarray([x], jnp.float32) for x in (rewards, values))
    advantages, returns = gae(r, v, MASK, discount=discount, trace=trace)
    exact = (np.array(x, np.float64)[TRUE] for x in (rewards, values))
    want = gae_by_loop(*exact, discount, trace)
    np.testing.assert_allclose(np.asarray(advantages)[0, TRUE], want, atol=64 * 8 * EPS)
    assert not np.asarray(advantages)[~np.asarray(MASK)].any()
    gap = np.asarray(returns - advantages)[0]
    np.testing.assert_allclose(gap[TRUE], np.array(values)[TRUE], atol=64 * 8 * EPS)


def test_a_gap_discounts_once():
    rewards = jnp.asarray([[0, 0, 0, 0, 0, 0, 1.0, 0]])
    values = jnp.zeros((1, 8))
    advantages, _ = gae(rewards, values, MASK, discount=0.5)
    np.testing.assert_array_equal(np.asarray(advantages)[0, TRUE], [0.125, 0.25, 0.5, 1.0])
    np.testing.assert_array_equal(discounted_returns(rewards, MASK, discount=0.5), advantages)


def test_no_gradient_reaches_the_values():
    grad = jax.grad(lambda v: gae(jnp.ones((1, 8)), v, MASK)[0].sum())(jnp.ones((1, 8)))
    assert not np.asarray(grad).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_what_stands_at_false_tokens_never_matters(value):
    dirty = jnp.where(MASK, 1.0, value)
    clean = jnp.where(MASK, 1.0, 0.0)
    for actual, want in zip(gae(dirty, dirty, MASK), gae(clean, clean, MASK), strict=True):
        np.testing.assert_array_equal(actual, want)
    np.testing.assert_array_equal(whiten(dirty, MASK), whiten(clean, MASK))
    np.testing.assert_array_equal(
        reinforce_pp_advantages(dirty, MASK), reinforce_pp_advantages(clean, MASK)
    )


def test_whitened_tokens_have_mean_zero_and_deviation_one():
    x = jnp.asarray(np.random.default_rng(0).normal(3.0, 5.0, (4, 8)), jnp.float32)
    mask = jnp.broadcast_to(MASK, x.shape)
    actual = np.asarray(whiten(x, mask), np.float64)[np.asarray(mask)]
    assert abs(actual.mean()) <= 16 * EPS and abs(actual.std(ddof=1) - 1) <= 16 * EPS


@jax.jit
def whitened_equals(value, rewards_B):
    """Whitened equal tokens, and whitened equal rewards, by every function that whitens."""
    equal, mask = jnp.full((len(rewards_B), 8), value), jnp.ones((len(rewards_B), 8), bool)
    paid = token_rewards(rewards_B, mask)
    return [
        whiten(equal, mask),
        reinforce_pp_advantages(paid, mask),
        whitened_gae(paid, jnp.full(mask.shape, 0.5), mask)[0],
        reinforce_pp_baseline_advantages(rewards_B.reshape(1, -1), mask),
    ]


@given(st.floats(-1e4, 1e4, width=32), st.sampled_from([2, 7, 200]))
def test_equal_tokens_whiten_to_exactly_nothing(value, rows):
    # the mean of 1,600 floats of 1000.1 is not that float, and its error is all there is to whiten
    for x in (value, 1000.1):
        results = whitened_equals(jnp.float32(x), jnp.full((rows,), 1000.1, jnp.float32))
        assert not any(np.asarray(actual).any() for actual in results)


def test_nearly_equal_tokens_whiten_as_in_float64():
    # a few ulps apart: what is left after the mean must not be the mean's own rounding
    ulps = np.random.default_rng(0).integers(0, 9, (200, 8))
    x = np.float32(1000.1) + np.float32(2**-14) * ulps.astype(np.float32)
    exact = np.float64(x) - np.float64(x).mean()
    want = exact / np.sqrt(exact.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(whiten(jnp.asarray(x), jnp.ones(x.shape, bool)), want, atol=1e-4)


def test_no_true_token_is_zero_and_not_nan():
    nothing = jnp.zeros((1, 8), bool)
    assert not np.asarray(whiten(jnp.ones((1, 8)), nothing)).any()
    assert not np.asarray(gae(jnp.ones((1, 8)), jnp.ones((1, 8)), nothing)[0]).any()


def test_leave_one_out_by_hand():
    actual = rloo_advantages(jnp.asarray([[1.0, 0, 0, 1], [5, 5, 5, 5]]))
    want = [[1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3], [0, 0, 0, 0]]
    np.testing.assert_allclose(actual, want, rtol=4 * EPS)


@pytest.mark.paper
@given(st.lists(st.integers(-8, 8), min_size=5, max_size=5), st.integers(-64, 64))
def test_leave_one_out_ignores_a_shift_of_rewards(rewards, shift):
    # verl tests/trainer/ppo/test_core_algos_on_cpu.py, test_rloo_and_vectorized_equivalence:
    # r n/(n-1) - mean n/(n-1)
    r = np.array(rewards, np.float64)
    want = r * 5 / 4 - r.mean() * 5 / 4
    for moved in (0, shift):
        actual = np.asarray(rloo_advantages(jnp.asarray([r + moved], jnp.float32)))[0]
        np.testing.assert_allclose(actual, want, atol=(80 + abs(moved)) * 8 * EPS)


def test_the_group_baseline_precedes_the_batchs_whitening():
    rewards = jnp.asarray([[1.0, 0.0], [3.0, 3.0]])
    mask = jnp.asarray([[True, True], [True, False], [True, True], [True, True]])
    centred = jnp.broadcast_to(jnp.asarray([[0.5], [-0.5], [0.0], [0.0]]), (4, 2))
    actual = reinforce_pp_baseline_advantages(rewards, mask)
    np.testing.assert_array_equal(actual, whiten(centred, mask))
    assert not bool(actual[1, 1])


def test_whitened_gae_whitens_advantages_and_not_returns():
    rewards = jnp.asarray([[0.0, 0, 5, 0, 0, 0, 1.0, 7]])
    values = jnp.asarray([[0.3, 0.1, 9, 9, 9, 0.5, 0.7, 9]])
    advantages, returns = gae(rewards, values, MASK, discount=0.9, trace=0.8)
    white, returns_of_gae = whitened_gae(rewards, values, MASK, discount=0.9, trace=0.8)
    np.testing.assert_array_equal(returns_of_gae, returns)
    np.testing.assert_array_equal(white, whiten(advantages, MASK))
    assert float(jnp.sum(white)) == pytest.approx(0.0, abs=1e-5)


def test_a_truncated_answer_is_worth_its_bootstrap_value():
    # by hand, γ = 1/2, λ = 1: one reward-less token, V = 1, and 4 behind it: δ = 0 + 4/2 − 1
    row = jnp.asarray([[0.0, 0.0], [0.0, 0.0]])
    values, mask = jnp.asarray([[0.0, 1.0]] * 2), jnp.asarray([[False, True]] * 2)
    result = bootstrapped_gae(row, values, jnp.asarray([4.0, 0.0]), mask, discount=0.5)
    assert result[0].tolist() == [[0.0, 1.0], [0.0, -1.0]]
    assert result[1].tolist() == [[0.0, 2.0], [0.0, 0.0]]
    # a reward of γV at the last token is the same thing
    rewards = jnp.asarray([[0.0, 2.0], [0.0, 0.0]])
    for actual, want in zip(result, gae(rewards, values, mask, discount=0.5), strict=True):
        np.testing.assert_array_equal(actual, want)
    white, _ = whitened_bootstrapped_gae(row, values, jnp.asarray([4.0, 0]), mask, discount=0.5)
    np.testing.assert_array_equal(white, whiten(result[0], mask))
