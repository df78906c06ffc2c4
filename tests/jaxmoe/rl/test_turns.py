# SPDX-License-Identifier: Apache-2.0
"""The turns of a batch, from rollouts to advantages of a step."""

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, OPS, SGD, B, Bigram, R, make_batch, start, step_of
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import ConfigError
from jaxmoe.losses import gigpo, turn_return_advantages, whitened_turn_gae
from jaxmoe.records import Prompt, Rollout, StopReason, split_by_turn
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.terms import value_term
from jaxmoe.rl.turns import add_turns, find_turn_ends, number_states
from jaxmoe.rl.update import jit_step
from jaxmoe.rollout.episode_metrics import turn_reward_metrics
from tests.jaxmoe.algorithm_configs import config

J = 3
KEYS = (("a", "b"), ("a", "c"), ("a", None), ("b", "a"), ("a",), ("a", "b"), ("c", "b"), (None,))


def make_rollout(keys=(), turns=((0, 2), (3, 5)), placed=None, prompt=0):
    mask = np.zeros(turns[-1][1], bool)
    for start_, end in turns:
        mask[start_:end] = True
    zeros = np.zeros(len(mask), np.int32)
    return Rollout(
        Prompt(prompt, "", (1,), None),
        zeros,
        zeros.astype(np.float32),
        StopReason.STOP_TOKEN,
        zeros,
        policy_mask=mask,
        token_rewards=None if placed is None else np.asarray(placed, float),
        state_keys=keys,
    )


def turned_batch(a, keys=KEYS):
    """The batch of `bigram`, whose rows have one or two turns, paid at some of their ends."""
    batch = make_batch()
    rewards_BT = np.where(batch.loss_mask_BT, np.arange(B * 12).reshape(B, 12) % 5 - 2.0, 0.0)
    batch = replace(
        batch,
        rewards_B=rewards_BT.sum(axis=1).astype(np.float32),
        rewards_BT=rewards_BT.astype(np.float32),
    )
    return add_turns(batch, [make_rollout(k) for k in keys], a, J)


@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4))
def test_turn_ends_are_those_of_runs(rows):
    mask_BT = np.array(rows)
    ends_BJ = find_turn_ends(mask_BT, 5)
    for row, ends in zip(rows, ends_BJ, strict=True):
        expected = [t for t in range(9) if row[t] and (t == 8 or not row[t + 1])]
        assert ends.tolist() == expected + [-1] * (5 - len(expected))
    most = max((ends_BJ >= 0).sum(axis=1))
    assert find_turn_ends(mask_BT).shape[1] == max(most, 1)


def test_a_row_with_more_turns_is_refused():
    with pytest.raises(ValueError, match=r"may have 1 turns .*row 1 has 2"):
        find_turn_ends(np.array([[True, False, False], [True, False, True]]), 1)


def test_states_are_equal_within_a_prompt_alone():
    ids_BJ = number_states([("x", None, "y"), ("y", "x", "y", "x"), ("y",), ()], 2, 3)
    assert ids_BJ.tolist() == [[0, -1, 1], [1, 0, 1], [0, -1, -1], [-1, -1, -1]]


def test_only_the_arrays_that_are_taken_are_added():
    plain = turned_batch(Algorithm())
    assert plain.turn_ends_BJ is None and plain.state_ids_BJ is None
    turned = turned_batch(Algorithm(advantages=turn_return_advantages))
    assert turned.turn_ends_BJ.shape == (B, J) and turned.state_ids_BJ is None
    stated = turned_batch(Algorithm(advantages=gigpo))
    # row 5 has no token after the tool's, so it has one turn and one state
    assert stated.state_ids_BJ.shape == (B, J) and (stated.state_ids_BJ[:, 2] == -1).all()
    assert ((stated.state_ids_BJ >= 0) <= (stated.turn_ends_BJ >= 0)).all()


def test_an_environment_without_states_is_one_line():
    with pytest.raises(ConfigError, match=r'Return info\["state_key"\] from reset and step'):
        turned_batch(Algorithm(advantages=gigpo), keys=B * [(None, None)])


@pytest.mark.parametrize(
    "fn", [turn_return_advantages, functools.partial(gigpo, discount=0.5)], ids=["returns", "gigpo"]
)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_trains_by_turn(fn, minibatches):
    a = Algorithm(advantages=fn, minibatches=minibatches, old_logp="recomputed")
    batch, parts = split_minibatches(turned_batch(a), a, seed=(0, 1))
    step = jit_step(tx=SGD, algorithm=a, scorer=Bigram(CFG, OPS))
    _, _, stats = step(start(a), batch, parts)
    arrays = {
        "rewards_PR": jnp.asarray(batch.rewards_B.reshape(-1, R)),
        "rewards_BT": jnp.asarray(batch.rewards_BT),
        "mask_BT": jnp.asarray(batch.loss_mask_BT),
        "turn_ends_BJ": jnp.asarray(batch.turn_ends_BJ),
        "state_ids_BJ": batch.state_ids_BJ,
    }
    taken = {name: arrays[name] for name in a.array_names.advantages}
    expected = fn(**{name: jnp.asarray(x) for name, x in taken.items()})
    np.testing.assert_allclose(stats.advantages_BT, expected, rtol=1e-5, atol=1e-6)
    expected_BT = np.where(batch.loss_mask_BT, expected, np.nan)
    assert (np.nanmin(expected_BT, axis=1) < np.nanmax(expected_BT, axis=1)).any()


def test_a_critic_learns_by_turn():
    a = Algorithm(
        advantages=whitened_turn_gae,
        critic="shared",
        old_logp="recomputed",
        terms=(value_term(),),
    )
    _, metrics = step_of(a)(start(a), turned_batch(a))
    assert np.isfinite(float(metrics["loss"]))


def test_turns_of_another_mask_are_refused():
    a = Algorithm(advantages=turn_return_advantages)
    batch = turned_batch(a)
    with pytest.raises(ConfigError, match=r"Try find_turn_ends\(batch.loss_mask_BT\)"):
        step_of(a)(start(a), replace(batch, turn_ends_BJ=batch.turn_ends_BJ + 1))
    with pytest.raises(ConfigError, match=r"must be \[8, J\]"):
        step_of(a)(start(a), replace(batch, turn_ends_BJ=batch.turn_ends_BJ[:3]))
    with pytest.raises(ConfigError, match="takes turn_ends_BJ, which this step does not have"):
        step_of(a)(start(a), replace(batch, turn_ends_BJ=None))


@pytest.mark.parametrize("name", ["turn_return_advantages", "turn_group_advantages", "gigpo"])
def test_credit_by_turn_without_turns_is_one_line(name):
    with pytest.raises(ConfigError, match="Turns need an environment or tools"):
        algorithm_from_config(config(advantages=name))


def test_rewards_by_turn_add_up_to_the_answers():
    placed = [0.0, 0.5, 0.0, 0.0, 0.25]
    assert split_by_turn(make_rollout(placed=placed), 1.0) == [0.5, 0.5]
    assert split_by_turn(make_rollout(), 1.0) == [0.0, 1.0]


def test_metrics_of_turns_are_means_over_their_rollouts():
    rollouts = [
        make_rollout(placed=[0.0, 0.5, 0.0, 0.0, 0.0]),
        make_rollout(turns=((0, 2),)),
        make_rollout(),
    ]
    metrics = turn_reward_metrics(rollouts, np.array([1.5, 0.25, np.nan]))
    assert metrics == {"reward/turn/1": 0.375, "reward/turn/2": 1.0}
    assert turn_reward_metrics(rollouts[1:], np.ones(2)) == {}
