# SPDX-License-Identifier: Apache-2.0
"""Advantages of a batch of groups: what changes them, what does not, and where they are 0."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe import losses
from jaxmoe.batches.batch import Batch
from jaxmoe.config import ConfigError
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.loss import estimate_advantages
from jaxmoe.rl.terms import Term
from jaxmoe.rl.validate import check_algorithm

EPS = float(np.finfo(np.float32).eps)
P, R, T = 3, 4, 5
MASK = np.random.default_rng(0).random((P * R, T)) < 0.7
MASK[:, 2] = True
INTEGERS = st.lists(st.integers(-8, 8), min_size=P * R, max_size=P * R)
GROUPED = {
    "group": losses.group_advantages,
    "unscaled": partial(losses.group_advantages, scale_by_std=False),
    "rloo": losses.rloo_advantages,
}


def compute_advantages(a, rewards, mask, *, samples, **arrays):
    """Advantages and returns of a batch that has nothing else."""
    ids, logp = mask.astype(jnp.int32), jnp.zeros(mask.shape)
    batch = Batch(ids, ids, ids, mask, logp, rewards, samples, **arrays)
    batch = estimate_advantages(batch, a)
    return batch.advantages_BT, batch.returns_BT


@partial(jax.jit, static_argnames="name")
def grouped(rewards, name):
    a = Algorithm(advantages=GROUPED[name])
    advantages, returns = compute_advantages(a, rewards, jnp.asarray(MASK), samples=R)
    assert returns is None
    return advantages


def numbers(values):
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize("name", GROUPED)
@given(INTEGERS, st.permutations(range(P)))
def test_permuted_groups_give_permuted_rows(name, rewards, order):
    rows = np.arange(P * R).reshape(P, R)[np.array(order)].reshape(-1)
    actual = np.asarray(grouped(numbers(rewards)[rows], name))
    want = np.asarray(grouped(numbers(rewards), name))[:, 2]  # a column of true tokens
    np.testing.assert_array_equal(actual, np.where(MASK, want[rows][:, None], 0.0))


def test_groups_are_of_neighbouring_rows():
    rewards = numbers([1, 0, 0, 0, 5, 5, 5, 5, 0, 0, 3, 1])
    actual = np.asarray(grouped(rewards, "unscaled"))[:, 2]
    np.testing.assert_array_equal(actual, [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0, -1, -1, 2, 0])


def test_advantages_at_false_tokens_are_zero():
    def loud(rewards_BT):
        return jnp.full(rewards_BT.shape, jnp.nan)

    mask = jnp.asarray(MASK)
    actual, _ = compute_advantages(Algorithm(advantages=loud), jnp.ones(P * R), mask, samples=1)
    np.testing.assert_array_equal(np.isnan(actual), MASK)
    assert not np.asarray(actual)[~MASK].any()


def test_returns_of_gae_come_through():
    rng = np.random.default_rng(1)
    rewards, values = numbers(rng.normal(size=P * R)), numbers(rng.normal(size=MASK.shape))
    mask, gae = jnp.asarray(MASK), partial(losses.gae, discount=0.9, trace=0.8)
    a = Algorithm(advantages=gae, critic="own")
    results = compute_advantages(a, rewards, mask, old_values_BT=values, samples=R)
    want = gae(losses.token_rewards(rewards, mask), values, mask)
    for actual, expected in zip(results, want, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert not np.asarray(results[0])[~MASK].any() and np.asarray(results[1])[MASK].all()


def test_a_kl_penalty_lowers_the_compared_rewards():
    kl = numbers(np.random.default_rng(2).random(MASK.shape))
    rewards, mask = numbers(np.arange(P * R)), jnp.asarray(MASK)
    a = Algorithm(
        advantages=GROUPED["unscaled"], reward_kl=Term(lambda ref_logp_BT: ref_logp_BT, 0.5)
    )
    actual = compute_advantages(a, rewards, mask, ref_logp_BT=kl, samples=R)[0][:, 2]
    paid = np.float64(rewards) - 0.5 * np.where(MASK, np.float64(kl), 0.0).sum(1)
    want = paid - paid.reshape(P, R).mean(1).repeat(R)
    np.testing.assert_allclose(actual, want, atol=64 * EPS)


@pytest.mark.parametrize("name", GROUPED)
def test_an_answer_without_tokens_counts_in_its_group(name):
    mask = jnp.asarray(MASK).at[1].set(False)
    a = Algorithm(advantages=GROUPED[name])
    rewards = numbers([0, 4, 0, 0, *range(2 * R)])
    actual = np.asarray(compute_advantages(a, rewards, mask, samples=R)[0])
    want = np.asarray(grouped(rewards, name))[:, 2]
    np.testing.assert_allclose(actual[:, 2], np.where(mask[:, 2], want, 0.0), rtol=4 * EPS)
    assert want[0] < 0 and not actual[1].any()


@pytest.mark.parametrize("shape", [(4, 2), (8,), (8, 1), (1, 6), (), (2, 6)])
def test_advantages_of_another_shape_are_refused_by_name(shape):
    # 2 prompts of 4 samples, 6 tokens: an exchanged axis has as many elements
    def custom_advantages(rewards_PR):
        return jnp.zeros(shape)

    a = Algorithm(advantages=custom_advantages)
    with pytest.raises(
        ValueError, match=r"custom_advantages must return advantages \[P, R\] = \(2, 4\) or"
    ):
        compute_advantages(a, jnp.zeros(8), jnp.ones((8, 6), bool), samples=4)
    with pytest.raises(ConfigError, match="custom_advantages must return advantages"):
        check_algorithm(a, 4)
