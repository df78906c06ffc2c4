# SPDX-License-Identifier: Apache-2.0
"""Experts that an engine recorded: find tokens for which they cannot be replayed.

Engines return rows that no router can have chosen: zeros where a fused kernel wrote nothing, zeros
for the tokens of a cached prompt, a mark for unknown tokens. Replaying such a row would silently
train the wrong experts. It is replaced by UNKNOWN_EXPERT, where the trainer's router chooses, and
counted. Next: jaxmoe/rl/batch.py puts experts into arrays.
"""

from collections.abc import Sequence

import numpy as np

from jaxmoe.records import UNKNOWN_EXPERT, Rollout, expert_dtype
from jaxmoe.shapes import Metrics

METRIC = "router/unknown_experts_frac"


def mark_unknown_experts(
    experts_TLA: np.ndarray, *, n_experts: int, prompt_tokens: int
) -> np.ndarray:
    """Return expert_dtype [T, L, A]: distinct experts in every layer, or UNKNOWN_EXPERT.

    A token is unknown if it has the engine's mark in any layer (-1, or the largest number of an
    unsigned dtype if that is not an expert), or one expert twice in a layer. With one expert per
    token there are no repetitions; then a prompt or an answer is unknown if all its experts are 0.
    Raises ValueError for a number that is neither an expert nor a mark.
    """
    # An unsigned dtype cannot hold UNKNOWN_EXPERT.
    experts = experts_TLA.astype(np.int64)
    if experts_TLA.dtype.kind == "u" and np.iinfo(experts_TLA.dtype).max >= n_experts:
        experts[experts_TLA == np.iinfo(experts_TLA.dtype).max] = UNKNOWN_EXPERT
    is_invalid = (experts < UNKNOWN_EXPERT) | (experts >= n_experts)
    if is_invalid.any():
        raise ValueError(
            f"experts must be from 0 to {n_experts - 1}, or {UNKNOWN_EXPERT} if "
            f"unknown; got {experts[is_invalid][0]}"
        )
    sorted_experts = np.sort(experts, axis=-1)
    unknown_T = (experts == UNKNOWN_EXPERT).any(axis=(1, 2))
    unknown_T |= (sorted_experts[..., 1:] == sorted_experts[..., :-1]).any(axis=(1, 2))
    if experts.shape[-1] == 1 and n_experts > 1:
        for part in (slice(prompt_tokens), slice(prompt_tokens, None)):
            if len(experts[part]) > 1 and not experts[part].any():
                unknown_T[part] = True
    experts[unknown_T] = UNKNOWN_EXPERT
    return experts.astype(expert_dtype(n_experts))


def unknown_experts_metric(rollouts: Sequence[Rollout]) -> Metrics:
    """Metric router/unknown_experts_frac: share of tokens whose experts the engine did not report.

    Counted are the tokens of prompts and those that the policy sampled, not the environment's.
    The trainer's router chooses for unknown ones. {} if no rollout has experts.
    """
    recorded = [_select_experts(r, r.routed_experts) for r in rollouts
                if r.routed_experts is not None]  # fmt: skip
    tokens = sum(map(len, recorded))
    if not tokens:
        return {}
    unknown = sum(int((experts == UNKNOWN_EXPERT).all(axis=(1, 2)).sum()) for experts in recorded)
    return {METRIC: unknown / tokens}


def _select_experts(r: Rollout, experts_TLA: np.ndarray) -> np.ndarray:
    """Return the experts of the prompt and of the policy's tokens."""
    if r.policy_mask is None:
        return experts_TLA
    is_counted = np.concatenate([np.ones(len(r.prompt.tokens), bool), r.policy_mask])
    return experts_TLA[is_counted[: len(experts_TLA)]]
