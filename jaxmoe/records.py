# SPDX-License-Identifier: Apache-2.0
"""Host-side records that data, rollouts and training exchange: plain Python and numpy.

The engine's token ids are used as they are; text is never tokenised again.
Next: jaxmoe/rl/batch.py converts rollouts to the arrays of a training step.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

UNKNOWN_EXPERT = -1  # the engine did not report it: the trainer's router chooses


class StopReason(StrEnum):
    """The reason for the end of a rollout."""

    STOP_TOKEN = "stop_token"  # the policy chose a stop token; it is the last token
    MAX_TOKENS = "max_tokens"  # the answer was truncated at max_new_tokens


@dataclass(frozen=True)
class Prompt:
    """One question, rendered and tokenised once."""

    id: int  # row in the source
    text: str
    tokens: tuple[int, ...]
    answer: str | None  # the stored solution; None if there is only a checker


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Rollout:
    """One sampled continuation; every array has one entry per new token."""

    prompt: Prompt
    tokens: np.ndarray  # int32 [T], including the stop token if one was sampled
    rollout_logp: np.ndarray  # float32 [T], of the distribution that the token was sampled from
    stop: StopReason
    weight_versions: np.ndarray  # int32 [T], of the weights that sampled each token
    log_kept: np.ndarray | None = None  # float32 [T], log of the mass that top-k and top-p kept
    # expert_dtype [P+T-1, L, A] of the engine's routers, prompt first, if it reports them; no layer
    # read the last token. An unknown token has UNKNOWN_EXPERT in all places.
    routed_experts: np.ndarray | None = None


def expert_dtype(n_experts: int) -> np.dtype:
    """Return the smallest dtype for expert indices and UNKNOWN_EXPERT: int8 up to 128 experts."""
    return np.dtype(np.int8 if n_experts <= 128 else np.int16)
