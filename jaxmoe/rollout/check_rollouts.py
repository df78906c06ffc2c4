# SPDX-License-Identifier: Apache-2.0
"""Checks of rollouts of any engine, before they are scored or trained on. Plain numpy.

jaxmoe/batches/batch.py refuses impossible log-probs when it makes a batch.
Next: jaxmoe/rollout/staleness.py checks which weights sampled them.
"""

from collections.abc import Sequence

import numpy as np

from jaxmoe.config import EngineError
from jaxmoe.records import Prompt, Rollout, find_mask_problem

# nats; two equal samples of a lower log-prob are a fault: e^-50 does not happen in a run
MIN_EQUAL_LOGP_NATS = -50.0
# Probabilities of two tokens after the same text add up to at most 1; an engine without batch
# invariance may report slightly more.
MAX_PAIR_PROBABILITY = 1.1


def check_order(rollouts: Sequence[Rollout], prompts: Sequence[Prompt], *, samples: int) -> None:
    """Raise EngineError unless there is one rollout for each prompt and sample, in this order."""
    expected = [prompt.id for prompt in prompts for _ in range(samples)]
    returned = [r.prompt.id for r in rollouts]
    if returned != expected:
        raise EngineError(
            f"the engine must return {samples} rollouts of each of {len(prompts)} prompts, the "
            f"samples of a prompt as neighbours ({len(expected)} in all); it returned "
            f"{len(returned)}, of prompts {_format_ids(returned)} instead of "
            f"{_format_ids(expected)}."
        )


def check_masks(rollouts: Sequence[Rollout]) -> None:
    """Raise EngineError unless each episode begins and ends with a token of the policy."""
    for i, r in enumerate(rollouts):
        problem = find_mask_problem(r)
        if problem:
            raise EngineError(
                f"{_format_rollout(i, r)}: {problem}. Drop a reply that no token of the policy "
                "follows; without an environment leave policy_mask None."
            )


def check_samples(rollouts: Sequence[Rollout], *, samples: int) -> None:
    """Raise EngineError unless neighbouring samples of a prompt look independent.

    Two conditions must hold for two neighbours:
    - if all their tokens are equal, this must have been likely; an engine that returns a sample
      twice violates it;
    - at the first token in which they differ, after equal tokens of the same weight versions, the
      two probabilities add up to at most 1; an engine that reports zeros, or log-probs of other
      tokens, violates it.
    An environment may reply differently to equal turns. Then neither condition applies to what
    follows.
    """
    for first in range(0, len(rollouts), samples):
        for i in range(first, first + samples - 1):
            _check_pair(i, rollouts[i], rollouts[i + 1])


def check_token_ids(rollouts: Sequence[Rollout], vocab_size: int) -> None:
    """Raise EngineError for ids outside the vocabulary, which a gather would silently clamp."""
    for i, r in enumerate(rollouts):
        bad = np.flatnonzero((r.tokens < 0) | (r.tokens >= vocab_size))
        if bad.size:
            raise EngineError(
                f"{_format_rollout(i, r)}: token ids must be from 0 to {vocab_size - 1}, got "
                f"{r.tokens[bad[0]]} at token {bad[0]}. Check that the engine has the same model "
                "and tokenizer."
            )


def _check_pair(i: int, first: Rollout, second: Rollout) -> None:
    """Raise EngineError unless two neighbouring samples of a prompt look independent."""
    length = min(len(first.tokens), len(second.tokens))
    mask, other_mask = first.sampled_mask[:length], second.sampled_mask[:length]
    differing = np.flatnonzero(
        (first.tokens[:length] != second.tokens[:length]) | (mask != other_mask)
    )
    if not differing.size:
        total = float(np.sum(first.rollout_logp[:length][mask], dtype=np.float64))
        if len(first.tokens) == len(second.tokens) and total < MIN_EQUAL_LOGP_NATS:
            raise EngineError(
                f"{_format_rollout(i, first)}: samples of a prompt must be independent; rollout "
                f"{i + 1} has the same {length} tokens, which happens once in e^{-total:.0f}. "
                "Check that each sample has its own seed, and that none is returned twice."
            )
        return
    t = int(differing[0])
    # The environment's tokens have no probabilities.
    if not (mask[t] and other_mask[t]):
        return
    versions = (r.weight_versions[: t + 1][mask[: t + 1]].tolist() for r in (first, second))
    # The two probabilities are of different distributions then, and may add up to more than 1.
    if next(versions) != next(versions):
        return
    probability = float(np.exp(first.rollout_logp[t]) + np.exp(second.rollout_logp[t]))
    if probability > MAX_PAIR_PROBABILITY:
        raise EngineError(
            f"{_format_rollout(i, first)}: rollout {i + 1} has another token at {t}, and by their "
            f"log-probs ({first.rollout_logp[t]:.4g} and {second.rollout_logp[t]:.4g}) the sum "
            f"of the two probabilities is {probability:.3g}; it must be at most 1. Check that the "
            "engine returns the log-prob of each sampled token, after temperature, top-k and top-p."
        )


def _format_ids(ids: Sequence[int]) -> str:
    return f"{list(ids[:8])}{' …' if len(ids) > 8 else ''}"


def _format_rollout(i: int, rollout: Rollout) -> str:
    return f"rollout {i} (prompt {rollout.prompt.id})"
