# SPDX-License-Identifier: Apache-2.0
"""Episodes whose context is replaced: what the engine reports is what the trainer computes."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.batches.batch import rollout_batch
from jaxmoe.config import EngineError
from jaxmoe.http_engine.packed_rollouts import deserialize_rollouts, serialize_rollouts
from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.records import UNKNOWN_EXPERT, StopReason
from jaxmoe.rollout.native_flow import FlowEngine
from jaxmoe.rollout.replies import NewContext, Reply
from jaxmoe.rollout.turns import Episode
from tests.jaxmoe.rollout.native_episodes import (
    CFG,
    INVARIANT,
    PROMPTS,
    SAMPLING,
    STOPS,
    open_engine,
    weights,
)
from tests.jaxmoe.rollout.scripted_environment import ScriptedEnvironment

EXACT = replace(CFG, numerics="invariant")
LENGTH = 640  # of a row: all contexts of an episode
LONG = replace(SAMPLING, max_new_tokens=80, max_turns=9, max_episode=LENGTH)


class Restarting(ScriptedEnvironment):
    """Every second reply is a new context, shorter or longer than the old one."""

    def reply(self, episode, turn) -> Reply:
        tokens = super().reply(episode, turn)
        if isinstance(tokens, StopReason) or self.counts[episode] % 2 == 0:
            return tokens
        return NewContext(tuple(tokens * (1 + self.counts[episode] % 4)))


@partial(jax.jit, static_argnames=("cfg", "ops"))
def score(params, batch, cfg, ops):
    hidden_BTD, _, recorded = forward(
        params,
        batch.tokens_BT,
        cfg,
        ops,
        positions_BT=batch.positions_BT,
        segment_ids_BT=batch.segment_ids_BT,
    )
    logp_BT = sequence_logprobs(params, hidden_BTD, batch.tokens_BT, cfg, ops)[0]
    return logp_BT, jnp.moveaxis(recorded["experts_BTA"], 0, 2)


def largest_gap(rollouts, cfg, ops):
    """The largest |Δlogp| of the policy's tokens; experts must be equal where they are known."""
    batch = rollout_batch(
        rollouts,
        np.zeros(len(rollouts)),
        samples=4,
        length=LENGTH,
        pad_id=0,
        n_experts=cfg.n_experts,
    )
    logp_BT, experts_BTLA = map(
        np.asarray, score(weights(), jax.tree.map(np.asarray, batch), cfg, ops)
    )
    reported_BTLA = np.asarray(batch.routed_experts_BTLA)
    segments_BT = batch.segment_ids_BT
    is_last_BT = segments_BT != np.pad(segments_BT[:, 1:], ((0, 0), (0, 1)))
    unknown_BT = (reported_BTLA == UNKNOWN_EXPERT).all((2, 3))
    # No layer of the engine read the last token of a context.
    np.testing.assert_array_equal(unknown_BT, is_last_BT | (segments_BT == 0))
    known = ~unknown_BT
    np.testing.assert_array_equal(
        np.sort(reported_BTLA[known], -1), np.sort(experts_BTLA[known], -1)
    )
    return float(np.abs(logp_BT - batch.rollout_logp_BT)[batch.loss_mask_BT].max())


def check_contexts(rollouts):
    assert max(len(r.context_starts) for r in rollouts) >= 2
    for r in rollouts:
        ends = [*r.context_starts, len(r.tokens)]
        starts = [-len(r.prompt.tokens), *r.context_starts]
        assert max(b - a for a, b in zip(starts, ends, strict=True)) <= SAMPLING.max_context
        assert len(r.prompt.tokens) + len(r.tokens) <= LENGTH
        assert not r.sampled_mask[list(r.context_starts)].any()


def test_log_probs_of_all_contexts_are_the_trainers():
    engine = open_engine(keep_experts=True)
    environment = Restarting(97, turns=9, longest=60)
    rollouts = engine.generate(PROMPTS, LONG, seed=4, samples=4, environment=environment)
    check_contexts(rollouts)
    assert largest_gap(rollouts, CFG, plain_ops()) < 1e-5


@pytest.mark.slow
def test_any_schedule_gives_contexts_the_same_bits():
    """Rows of a batch, late replies among them, and refilled rows."""
    sampling = replace(LONG, top_k=50, top_p=0.98)
    engine = open_engine(EXACT, INVARIANT, keep_experts=True)
    own = []
    for prompt in PROMPTS[:4]:
        late = Restarting(97, turns=9, longest=60, delays_s=(0.0, 0.0, 0.2), patience_s=0.05)
        own += engine.generate([prompt], sampling, seed=7, samples=4, environment=late)
    check_contexts(own)
    assert largest_gap(own, EXACT, INVARIANT) == 0.0
    flow = FlowEngine(
        EXACT,
        INVARIANT,
        recompute=True,
        max_prompt_tokens=50,
        max_new_tokens=80,
        max_rows=12,
        max_context=280,
        keep_experts=True,
    )
    flow.load(weights(), 3)
    with closing(flow):
        refilled = []
        for prompt in PROMPTS[:4]:
            environment = Restarting(97, turns=9, longest=60, delays_s=(0.0, 0.1))
            refilled += flow.pin().generate(
                [prompt], sampling, seed=7, samples=4, environment=environment
            )
    for a, b in zip(refilled, own, strict=True):
        assert (a.stop, list(a.context_starts)) == (b.stop, list(b.context_starts))
        for name in ("tokens", "rollout_logp", "routed_experts", "sampled_mask"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)


def turn(n, stop=STOPS[0]):
    tokens = np.r_[np.full(n - 1, 50), stop].astype(np.int32)
    return tokens, np.full(n, -1.0, np.float32), np.zeros(n, np.int32)


def test_limits_of_contexts_name_their_reason():
    limits = replace(SAMPLING, max_new_tokens=40, max_turn_tokens=0, max_episode=60)
    cases = {
        (NewContext((20,) * 20),): (StopReason.CONTEXT_FULL, 0),
        (NewContext((20,) * 12), NewContext((20,) * 12)): (None, 2),
        # The tokens of all contexts: 10 + 5 + 4 · (12 + 5) are more than 60.
        (NewContext((20,) * 12),) * 4: (StopReason.EPISODE_FULL, 2),
        (NewContext((20,) * 12), (20,) * 3): (StopReason.CONTEXT_FULL, 1),
    }
    for replies, (stop, contexts) in cases.items():
        episode = Episode(replace(PROMPTS[0], tokens=(13,) * 10), limits, max_context=20)
        for reply in replies:
            episode.add_turn(*turn(5))
            if not episode.add_reply(reply):
                break
        assert (episode.stop, len(episode.context_starts)) == (stop, contexts)
    # A turn that fills the episode, and not its context, is cut off there.
    episode = Episode(replace(PROMPTS[0], tokens=(13,) * 10), limits, max_context=50)
    episode.add_turn(*turn(10))
    assert episode.add_reply(NewContext((20,) * 30)) and episode.turn_limit == 10
    episode.add_turn(*turn(10, stop=50))
    assert episode.stop is StopReason.EPISODE_FULL


def test_an_empty_context_is_refused():
    episode = Episode(PROMPTS[0], SAMPLING, 280)
    episode.add_turn(*turn(5))
    with pytest.raises(EngineError, match="at least one token"):
        episode.add_reply(NewContext(()))


def test_contexts_survive_serialization():
    episode = Episode(PROMPTS[0], SAMPLING, 280)
    episode.add_turn(*turn(5))
    episode.add_reply(NewContext((30, 31, 32)))
    episode.add_turn(*turn(4))
    episode.stop = StopReason.STOP_TOKEN
    (rollout,), _ = deserialize_rollouts(serialize_rollouts([episode.make_rollout()]))
    assert list(rollout.context_starts) == [5]
    assert rollout.context_before(8) == [30, 31, 32]
    assert rollout.context_before(4) == [*PROMPTS[0].tokens, *rollout.tokens[:4]]
