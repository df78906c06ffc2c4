# SPDX-License-Identifier: Apache-2.0
"""Rows of several contexts: they train as one context does in which nothing was dropped."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from bigram import CFG, MODEL, OPS, start, step_of

from jaxmoe.batches.batch import find_contexts, rollout_batch
from jaxmoe.batches.engine_experts import unknown_experts_metric
from jaxmoe.batches.shared_contexts import choose_shared, measure_beginnings
from jaxmoe.batches.shared_prompts import PromptSharing, share_prompts
from jaxmoe.config import ConfigError, EngineError
from jaxmoe.losses import gae, gspo, seq_mean_token_mean, sequence_is, turn_return_advantages
from jaxmoe.records import UNKNOWN_EXPERT, Prompt, Rollout, StopReason
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.metrics.switches import engine_read_mask
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.terms import value_term
from jaxmoe.rl.turns import add_turns

SAMPLES, LENGTH = 2, 64
PROMPTS = [Prompt(i, "", tuple(range(3 + i, 9 + 3 * i)), None) for i in range(2)]


def make_rollouts(*, replaced):
    """Two turns with a reply between them; if `replaced`, in a new context that repeats all before
    the second turn."""
    rng, rollouts = np.random.default_rng(3), []
    for i in range(4):
        prompt = PROMPTS[i // SAMPLES]
        first, reply, second = (rng.integers(0, 29, n) for n in (4 + i, 3, 6 - i))
        logp = rng.uniform(-4, -3, len(first) + len(second))
        middle = np.r_[prompt.tokens, first, reply] if replaced else reply
        mask = np.r_[np.ones(len(first)), np.zeros(len(middle)), np.ones(len(second))] > 0
        logp_T = np.zeros(len(mask))
        logp_T[mask] = logp
        rollouts.append(
            Rollout(
                prompt,
                np.r_[first, middle, second].astype(np.int32),
                logp_T.astype(np.float32),
                StopReason.STOP_TOKEN,
                np.zeros(len(mask), np.int32),
                policy_mask=mask,
                context_starts=(len(first),) if replaced else (),
            )
        )
    return rollouts


def make_batch(a, *, replaced):
    rollouts = make_rollouts(replaced=replaced)
    rewards = np.array([1.0, 0.25, -0.5, 2.0])
    batch = rollout_batch(rollouts, rewards, samples=SAMPLES, length=LENGTH, pad_id=0)
    return add_turns(batch, rollouts, a, 2)


ALGORITHMS = {
    "grpo": Algorithm(),
    "gspo": Algorithm(
        objective=partial(gspo, clip_low=0.1, clip_high=0.2),
        aggregation=seq_mean_token_mean,
        old_logp="recomputed",
        rollout_correction=(partial(sequence_is, high=2.0),),
    ),
    "turns": Algorithm(advantages=partial(turn_return_advantages, discount=0.9)),
    "critic": Algorithm(
        advantages=partial(gae, trace=0.9, discount=0.95),
        critic="shared",
        terms=(value_term(),),
    ),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_context_that_repeats_everything_changes_nothing(name):
    a, results = ALGORITHMS[name], []
    step = step_of(a, scorer=Scorer(CFG, OPS, critic=a.critic))
    for replaced in (False, True):
        state, metrics = step(start(a, params=MODEL), make_batch(a, replaced=replaced))
        results.append((state.params, metrics["loss"]))
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(y, x, rtol=2e-5, atol=2e-6)
    # The loss is not one that any rows would have.
    moved = jax.tree.map(lambda x, y: float(abs(x - y).max()), results[0][0].policy, MODEL)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_contexts_are_segments_whose_positions_restart():
    batch = make_batch(Algorithm(), replaced=True)
    first, second = len(PROMPTS[0].tokens) + 4, len(PROMPTS[0].tokens) + 7 + 6
    assert batch.segment_ids_BT[0].tolist() == [1] * first + [2] * second + [0] * (
        LENGTH - first - second
    )
    assert batch.positions_BT[0, : first + second].tolist() == [*range(first), *range(second)]
    assert find_contexts(batch.segment_ids_BT)[:3] == [
        (0, 0, first),
        (0, first, first + second),
        (1, 0, first + 1),
    ]


def test_unread_tokens_are_not_counted_as_unknown_experts():
    """No layer of the engine read the last token of a context."""
    batch = make_batch(Algorithm(), replaced=True)
    shape = (*batch.tokens_BT.shape, 1, 2)
    experts = np.broadcast_to(np.array([0, 1], np.int8), shape).copy()
    segments_BT = batch.segment_ids_BT
    is_last_BT = segments_BT != np.pad(segments_BT[:, 1:], ((0, 0), (0, 1)))
    experts[is_last_BT] = UNKNOWN_EXPERT
    batch = replace(batch, routed_experts_BTLA=experts)
    assert unknown_experts_metric(batch) == {"router/unknown_experts_frac": 0.0}
    np.testing.assert_array_equal(engine_read_mask(batch), (segments_BT > 0) & ~is_last_BT)


def test_starts_that_no_context_can_have_are_refused():
    (good, *_) = make_rollouts(replaced=True)
    make = partial(rollout_batch, samples=1, length=LENGTH, pad_id=0)
    for starts in ((0,), (2,), (4, 4), (6, 5), (len(good.tokens),), (-1,)):
        with pytest.raises(EngineError, match="context_starts must rise"):
            make([replace(good, context_starts=starts)], np.ones(1))
    with pytest.raises(ConfigError, match=r"--set rollout\.max_episode_tokens=29"):
        rollout_batch([good], np.ones(1), samples=1, length=20, pad_id=0)


def test_the_beginning_that_saves_most_is_shared():
    """Two groups; contexts begin with other lengths of their prompts."""
    beginnings = [[20, 9], [20, 9, 8], [20], [20, 3]]
    group_B = np.array([0, 0, 1, 1])
    # Group 0: 20 · 1, 9 · 3, 8 · 4 tokens are saved; group 1: 20 · 1, 3 · 2.
    assert choose_shared(beginnings, group_B, 1).tolist() == [8, 8, 20, 20]
    assert choose_shared(beginnings, group_B, 4).tolist() == [8, 8, 20, 20]
    # In blocks of 16 only the prompts themselves share.
    assert choose_shared(beginnings, group_B, 16).tolist() == [16, 16, 16, 16]


def test_beginnings_end_at_the_first_difference():
    segments = np.array([[1] * 6 + [2] * 5 + [3] * 4 + [0]])
    tokens = np.array([[7, 8, 9, 4, 5, 6] + [7, 8, 9, 4, 1] + [7, 8, 1, 4] + [0]])
    experts = np.zeros((1, 16, 2, 2))
    limit = np.array([4])
    mask = np.zeros(segments.shape, bool)
    assert measure_beginnings(segments, mask, [tokens, experts], limit) == [[4, 4, 2]]
    experts[0, 7, 1, 0] = 1  # of the second token of the second context
    assert measure_beginnings(segments, mask, [tokens, experts], limit) == [[4, 1, 2]]
    # One token of a context is its own.
    assert measure_beginnings(segments[:, :9], mask[:, :9], [tokens], limit) == [[4, 2]]
    # The token before a context's first trained one is its own: it has that one's log-prob.
    mask[0, 9:11] = mask[0, 11] = True
    assert measure_beginnings(segments, mask, [tokens], limit) == [[4, 2, 0]]


def test_contexts_need_a_sharing_that_knows_them():
    batch = make_batch(Algorithm(), replaced=True)
    with pytest.raises(ConfigError, match="has_contexts=True"):
        share_prompts(batch, PromptSharing(LENGTH), LENGTH)
