# SPDX-License-Identifier: Apache-2.0
"""From rollouts to arrays: which columns are trained on, and which rows are refused."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.batches.batch import padding_frac, rollout_batch, supervised_batch
from jaxmoe.config import ConfigError, EngineError
from jaxmoe.records import UNKNOWN_EXPERT, Prompt, Rollout, StopReason
from jaxmoe.rl.minibatches import pack_batch


def rollout(prompt, tokens, logp, version=7, number=41):
    return Rollout(
        prompt=Prompt(number, "?", tuple(prompt), None),
        tokens=np.array(tokens, np.int32),
        rollout_logp=np.array(logp, np.float32),
        stop=StopReason.STOP_TOKEN,
        weight_versions=np.full(len(tokens), version, np.int32),
    )


def batch_of(*rollouts, length=6, samples=1):
    n = len(rollouts)
    return rollout_batch(rollouts, np.arange(1.0, n + 1), samples=samples, length=length, pad_id=9)


def test_each_column_is_what_it_says():
    batch = batch_of(
        rollout([1, 2, 3], [4, 5], [-0.5, -0.25]), rollout([6], [7], [-1.0], 8), samples=2
    )
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 4, 5, 9], [6, 7, 9, 9, 9, 9]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert batch.segment_ids_BT.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
    assert batch.loss_mask_BT.astype(int).tolist() == [[0, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert batch.rollout_logp_BT.tolist() == [[0, 0, 0, -0.5, -0.25, 0], [0, -1.0, 0, 0, 0, 0]]
    assert batch.rewards_B.tolist() == [1, 2]
    assert batch.routed_experts_BTLA is None
    for name in ("rollout_logp_BT", "rewards_B"):
        assert getattr(batch, name).dtype == np.float32


@pytest.mark.parametrize("logp", [[-1.0], [-1.0, np.nan], [-1.0, -np.inf]])
def test_a_missing_or_broken_log_prob_is_named(logp):
    good = rollout([1], [2], [-1.0])
    with pytest.raises(EngineError, match=r"rollout 1 \(prompt 43\) must carry one finite"):
        batch_of(good, rollout([1], [2, 3], logp, number=43))


@pytest.mark.parametrize("logp", [-1e30, -100.1, 0.5, 7.0])
def test_impossible_log_probs_are_refused(logp):
    with pytest.raises(EngineError, match=r"token 1 \(id 3\) has .*top-k or top-p"):
        batch_of(rollout([1], [2, 3], [-1.0, logp]))
    batch_of(rollout([1], [2, 3], [-99.0, 0.0]))


def test_an_answer_to_an_empty_prompt_is_refused():
    with pytest.raises(EngineError, match="at least one token, got none"):
        batch_of(rollout([], [2, 3], [-1.0, -1.0]))


def test_a_row_may_fill_the_length():
    batch_of(rollout([1, 2, 3], [4, 5], [-1, -1]), length=5)
    with pytest.raises(ConfigError, match=r"\(4\) tokens, got 3 \+ 2\. Try --set"):
        batch_of(rollout([1, 2, 3], [4, 5], [-1, -1]), length=4)


def test_supervised_rows_train_on_the_answers():
    prompts = [Prompt(0, "?", (1, 2), "x"), Prompt(1, "?", (3,), "y")]
    batch = supervised_batch(prompts, [[4], [5, 6]], length=4, pad_id=0)
    assert batch.tokens_BT.tolist() == [[1, 2, 4, 0], [3, 5, 6, 0]]
    assert batch.loss_mask_BT.astype(int).tolist() == [[0, 0, 1, 0], [0, 1, 1, 0]]


def test_the_retained_mass_is_multiplied_back():
    cut = dataclasses.replace(
        rollout([1], [2, 3], [-0.5, -0.25]), log_kept=np.array([-0.125, 0.0], np.float32)
    )
    assert batch_of(cut, length=3).rollout_logp_BT.tolist() == [[0, -0.625, -0.25]]


def test_groups_must_be_equal_and_side_by_side():
    item, two = rollout([1], [2], [-1.0], number=1), rollout([1], [2], [-1.0], number=2)
    batch_of(item, item, two, two, samples=2)
    with pytest.raises(ValueError, match=r"groups must have 2 samples each, got 3 rollouts"):
        batch_of(item, item, two, samples=2)
    with pytest.raises(ValueError, match=r"as neighbours; rollouts 0 to 1 answer prompts \[1, 2\]"):
        batch_of(item, two, item, two, samples=2)


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match=r"finite reward, got 2 for 2: \[1\] are not"):
        rollout_batch(
            [rollout([1], [2], [-1.0])] * 2, np.array([0.0, np.nan]), samples=1, length=4, pad_id=0
        )


NONE = [UNKNOWN_EXPERT] * 2


def routed(prompt, tokens, experts, number=41):
    logp = [-1.0] * len(tokens)
    return dataclasses.replace(
        rollout(prompt, tokens, logp, number=number), routed_experts=np.array(experts)
    )


def test_the_engines_experts_are_included_on_request():
    two = [
        routed([1, 2], [3], [[[0, 1]], [[2, 3]]]),
        routed([1], [2, 3, 4], [[[4, 0]], [[3, 1]], [[2, 1]]]),
    ]
    batch = rollout_batch(two, np.ones(2), samples=1, length=5, pad_id=0, n_experts=5)
    assert batch.routed_experts_BTLA.dtype == np.int8
    assert batch.routed_experts_BTLA[:, :, 0].tolist() == [
        [[0, 1], [2, 3], NONE, NONE, NONE],
        [[4, 0], [3, 1], [2, 1], NONE, NONE],
    ]
    wide = rollout_batch(two, np.ones(2), samples=1, length=5, pad_id=0, n_experts=129)
    assert wide.routed_experts_BTLA.dtype == np.int16
    assert rollout_batch(two, np.ones(2), samples=1, length=5, pad_id=0).routed_experts_BTLA is None


def test_unknown_experts_are_routed_by_the_router():
    item = routed([1, 2], [3], [[NONE], [[2, 3]]])
    batch = rollout_batch([item], np.ones(1), samples=1, length=4, pad_id=0, n_experts=5)
    assert batch.routed_experts_BTLA[0, :, 0].tolist() == [NONE, [2, 3], NONE, NONE]


GOOD = [[[0, 1]], [[2, 3]]]


def stack_after_good(experts):
    """The experts of a rollout in a batch whose first rollout has good ones."""
    bad = routed([1, 2], [3], GOOD, number=43)
    bad = dataclasses.replace(bad, routed_experts=experts)
    both = [routed([1, 2], [3], GOOD), bad]
    batch = rollout_batch(both, np.ones(2), samples=1, length=5, pad_id=0, n_experts=5)
    return batch.routed_experts_BTLA[1, :, 0].tolist()


@pytest.mark.parametrize(
    "experts", [[[[2, -1]], [[0, 1]]], [[[0, 0]], [[0, 1]]], [[[3, 3]], [[0, 1]]]]
)
def test_impossible_experts_are_routed_by_the_router(experts):
    assert stack_after_good(np.array(experts)) == [NONE, [0, 1], NONE, NONE, NONE]


def test_unsigned_marks_are_routed_by_the_router():
    assert stack_after_good(np.array([[[255, 255]], [[0, 1]]], np.uint8))[0] == NONE


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (np.array(GOOD[:1]), "its experts must have shape [2, layers, experts per token], got (1,"),
        (np.array([*GOOD, *GOOD[:1]]), "got (3, 1, 2)"),
        (np.array(GOOD)[:, 0], "got (2, 2)"),
        (np.zeros((2, 1, 0), int), "got (2, 1, 0)"),
        (np.array(GOOD, np.float32), "must be an array of whole numbers, got float32"),
        (np.ones((2, 1, 2), bool), "must be an array of whole numbers, got bool"),
        (np.array([[[0, 1]], [[2, 7]]]), "from 0 to 4, or -1 if unknown; got 7 at token 1"),
        (np.array([[[0, -2]], [[2, 3]]]), "from 0 to 4, or -1 if unknown; got -2 at token 0"),
    ],
)
def test_misplaced_experts_are_refused_by_rollout(experts, message):
    with pytest.raises(EngineError) as error:
        stack_after_good(experts)
    start = "rollout 1 (prompt 43) must have the experts of the 2 tokens that the engine read; "
    assert str(error.value).startswith(start) and message in str(error.value)


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 1), (2, 2, 1)])
def test_experts_of_other_layers_are_not_broadcast(shape):
    experts = np.broadcast_to(np.arange(shape[-1]), shape)
    with pytest.raises(EngineError, match=r"rollout 0 has \[1, 2\] .*, and rollout 1"):
        stack_after_good(experts)


def test_missing_experts_are_refused_with_settings_without_them():
    with pytest.raises(ConfigError, match=r"rollout 1 \(prompt 43\) .* it has none. Try an engine"):
        stack_after_good(None)


def test_padding_is_counted_in_the_models_rows():
    prompts = [Prompt(i, "", (1, 2), None) for i in range(4)]
    batch = supervised_batch(prompts, [[3], [3, 4], [3], [3]], length=8, pad_id=0)
    assert padding_frac(batch) == 1 - 13 / 32  # 3 + 4 + 3 + 3 tokens
    assert padding_frac(pack_batch(batch, 8)) == 1 - 13 / 16  # two rows, of two sequences each
    assert padding_frac(pack_batch(batch, 24)) == 1 - 13 / 24  # one microbatch of three rows


def test_token_rewards_leave_a_remainder_for_the_last():
    paid = replace(rollout([1], [4, 5, 6], [-1.0] * 3), token_rewards=np.array([0.25, 0.0, 0.5]))
    batch = batch_of(paid, rollout([1], [4, 5], [-1.0] * 2))  # rewards 1 and 2
    assert batch.rewards_BT.tolist() == [[0, 0.25, 0, 0.75, 0, 0], [0, 0, 2, 0, 0, 0]]
    assert batch.rewards_B.tolist() == [1, 2] and batch.rewards_BT.dtype == np.float32


@pytest.mark.parametrize("bad", [[1.0], [1.0, np.nan, 0.0], [0.0, np.inf, 0.0], [0.0, 1.0, 0.0]])
def test_rewards_that_no_tokens_can_have(bad):
    mask = np.array([True, False, True])
    r = replace(rollout([1], [4, 5, 6], [-1.0] * 3), token_rewards=np.array(bad), policy_mask=mask)
    with pytest.raises(ValueError, match=r"rollout 0 \(prompt \d+\): token_rewards must be "):
        batch_of(r)
