# SPDX-License-Identifier: Apache-2.0
"""Many comparisons with one baseline: corrected p values, and chances by simulation.

Next: jaxmoe/study/contenders.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.study.paired import student_p_values

LEVEL = 0.05  # the chance of a false verdict in a table


def correct_p_values(p_values: Any) -> np.ndarray:
    """Holm's corrected p values of several comparisons, along the last axis, in their order.

    The k-th smallest of m is max over j ≤ k of (m − j + 1) · p_(j), at most 1. Rejecting those
    below a level keeps the chance of one false rejection or more below it, also where the
    comparisons share a baseline. Source: Holm (1979), A simple sequentially rejective multiple test
    procedure.
    """
    ordered, order, m = _sort_last(p_values)
    raised = np.maximum.accumulate(ordered * (m - np.arange(m)), axis=-1)
    return _restore_order(raised, order)


def correct_discoveries(p_values: Any) -> np.ndarray:
    """Benjamini and Hochberg's corrected p values, along the last axis, in their order.

    The k-th smallest of m is min over j ≥ k of m / j · p_(j), at most 1. Of those below a level at
    most that share is false in the mean. Source: Benjamini and Hochberg (1995), Controlling the
    false discovery rate.
    """
    ordered, order, m = _sort_last(p_values)
    raised = ordered * m / np.arange(1, m + 1)
    lowered = np.minimum.accumulate(raised[..., ::-1], axis=-1)[..., ::-1]
    return _restore_order(lowered, order)


@dataclass(frozen=True)
class FamilyChances:
    """Chances in a table of contenders that differ in nothing, and the effect that it can show.

    n_intervals: chance that at least k = 1, 2, … of the single 95 % intervals leave out 0.
    any_verdict: chance of a verdict after Holm's correction.
    any_discovery: chance of one after Benjamini and Hochberg's.
    visible_effect: the smallest one of one contender that has its verdict in 80 % of tables.
    """

    n_intervals: tuple[float, ...]
    any_verdict: float
    any_discovery: float
    visible_effect: float


def simulate_family(
    values: Sequence[Sequence[float]], *, studies: int = 2000, seed: int = 0
) -> FamilyChances:
    """Simulate tables like this one whose contenders differ in nothing.

    values: of the contenders by seed, the baseline first.

    Each simulated value is drawn from the residuals of all `values` after the means of contenders
    and seeds, scaled to their unbiased variance. So collapsed runs come as often as they did, and
    all contenders are compared with one simulated baseline.
    """
    observed = np.asarray(values, np.float64)
    n_contenders, n_seeds = observed.shape
    residuals = observed - observed.mean(axis=1, keepdims=True) - observed.mean(axis=0)
    residuals += observed.mean()
    residuals *= np.sqrt(observed.size / ((n_contenders - 1) * (n_seeds - 1)))
    rng = np.random.default_rng(seed)
    noise = rng.choice(residuals.ravel(), size=(studies, n_contenders, n_seeds))
    return measure_family(noise[:, 1:] - noise[:, :1])


def measure_family(differences: Any) -> FamilyChances:
    """The chances in studies without an effect, given (studies, contenders, seeds)."""
    differences = np.asarray(differences, np.float64)
    p_values = student_p_values(differences)
    counts = np.sum(p_values < LEVEL, axis=-1)
    return FamilyChances(
        tuple(float(np.mean(counts >= k)) for k in range(1, differences.shape[1] + 1)),
        float(np.mean(correct_p_values(p_values).min(axis=-1) < LEVEL)),
        float(np.mean(correct_discoveries(p_values).min(axis=-1) < LEVEL)),
        _find_visible(
            lambda effect: measure_power(differences, effect), float(differences.std()) / 2**0.5
        ),
    )


def measure_power(differences: np.ndarray, effect: float) -> float:
    """The share of the studies where the first contender, better by `effect`, has a verdict."""
    p_values = student_p_values(differences)
    p_values[:, 0] = student_p_values(differences[:, 0] + effect)
    return float(np.mean(correct_p_values(p_values)[:, 0] < LEVEL))


def _find_visible(power: Callable[[float], float], scale: float) -> float:
    """The smallest effect with a power of 80 %, by bisection; inf above 64 standard deviations."""
    low, high = 0.0, 64 * scale
    if power(high) < 0.8:
        return math.inf
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= 0.8 else (middle, high)
    return high


def _sort_last(p_values: Any) -> tuple[np.ndarray, np.ndarray, int]:
    p_values = np.asarray(p_values, np.float64)
    order = np.argsort(p_values, axis=-1, kind="stable")
    return np.take_along_axis(p_values, order, axis=-1), order, p_values.shape[-1]


def _restore_order(ordered: np.ndarray, order: np.ndarray) -> np.ndarray:
    restored = np.empty_like(ordered)
    np.put_along_axis(restored, order, np.minimum(ordered, 1.0), axis=-1)
    return restored
