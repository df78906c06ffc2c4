# SPDX-License-Identifier: Apache-2.0
"""Advantages by turn against loops in float64, on ragged turns with replies between them."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.losses import (
    bootstrapped_gae,
    gigpo,
    gigpo_rloo,
    group_advantages,
    rloo_advantages,
    turn_gae,
    turn_group_advantages,
    turn_return_advantages,
    turn_rloo_advantages,
    whitened_turn_gae,
)
from jaxmoe.losses.turns import number_turns, turn_rewards

P, R, T, J = 2, 3, 23, 4
EPS = 1e-6


OPTIONS = ("discount", "scale_by_std", "step_weight", "eps", "trace", "turn_trace")


@functools.cache
def compiled(fn):
    """Compiled once for each value of an option, since hypothesis calls it many times."""
    names = inspect.signature(fn).parameters
    return jax.jit(fn, static_argnames=[name for name in OPTIONS if name in names])


def draw_episodes(seed: int, max_turns: int = J):
    """Return (mask_BT, ends_BJ, turns of each row as lists of positions)."""
    rng = np.random.default_rng(seed)
    mask_BT, ends_BJ = np.zeros((P * R, T), bool), np.full((P * R, J), -1, np.int32)
    rows = []
    for b in range(P * R):
        t, turns = int(rng.integers(1, 4)), []
        for j in range(int(rng.integers(1, max_turns + 1))):
            length = int(rng.integers(1, 4))
            turns.append(list(range(t, t + length)))
            ends_BJ[b, j] = t + length - 1
            t += length + int(rng.integers(1, 3))  # a reply of the environment
        mask_BT[b, [i for turn in turns for i in turn]] = True
        rows.append(turns)
    return mask_BT, ends_BJ, rows


def draw_rewards(seed: int, rows):
    """Rewards at all tokens, also at those that do not count; whole numbers, some equal."""
    rng = np.random.default_rng(seed + 1)
    rewards_BT = rng.integers(-2, 3, (P * R, T)).astype(np.float32)
    totals = [sum(rewards_BT[b, i] for turn in turns for i in turn) for b, turns in enumerate(rows)]
    return rewards_BT, np.array(totals, np.float32).reshape(P, R)


def list_returns(rewards_BT, rows, discount):
    returns = []
    for b, turns in enumerate(rows):
        later, of_row = 0.0, []
        for turn in reversed(turns):
            later = math.fsum(rewards_BT[b, i] for i in turn) + discount * later
            of_row.insert(0, later)
        returns.append(of_row)
    return returns


def normalise(value, group, *, scale):
    """(value − mean) / (deviation + ε) in float64; 0 in a group of equal values."""
    if len(set(group)) == 1:
        return 0.0
    centred = value - np.mean(group)
    return centred / (np.std(group, ddof=1) + EPS) if scale else centred


def leave_out(value, group):
    others = list(group)
    others.remove(value)
    return value - np.mean(others) if others else 0.0


def spread(by_turn, rows):
    out = np.zeros((P * R, T))
    for b, turns in enumerate(rows):
        for j, turn in enumerate(turns):
            out[b, turn] = by_turn[b][j]
    return out


def same_turn(x, b, j):
    """The turns j of the group of row b."""
    start = b // R * R
    return [x[i][j] for i in range(start, start + R) if len(x[i]) > j]


def expect_by_turn(name, rewards_BT, rows, discount, scale):
    returns = list_returns(rewards_BT, rows, discount)
    rewards = list_returns(rewards_BT, rows, 0.0)
    expected = []
    for b, turns in enumerate(rows):
        if name == "turn_group_advantages":
            parts = [
                normalise(rewards[b][j], same_turn(rewards, b, j), scale=scale)
                for j in range(len(turns))
            ]
            row = [
                math.fsum(discount ** (k - j) * parts[k] for k in range(j, len(turns)))
                for j in range(len(turns))
            ]
        elif name == "turn_rloo_advantages":
            row = [leave_out(returns[b][j], same_turn(returns, b, j)) for j in range(len(turns))]
        else:
            row = [
                normalise(returns[b][j], same_turn(returns, b, j), scale=scale)
                for j in range(len(turns))
            ]
        expected.append(row)
    return spread(expected, rows)


SEEDS = st.integers(0, 10_000)
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@settings(max_examples=12)
@given(SEEDS, DISCOUNTS, st.booleans())
def test_turn_advantages_are_those_of_loops(seed, discount, scale):
    mask_BT, ends_BJ, rows = draw_episodes(seed)
    rewards_BT, rewards_PR = draw_rewards(seed, rows)
    arrays = (rewards_PR, rewards_BT, mask_BT, ends_BJ)
    for fn in (turn_return_advantages, turn_group_advantages, turn_rloo_advantages):
        options = {} if fn is turn_rloo_advantages else {"scale_by_std": scale}
        actual = compiled(fn)(*map(jnp.asarray, arrays), discount=discount, **options)
        expected = expect_by_turn(fn.__name__, rewards_BT, rows, discount, scale)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


@settings(max_examples=12)
@given(SEEDS, DISCOUNTS, st.booleans(), st.sampled_from([0.0, 0.7, 1.0]))
def test_gigpo_compares_turns_of_one_state(seed, discount, scale, weight):
    mask_BT, ends_BJ, rows = draw_episodes(seed)
    rewards_BT, rewards_PR = draw_rewards(seed, rows)
    ids_BJ = np.random.default_rng(seed + 2).integers(-1, 3, ends_BJ.shape).astype(np.int32)
    returns = list_returns(rewards_BT, rows, discount)
    scaled, unbiased = [], []
    for b, turns in enumerate(rows):
        group = list(rewards_PR[b // R])
        total = rewards_PR.reshape(-1)[b]
        episode = normalise(total, group, scale=scale), leave_out(total, group)
        row_scaled, row_unbiased = [], []
        for j in range(len(turns)):
            start = b // R * R
            state = [
                returns[i][k]
                for i in range(start, start + R)
                for k in range(len(rows[i]))
                if ids_BJ[i, k] == ids_BJ[b, j] >= 0
            ]
            step = normalise(returns[b][j], state, scale=scale) if state else 0.0
            row_scaled.append(episode[0] + weight * step)
            step = leave_out(returns[b][j], state) if state else 0.0
            row_unbiased.append(episode[1] + weight * step)
        scaled.append(row_scaled)
        unbiased.append(row_unbiased)
    arrays = tuple(map(jnp.asarray, (rewards_PR, rewards_BT, mask_BT, ends_BJ, ids_BJ)))
    options = {"discount": discount, "step_weight": weight}
    actual = compiled(gigpo)(*arrays, **options, scale_by_std=scale)
    np.testing.assert_allclose(actual, spread(scaled, rows), rtol=2e-5, atol=2e-6)
    actual = compiled(gigpo_rloo)(*arrays, **options)
    np.testing.assert_allclose(actual, spread(unbiased, rows), rtol=2e-5, atol=2e-6)


@settings(max_examples=12)
@given(SEEDS, DISCOUNTS, st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.0, 0.8, 1.0]))
def test_turn_gae_passes_time_between_turns(seed, discount, trace, turn_trace):
    mask_BT, ends_BJ, rows = draw_episodes(seed)
    rewards_BT, _ = draw_rewards(seed, rows)
    rng = np.random.default_rng(seed + 3)
    values_BT = rng.normal(size=(P * R, T)).astype(np.float32)
    bootstrap_B = rng.normal(size=P * R).astype(np.float32)
    expected = np.zeros((P * R, T))
    for b, turns in enumerate(rows):
        value, advantage = float(bootstrap_B[b]), 0.0
        for turn in reversed(turns):
            for i in reversed(turn):
                g, decay = (discount, turn_trace) if i == turn[-1] else (1.0, trace)
                delta = rewards_BT[b, i] + g * value - values_BT[b, i]
                advantage = delta + g * decay * advantage
                value = float(values_BT[b, i])
                expected[b, i] = advantage
    options = {"discount": discount, "trace": trace, "turn_trace": turn_trace}
    arrays = tuple(map(jnp.asarray, (rewards_BT, values_BT, bootstrap_B, mask_BT, ends_BJ)))
    advantages_BT, returns_BT = compiled(turn_gae)(*arrays, **options)
    np.testing.assert_allclose(advantages_BT, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(
        returns_BT, expected + np.where(mask_BT, values_BT, 0), rtol=2e-5, atol=2e-5
    )


def test_whitened_advantages_have_mean_zero():
    mask_BT, ends_BJ, rows = draw_episodes(11)
    rewards_BT, _ = draw_rewards(11, rows)
    arrays = (rewards_BT, rewards_BT / 3, rewards_BT[:, 0], mask_BT, ends_BJ)
    whitened_BT, returns_BT = whitened_turn_gae(*map(jnp.asarray, arrays), discount=0.9)
    plain = turn_gae(*map(jnp.asarray, arrays), discount=0.9)
    values = np.asarray(plain[0])[mask_BT]
    expected = (values - values.mean()) / values.std(ddof=1)
    np.testing.assert_allclose(np.asarray(whitened_BT)[mask_BT], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(returns_BT, plain[1])


@settings(max_examples=8)
@given(SEEDS)
def test_one_turn_gives_the_estimators_without_turns(seed):
    mask_BT, ends_BJ, rows = draw_episodes(seed, max_turns=1)
    rewards_BT, rewards_PR = draw_rewards(seed, rows)
    arrays = tuple(map(jnp.asarray, (rewards_PR, rewards_BT, mask_BT, ends_BJ)))
    grouped = np.where(mask_BT, group_advantages(arrays[0]).reshape(-1, 1), 0.0)
    left_out = np.where(mask_BT, rloo_advantages(arrays[0]).reshape(-1, 1), 0.0)
    for fn, expected in (
        (turn_return_advantages, grouped),
        (turn_group_advantages, grouped),
        (turn_rloo_advantages, left_out),
    ):
        np.testing.assert_array_equal(compiled(fn)(*arrays), expected)
    # all samples of a prompt begin in one state, so both parts of GiGPO are the group's advantage
    states_BJ = jnp.zeros_like(arrays[3])
    np.testing.assert_allclose(
        compiled(gigpo)(*arrays, states_BJ), 2 * grouped, rtol=2e-5, atol=2e-6
    )
    values_BT = jnp.asarray(np.random.default_rng(seed).normal(size=mask_BT.shape), jnp.float32)
    zero_B = jnp.zeros(len(mask_BT))
    by_token = compiled(bootstrapped_gae)(arrays[1], values_BT, zero_B, arrays[2], trace=0.7)
    by_turn = compiled(turn_gae)(arrays[1], values_BT, zero_B, *arrays[2:], trace=0.7)
    np.testing.assert_array_equal(by_turn, by_token)


def test_a_missing_answer_leaves_its_group():
    mask_BT = jnp.asarray([[0, 1, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
    ends_BJ = jnp.asarray([[1, 3], [1, 3], [-1, -1]])
    rewards_BT = jnp.asarray([[0, 1, 9, 2], [0, 3, 9, 0], [0, 0, 0, 0]], jnp.float32)
    rewards_PR = jnp.asarray([[3, 3, jnp.nan]])
    arrays = rewards_PR, rewards_BT, mask_BT, ends_BJ
    actual = compiled(turn_return_advantages)(*arrays, discount=0.0, scale_by_std=False)
    np.testing.assert_array_equal(actual, [[0, -1, 0, 1], [0, 1, 0, -1], [0, 0, 0, 0]])
    actual = compiled(turn_group_advantages)(*arrays, scale_by_std=False)
    np.testing.assert_array_equal(actual, [[0, 0, 0, 1], [0, 0, 0, -1], [0, 0, 0, 0]])
    ids_BJ = jnp.asarray([[0, 1], [0, 2], [0, 1]])  # of the missing answer too
    actual = compiled(gigpo)(*arrays, ids_BJ, discount=0.0, scale_by_std=False)
    np.testing.assert_array_equal(actual, [[0, -1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("fn", [turn_return_advantages, gigpo])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_equal_returns_in_another_order_get_zero(fn, size):
    """Sums of the same rewards in another order differ by rounding in float32."""
    orders = np.array([[21.1, 6.3, 12.7], [12.7, 6.3, 21.1], [6.3, 21.1, 12.7], [12.7, 21.1, 6.3]])
    rewards_BT = jnp.asarray(size * orders, jnp.float32)
    ends_BJ = jnp.broadcast_to(jnp.arange(3), (4, 3))
    states = (jnp.broadcast_to(jnp.arange(3), (4, 3)),) if fn is gigpo else ()
    rewards_PR = jnp.full((1, 4), size * 40.1)
    mask_BT = jnp.ones((4, 3), bool)
    advantages_BT = fn(rewards_PR, rewards_BT, mask_BT, ends_BJ, *states, discount=1.0)
    np.testing.assert_array_equal(advantages_BT[:, 0], 0.0)
    assert np.abs(advantages_BT[:, 1]).max() > 0.5


@pytest.mark.parametrize("fn", [turn_return_advantages, gigpo])
def test_an_infinite_reward_is_not_hidden(fn):
    rewards_BT = jnp.asarray([[0.0, 1.0], [0.0, np.inf], [0.0, 0.5]], jnp.float32)
    ends_BJ = jnp.broadcast_to(jnp.arange(2), (3, 2))
    states = (ends_BJ,) if fn is gigpo else ()
    rewards_PR = jnp.asarray([[1.0, 2.0, 0.5]])  # finite, so that only the turns can show it
    advantages_BT = fn(rewards_PR, rewards_BT, jnp.ones((3, 2), bool), ends_BJ, *states)
    assert not np.isfinite(advantages_BT).all()


def test_a_turn_in_no_other_episode_gets_zero():
    mask_BT = jnp.asarray([[0, 1, 0, 1], [0, 1, 1, 0]], bool)
    ends_BJ = jnp.asarray([[1, 3], [2, -1]])
    rewards_BT = jnp.asarray([[0, 0, 0, 5], [0, 1, 0, 0]], jnp.float32)
    arrays = jnp.asarray([[5.0, 1.0]]), rewards_BT, mask_BT, ends_BJ
    actual = compiled(turn_return_advantages)(*arrays, scale_by_std=False)
    np.testing.assert_array_equal(actual, [[0, 2, 0, 0], [0, -2, -2, 0]])


def test_environment_tokens_have_no_turn_and_no_reward():
    mask_BT, ends_BJ, rows = draw_episodes(7)
    rewards_BT, _ = draw_rewards(7, rows)
    turn_BT = np.asarray(number_turns(jnp.asarray(mask_BT), jnp.asarray(ends_BJ)))
    for b, turns in enumerate(rows):
        expected = np.full(T, -1)
        for j, turn in enumerate(turns):
            expected[turn] = j
        np.testing.assert_array_equal(turn_BT[b], expected)
    changed_BT = np.where(mask_BT, rewards_BT, 1e6)
    for x_BT in (rewards_BT, changed_BT):
        actual = turn_rewards(jnp.asarray(x_BT), jnp.asarray(mask_BT), jnp.asarray(ends_BJ))
        expected = [r + [0] * (J - len(r)) for r in list_returns(rewards_BT, rows, 0.0)]
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (turn_return_advantages, {"discount": 1.1}),
        (turn_group_advantages, {"discount": -0.1}),
        (gigpo, {"step_weight": -1.0}),
        (gigpo, {"eps": 0.0}),
        (turn_gae, {"turn_trace": 2.0}),
    ],
)
def test_an_option_out_of_range_is_refused(fn, options):
    mask_BT, ends_BJ, rows = draw_episodes(0)
    rewards_BT, rewards_PR = draw_rewards(0, rows)
    arrays = {"rewards_BT": rewards_BT, "mask_BT": mask_BT, "turn_ends_BJ": ends_BJ}
    if fn is turn_gae:
        arrays |= {"values_BT": rewards_BT, "bootstrap_B": rewards_BT[:, 0]}
    else:
        arrays["rewards_PR"] = rewards_PR
    if fn is gigpo:
        arrays["state_ids_BJ"] = ends_BJ
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        fn(**{name: jnp.asarray(x) for name, x in arrays.items()}, **options)
