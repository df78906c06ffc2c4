# SPDX-License-Identifier: Apache-2.0
"""Experts that an engine recorded: which tokens they can be replayed for.

Engines return rows that no router can have chosen: zeros where a fused kernel wrote nothing, zeros
for the tokens of a cached prompt, a mark for tokens that they do not know. Replayed, such a row
would train other experts than were used, without an error. It becomes UNKNOWN_EXPERT, at which the
trainer's router chooses by itself, and is counted. Next: jaxmoe/rl/batch.py lays experts out.
"""

from collections.abc import Sequence

import numpy as np

from jaxmoe.records import UNKNOWN_EXPERT, Rollout, expert_dtype
from jaxmoe.shapes import Metrics

METRIC = "router/unknown_experts_frac"


def mark_unknown_experts(
    experts_TLA: np.ndarray, *, n_experts: int, prompt_tokens: int
) -> np.ndarray:
    """expert_dtype [T, L, A]: a token's experts, distinct in every layer, or UNKNOWN_EXPERT.

    Unknown are: a token with the engine's mark in any layer (-1, or the largest number of an
    unsigned dtype where there is no such expert), or with one expert twice in a layer. With one
    expert a token nothing can be there twice: then a prompt, or an answer, is unknown where expert
    0 is all that it has.
    Raises ValueError for a number that is no expert and no mark.
    """
    experts = experts_TLA.astype(np.int64)
    if experts_TLA.dtype.kind == "u" and np.iinfo(experts_TLA.dtype).max >= n_experts:
        experts[experts_TLA == np.iinfo(experts_TLA.dtype).max] = UNKNOWN_EXPERT
    wrong = (experts < UNKNOWN_EXPERT) | (experts >= n_experts)
    if wrong.any():
        raise ValueError(
            f"experts must be from 0 to {n_experts - 1}, or {UNKNOWN_EXPERT} where they are not "
            f"known; got {experts[wrong][0]}"
        )
    ordered = np.sort(experts, axis=-1)
    unknown_T = (experts == UNKNOWN_EXPERT).any(axis=(1, 2))
    unknown_T |= (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))
    if experts.shape[-1] == 1 and n_experts > 1:
        for part in (slice(prompt_tokens), slice(prompt_tokens, None)):
            if len(experts[part]) > 1 and not experts[part].any():
                unknown_T[part] = True
    experts[unknown_T] = UNKNOWN_EXPERT
    return experts.astype(expert_dtype(n_experts))


def unknown_experts_metric(rollouts: Sequence[Rollout]) -> Metrics:
    """router/unknown_experts_frac: the share of tokens that the engine read and whose experts it
    does not tell, so that they are routed anew; {} where it tells none at all.
    """
    recorded = [r.routed_experts for r in rollouts if r.routed_experts is not None]
    tokens = sum(map(len, recorded))
    if not tokens:
        return {}
    unknown = sum(int((experts == UNKNOWN_EXPERT).all(axis=(1, 2)).sum()) for experts in recorded)
    return {METRIC: unknown / tokens}
