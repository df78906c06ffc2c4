# SPDX-License-Identifier: Apache-2.0
"""Variants of the recomputation: weights, config, knobs, rows, and the log-probs reported.

A hypothesis is a function from one variant to another.
Next: jaxmoe/reconcile/recompute.py computes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.recompute import Knobs, Scores, make_knobs
from jaxmoe.records import Rollout, Sampling
from jaxmoe.shapes import Params


@dataclass(frozen=True)
class SampledRows:
    """Sampled sequences, padded on the right, with one spare column."""

    tokens_BT: np.ndarray
    segments_BT: np.ndarray
    sampled_BT: np.ndarray  # bool: the policy sampled the token
    replay_LBTA: np.ndarray  # int32, -1 where the engine reported none


# (scores, the engine's log_kept) -> the log-probs that it would report, [tokens]
EngineLogp = Callable[[Scores, np.ndarray], np.ndarray]


def logp_full(s: Scores, _log_kept: np.ndarray) -> np.ndarray:
    """Return the correct log-probs: over the full vocabulary, at the temperature."""
    return s.logp_BT


def logp_untempered(s: Scores, log_kept: np.ndarray) -> np.ndarray:
    return s.raw_BT + log_kept


def logp_kept_mass_twice(s: Scores, log_kept: np.ndarray) -> np.ndarray:
    return s.logp_BT + log_kept


def logp_without_kept_mass(s: Scores, _log_kept: np.ndarray) -> np.ndarray:
    return s.logp_BT - s.log_kept_BT


@dataclass(frozen=True)
class Variant:
    """One recomputation of the engine's log-probs."""

    params: Params
    cfg: ModelConfig
    knobs: Knobs
    rows: SampledRows
    replay_experts: bool = False  # uses the engine's experts
    engine_logp: EngineLogp = logp_full


@dataclass(frozen=True)
class Hypothesis:
    """One fault: its category, the requirement that it breaks, and the setting to change."""

    name: str
    category: str
    requirement: str
    fix: str
    change: Callable[[Variant], Variant]
    exclusive: str = ""  # hypotheses with the same value exclude each other
    value: float | None = None  # of a fitted number; `spread` is its uncertainty
    spread: float = 0.0


def mean_gap(a_N: np.ndarray, b_N: np.ndarray) -> float:
    """Return mean |a − b|, in float64."""
    return float(np.abs(a_N.astype(np.float64) - b_N).mean())


def pad_rollouts(rollouts: Sequence[Rollout], cfg: ModelConfig) -> SampledRows:
    """Return the rows of some rollouts, with the engine's experts where it reports them."""
    ends = [len(r.prompt.tokens) + len(r.tokens) for r in rollouts]
    # The spare column is for the fault that an engine puts a token before the prompt.
    shape = (len(rollouts), max(ends) + 1)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    sampled = np.zeros(shape, bool)
    replay = np.full((cfg.n_layers, *shape, cfg.experts_per_token), -1, np.int32)
    for b, (r, end) in enumerate(zip(rollouts, ends, strict=True)):
        start = len(r.prompt.tokens)
        tokens[b, :start], tokens[b, start:end] = r.prompt.tokens, r.tokens
        segments[b, :end] = 1
        sampled[b, start:end] = r.sampled_mask
        if r.routed_experts is not None:
            replay[:, b, : end - 1] = r.routed_experts.transpose(1, 0, 2)
    return SampledRows(tokens, segments, sampled, replay)


def trainer_variant(
    params: Params, cfg: ModelConfig, sampling: Sampling, rows: SampledRows
) -> Variant:
    """Return the trainer's own computation, without a fault."""
    return Variant(params, cfg, make_knobs(cfg, sampling.temperature), rows)
