# SPDX-License-Identifier: Apache-2.0
"""Experts that an engine recorded: find tokens for which they cannot be replayed.

Engines return rows that no router can have chosen: zeros where a fused kernel wrote nothing, zeros
for the tokens of a cached prompt, a mark for unknown tokens. Replaying such a row would silently
train the wrong experts. It is replaced by UNKNOWN_EXPERT, where the trainer's router chooses, and
counted. Next: jaxmoe/batches/engine_experts.py puts experts into arrays.
"""

import math
from typing import Any

import numpy as np

from jaxmoe.records import UNKNOWN_EXPERT, expert_dtype

# With one expert per token a row of zeros is valid. A run of them is unknown if routers that use
# all experts alike would choose expert 0 so often with a probability below 2^-16. Where that is
# wrong, the trainer's router chooses expert 0 again.
ZERO_RUN_BITS = 16


def check_recorded_experts(
    experts_TLA: Any, *, tokens: int, n_experts: int, prompt_tokens: int
) -> np.ndarray:
    """Return the experts of a rollout by `mark_unknown_experts`.

    Raises ValueError, with the reason, for an array that cannot be the experts of `tokens` tokens.
    """
    shape = np.shape(experts_TLA)
    if not isinstance(experts_TLA, np.ndarray) or experts_TLA.dtype.kind not in "ui":
        kind = getattr(experts_TLA, "dtype", type(experts_TLA).__name__)
        raise ValueError(f"its experts must be an array of whole numbers, got {kind}")
    if len(shape) != 3 or len(experts_TLA) != tokens or 0 in shape[1:]:
        raise ValueError(
            f"its experts must have shape [{tokens}, layers, experts per token], got {shape}"
        )
    return mark_unknown_experts(experts_TLA, n_experts=n_experts, prompt_tokens=prompt_tokens)


def mark_unknown_experts(
    experts_TLA: np.ndarray, *, n_experts: int, prompt_tokens: int
) -> np.ndarray:
    """Return expert_dtype [T, L, A]: distinct experts in every layer, or UNKNOWN_EXPERT.

    A token is unknown if it has the engine's mark in any layer (-1, or the largest number of an
    unsigned dtype if that is not an expert), or one expert twice in a layer. With one expert per
    token there are no repetitions; then tokens are unknown if all their experts are 0 and there are
    more of them in a row, in a prompt or an answer, than a router chooses (ZERO_RUN_BITS).
    Raises ValueError for a number that is neither an expert nor a mark.
    """
    # An unsigned dtype cannot hold UNKNOWN_EXPERT.
    experts = experts_TLA.astype(np.int64)
    if experts_TLA.dtype.kind == "u" and np.iinfo(experts_TLA.dtype).max >= n_experts:
        experts[experts_TLA == np.iinfo(experts_TLA.dtype).max] = UNKNOWN_EXPERT
    is_invalid = (experts < UNKNOWN_EXPERT) | (experts >= n_experts)
    if is_invalid.any():
        token = int(is_invalid.any(axis=(1, 2)).argmax())
        raise ValueError(
            f"experts must be from 0 to {n_experts - 1}, or {UNKNOWN_EXPERT} if "
            f"unknown; got {experts[is_invalid][0]} at token {token}"
        )
    sorted_experts = np.sort(experts, axis=-1)
    unknown_T = (experts == UNKNOWN_EXPERT).any(axis=(1, 2))
    unknown_T |= (sorted_experts[..., 1:] == sorted_experts[..., :-1]).any(axis=(1, 2))
    if experts.shape[-1] == 1 and n_experts > 1:
        bits_per_token = experts.shape[1] * math.log2(n_experts)
        is_zero_T = np.asarray((experts == 0).all(axis=(1, 2)))
        for part in (slice(prompt_tokens), slice(prompt_tokens, None)):
            unknown_T[part] |= _find_runs(is_zero_T[part], ZERO_RUN_BITS / bits_per_token)
    experts[unknown_T] = UNKNOWN_EXPERT
    return experts.astype(expert_dtype(n_experts))


def _find_runs(is_true_T: np.ndarray, min_length: float) -> np.ndarray:
    """Return True in the runs of True that have at least `min_length` entries."""
    edges = np.flatnonzero(np.diff(is_true_T.astype(np.int8), prepend=0, append=0))
    in_run_T = np.zeros(len(is_true_T), bool)
    for start, end in edges.reshape(-1, 2):
        in_run_T[start:end] = end - start >= min_length
    return in_run_T
