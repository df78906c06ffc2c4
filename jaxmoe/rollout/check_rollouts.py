# SPDX-License-Identifier: Apache-2.0
"""Checks of every engine's rollouts before they are scored or trained on. Plain numpy.

Log-probs that no float32 softmax has are refused by jaxmoe/rl/batch.py, when a batch is made.
Next: jaxmoe/rollout/staleness.py checks which weights sampled them.
"""

from collections.abc import Sequence

import numpy as np

from jaxmoe.config import EngineError
from jaxmoe.records import Prompt, Rollout

# nats; two samples agree by chance less often than e^-50, which no run will see
MIN_EQUAL_LOGP_NATS = -50.0
# two tokens after the same text; an engine whose batches are not invariant may say a little more
MAX_PAIR_PROBABILITY = 1.1


def check_order(rollouts: Sequence[Rollout], prompts: Sequence[Prompt], *, samples: int) -> None:
    """Raises EngineError unless there is one rollout for each prompt and sample, in this order."""
    expected = [prompt.id for prompt in prompts for _ in range(samples)]
    returned = [r.prompt.id for r in rollouts]
    if returned != expected:
        raise EngineError(
            f"the engine must return {samples} rollouts of each of {len(prompts)} prompts, the "
            f"samples of a prompt as neighbours ({len(expected)} in all); it returned "
            f"{len(returned)}, of prompts {_format_ids(returned)} instead of "
            f"{_format_ids(expected)}."
        )


def check_samples(rollouts: Sequence[Rollout], *, samples: int) -> None:
    """Raises EngineError unless the samples of a prompt, side by side, are drawn independently.

    What must hold of two neighbours, and what an engine does that breaks it:
    - two that agree in every token must have been likely to: none is returned twice;
    - where two part, after equal tokens of one version of the weights, the two tokens'
      probabilities add up to 1 at most. An engine that reports zeros, or log-probs of other
      tokens, breaks this.
    """
    for first in range(0, len(rollouts), samples):
        for i in range(first, first + samples - 1):
            _check_pair(i, rollouts[i], rollouts[i + 1])


def check_token_ids(rollouts: Sequence[Rollout], vocab_size: int) -> None:
    """Raises EngineError for a token that the model does not have: a gather would clamp its id."""
    for i, r in enumerate(rollouts):
        bad = np.flatnonzero((r.tokens < 0) | (r.tokens >= vocab_size))
        if bad.size:
            raise EngineError(
                f"{_format_rollout(i, r)}: token ids must be from 0 to {vocab_size - 1}, got "
                f"{r.tokens[bad[0]]} at token {bad[0]}. Check that the engine has this model and "
                "this tokenizer."
            )


def _check_pair(i: int, one: Rollout, other: Rollout) -> None:
    """Two samples of a prompt that stand side by side."""
    length = min(len(one.tokens), len(other.tokens))
    apart = np.flatnonzero(one.tokens[:length] != other.tokens[:length])
    if not apart.size:
        total = float(np.sum(one.rollout_logp[:length], dtype=np.float64))
        if len(one.tokens) == len(other.tokens) and total < MIN_EQUAL_LOGP_NATS:
            raise EngineError(
                f"{_format_rollout(i, one)}: the samples of a prompt must be independent; rollout "
                f"{i + 1} has the same {length} tokens, which happens once in e^{-total:.0f}. "
                "Check that each sample has a seed of its own, and that none is returned twice."
            )
        return
    t = int(apart[0])
    if one.weight_versions[: t + 1].tolist() != other.weight_versions[: t + 1].tolist():
        return
    probability = float(np.exp(one.rollout_logp[t]) + np.exp(other.rollout_logp[t]))
    if probability > MAX_PAIR_PROBABILITY:
        raise EngineError(
            f"{_format_rollout(i, one)}: rollout {i + 1} has another token at {t}, and by their "
            f"log-probs ({one.rollout_logp[t]:.4g} and {other.rollout_logp[t]:.4g}) the two "
            f"together have probability {probability:.3g}; it must be at most 1. Check that the "
            "engine returns the log-prob of each sampled token, after temperature and cuts."
        )


def _format_ids(ids: Sequence[int]) -> str:
    return f"{list(ids[:8])}{' …' if len(ids) > 8 else ''}"


def _format_rollout(i: int, rollout: Rollout) -> str:
    return f"rollout {i} (prompt {rollout.prompt.id})"
