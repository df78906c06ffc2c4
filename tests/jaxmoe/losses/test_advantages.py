# SPDX-License-Identifier: Apache-2.0
"""Group advantages: by hand, and what they must not depend on."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe import losses

EPS = float(np.finfo(np.float32).eps)
group_advantages = jax.jit(losses.group_advantages, static_argnames="scale_by_std")
rloo_advantages = jax.jit(losses.rloo_advantages)
REWARDS = st.lists(st.integers(-8, 8), min_size=4, max_size=4)


def advantages(rewards, **options):
    return np.asarray(group_advantages(jnp.asarray([rewards], jnp.float32), **options))[0]


def test_hand_worked_group():
    # mean 0.25; deviation over R - 1: sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5
    actual = advantages([1, 0, 0, 0])
    np.testing.assert_allclose(actual, np.array([1.5, -0.5, -0.5, -0.5]) / (1 + 2e-6), rtol=4 * EPS)
    np.testing.assert_array_equal(
        advantages([1, 0, 0, 0], scale_by_std=False), [0.75, -0.25, -0.25, -0.25]
    )


def test_groups_do_not_mix():
    normalized = group_advantages(jnp.asarray([[1, 0, 0], [5, 5, 8]], jnp.float32))
    np.testing.assert_array_equal(np.asarray(normalized)[1], advantages([5, 5, 8]))


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 17), st.booleans())
def test_equal_rewards_give_exactly_zero(reward, size, scaled):
    # the mean of n equal floats need not be that float
    assert not np.any(advantages([reward] * size, scale_by_std=scaled))


@given(REWARDS, st.integers(-64, 64))
def test_a_shift_of_all_rewards_changes_nothing(rewards, shift):
    # whole numbers in groups of four: every sum and mean is exact
    np.testing.assert_array_equal(advantages(rewards), advantages([r + shift for r in rewards]))


@given(REWARDS, st.sampled_from([0.25, 2.0, 64.0]))
def test_reward_scale_changes_nothing_but_epsilon(rewards, scale):
    first, scaled = advantages(rewards), advantages([r * scale for r in rewards])
    if len(set(rewards)) > 1:
        min_size = 0.5 * min(1.0, scale)  # the deviation of whole numbers that are not all equal
        rtol = 1e-6 / min_size + 4 * EPS
        np.testing.assert_allclose(first, scaled, rtol=rtol)
    raw, big = (advantages(r, scale_by_std=False) for r in (rewards, np.array(rewards) * scale))
    np.testing.assert_array_equal(raw * np.float32(scale), big)


@given(REWARDS)
def test_scaled_advantages_have_mean_zero_and_unit_deviation(rewards):
    actual = advantages(rewards).astype(np.float64)
    assert abs(actual.mean()) <= 4 * EPS
    if len(set(rewards)) > 1:
        assert abs(actual.std(ddof=1) - 1) <= 1e-6 / 0.5 + 8 * EPS


@pytest.mark.parametrize("estimator", [group_advantages, rloo_advantages])
@given(
    st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=6),
    st.lists(st.integers(0, 6), min_size=0, max_size=4),
)
def test_advantages_are_those_of_the_rewards_that_exist(estimator, rewards, gaps):
    padded = list(rewards)
    for gap in gaps:
        padded.insert(min(gap, len(padded)), float("nan"))
    actual = np.asarray(estimator(jnp.array([padded], jnp.float32)))[0]
    is_missing = np.isnan(padded)
    expected = np.asarray(estimator(jnp.array([rewards], jnp.float32)))[0]
    np.testing.assert_allclose(actual[~is_missing], expected, rtol=1e-4, atol=1e-5)
    assert (actual[is_missing] == 0).all()


@pytest.mark.parametrize("estimator", [group_advantages, rloo_advantages])
@pytest.mark.parametrize("rewards", [[math.nan] * 3, [2.0, math.nan, math.nan]])
def test_groups_of_equal_rewards_have_no_signal(estimator, rewards):
    np.testing.assert_array_equal(estimator(jnp.array([rewards])), np.zeros((1, 3)))
