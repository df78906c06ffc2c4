# SPDX-License-Identifier: Apache-2.0
"""One way to make an engine's numbers: whose weights, which config and knobs, over which rows, and
which log-probs it then tells. A hypothesis is a function from one to another.

Next: jaxmoe/reconcile/recompute.py computes them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.reconcile.recompute import Knobs, Scores, knobs_of
from jaxmoe.records import Rollout, Sampling
from jaxmoe.shapes import Params


@dataclass(frozen=True)
class SampledRows:
    """Sampled sequences, padded on the right; one column to spare."""

    tokens_BT: np.ndarray
    segments_BT: np.ndarray
    sampled_BT: np.ndarray  # bool: the engine chose the token
    replay_LBTA: np.ndarray  # int32, -1 where the engine did not say


# (scores, the engine's log_kept) -> the log-probs it would tell, [tokens]
EngineLogp = Callable[[Scores, np.ndarray], np.ndarray]


def whole(s: Scores, _log_kept: np.ndarray) -> np.ndarray:
    """What must hold: over the whole vocabulary, at the temperature."""
    return s.logp_BT


def at_temperature_1(s: Scores, log_kept: np.ndarray) -> np.ndarray:
    return s.raw_BT + log_kept


def twice_kept_mass(s: Scores, log_kept: np.ndarray) -> np.ndarray:
    return s.logp_BT + log_kept


def without_kept_mass(s: Scores, _log_kept: np.ndarray) -> np.ndarray:
    return s.logp_BT - s.log_kept_BT


@dataclass(frozen=True)
class Variant:
    """One way to make the engine's numbers."""

    params: Params
    cfg: ModelConfig
    knobs: Knobs
    rows: SampledRows
    replays: bool = False  # with the engine's experts
    engine_logp: EngineLogp = whole


@dataclass(frozen=True)
class Hypothesis:
    """One fault: its category, what must hold, and what to type."""

    name: str
    category: str
    must: str
    fix: str
    change: Callable[[Variant], Variant]
    exclusive: str = ""  # of two hypotheses with the same one only one can be true
    value: float | None = None  # of a number that was fitted, and how far off it may be
    spread: float = 0.0


def mean_gap(a_N: np.ndarray, b_N: np.ndarray) -> float:
    """mean |a − b|, in float64."""
    return float(np.abs(a_N.astype(np.float64) - b_N).mean())


def sampled_rows(rollouts: Sequence[Rollout], cfg: ModelConfig) -> SampledRows:
    """The rows of some rollouts, and their engine's experts where it told."""
    ends = [len(r.prompt.tokens) + len(r.tokens) for r in rollouts]
    shape = (len(rollouts), max(ends) + 1)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    sampled = np.zeros(shape, bool)
    replay = np.full((cfg.n_layers, *shape, cfg.experts_per_token), -1, np.int32)
    for b, (r, end) in enumerate(zip(rollouts, ends, strict=True)):
        start = len(r.prompt.tokens)
        tokens[b, :start], tokens[b, start:end] = r.prompt.tokens, r.tokens
        segments[b, :end] = 1
        sampled[b, start:end] = True
        if r.routed_experts is not None:
            replay[:, b, : end - 1] = r.routed_experts.transpose(1, 0, 2)
    return SampledRows(tokens, segments, sampled, replay)


def unchanged(params: Params, cfg: ModelConfig, sampling: Sampling, rows: SampledRows) -> Variant:
    """The trainer as it is."""
    return Variant(params, cfg, knobs_of(cfg, sampling.temperature), rows)
