# SPDX-License-Identifier: Apache-2.0
"""Host-side records that pass between data, rollout and training: plain Python and numpy.

Token ids made by an engine are the truth: nothing here is ever re-tokenised.
Next: jaxmoe/rl/batch.py turns rollouts into the arrays of a training step.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

UNKNOWN_EXPERT = -1  # where no engine has routed a token: a replaying router chooses by itself


class StopReason(StrEnum):
    """Why a rollout ended."""

    STOP_TOKEN = "stop_token"  # the policy chose a stop token; it is the last token
    MAX_TOKENS = "max_tokens"  # the budget of new tokens ran out: a truncated answer


@dataclass(frozen=True)
class Prompt:
    """One question, rendered and tokenised once."""

    id: int  # row in the source
    text: str
    tokens: tuple[int, ...]
    answer: str | None  # the stored solution; None where only a checker exists


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 cut nothing off."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Rollout:
    """One sampled continuation; every array has one entry per new token."""

    prompt: Prompt
    tokens: np.ndarray  # int32 [T], the stop token included where one was drawn
    rollout_logp: np.ndarray  # float32 [T], of the distribution the token was drawn from
    stop: StopReason
    weight_versions: np.ndarray  # int32 [T], of the weights each token was drawn with
    log_kept: np.ndarray | None = None  # float32 [T], log of the mass that top-k and top-p kept
    # expert_dtype [P+T-1, L, A] of the engine's routers, prompt first, where it tells; the last
    # token was read by no layer. UNKNOWN_EXPERT at all places of a token that it does not tell
    routed_experts: np.ndarray | None = None


def expert_dtype(n_experts: int) -> np.dtype:
    """The smallest that holds an expert's number and `UNKNOWN_EXPERT`: int8 up to 128 experts."""
    return np.dtype(np.int8 if n_experts <= 128 else np.int16)
