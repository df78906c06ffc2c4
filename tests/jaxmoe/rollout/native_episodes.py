# SPDX-License-Identifier: Apache-2.0
"""A small native engine for episodes, and checks of what it samples."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.model.ops import invariant_ops
from jaxmoe.records import Prompt, Sampling
from jaxmoe.rollout.native import NativeEngine
from tests.jaxmoe.random_weights import random_weights
from tests.jaxmoe.small_models import SEVEN_EXPERTS as SMALL

CFG = replace(SMALL, vocab_multiple=64)
INVARIANT = invariant_ops(plain_ops())
STOPS = tuple(range(5, 12))
SAMPLING = Sampling(
    max_new_tokens=80, stop_ids=STOPS, max_turns=5, max_turn_tokens=25, max_context=280
)
PROMPTS = [
    Prompt(i, "", tuple(np.random.default_rng(i).integers(12, 97, 3 + 5 * i).tolist()), None)
    for i in range(9)
]


@jax.jit
def weights():
    return random_weights(CFG, 0)


def open_engine(cfg=CFG, ops=None, **settings):
    sizes: dict[str, Any] = dict(
        max_prompt_tokens=50, max_new_tokens=80, max_rows=36, max_context=280
    )
    engine = NativeEngine(cfg, ops or plain_ops(), **sizes | settings)
    engine.load(weights(), 3)
    return engine


@partial(jax.jit, static_argnames=("cfg", "ops"))
def score(params, tokens_BT, segments_BT, cfg, ops):
    hidden_BTD, _, recorded = forward(params, tokens_BT, cfg, ops, segment_ids_BT=segments_BT)
    logp_BT = sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops)[0]
    return logp_BT, jnp.moveaxis(recorded["experts_BTA"], 0, 2)


def trainer_view(rollouts, cfg, ops, length=288):
    tokens, segments = np.zeros((2, len(rollouts), length), np.int32)
    for i, r in enumerate(rollouts):
        row = [*r.prompt.tokens, *r.tokens]
        tokens[i, : len(row)], segments[i, : len(row)] = row, 1
    return map(np.asarray, score(weights(), tokens, segments, cfg, ops))


def largest_gap(rollouts, cfg, ops, length=288):
    """The largest |Δlogp| over the policy's tokens; experts must be equal at all tokens."""
    logp_BT, experts_BTLA = trainer_view(rollouts, cfg, ops, length)
    gaps = []
    for r, logp_T, experts_TLA in zip(rollouts, logp_BT, experts_BTLA, strict=True):
        start = len(r.prompt.tokens)
        gap_T = np.abs(logp_T[start : start + len(r.tokens)] - r.rollout_logp)
        gaps.append(gap_T[r.sampled_mask].max())
        if r.routed_experts is not None:
            read = start + len(r.tokens) - 1
            assert r.routed_experts.shape[0] == read
            np.testing.assert_array_equal(
                np.sort(r.routed_experts, -1), np.sort(experts_TLA[:read], -1)
            )
    return max(gaps)


def check_structure(rollouts, environment, max_context=SAMPLING.max_context):
    """The ids of an episode are those that the environment saw and wrote, in order."""
    batches = {}
    for episode, turn in environment.calls:
        batches.setdefault(episode, []).append(turn)
    for i, r in enumerate(rollouts):
        turns = [tuple(r.tokens[start:end].tolist()) for start, end in r.turns]
        assert r.sampled_mask[0] and r.sampled_mask[-1]
        # A truncated turn is not shown to the environment.
        complete = [turn for turn in turns if turn[-1] in STOPS]
        assert complete == batches.get(i, [])
        assert all(token not in STOPS for turn in turns for token in turn[:-1])
        assert r.n_sampled <= SAMPLING.max_new_tokens
        assert len(r.prompt.tokens) + len(r.tokens) <= max_context
        assert (r.rollout_logp[~r.sampled_mask] == 0).all()
