# SPDX-License-Identifier: Apache-2.0
"""Statistics of paired runs: the same seeds under two settings.

Seeds differ more than settings do, so a setting is compared with another seed by seed.
Next: jaxmoe/study/contenders.py.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student_t


class Interval(NamedTuple):
    """An estimate with its two-sided 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ({self.low:+.3g} to {self.high:+.3g})"


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Mean of values[i] − baseline[i] with Student's interval.

    d̄ ± t · s / √n, with s the standard deviation of the differences and n − 1 degrees of freedom.
    The interval is infinite for one pair. Raises ValueError for lists of different lengths.
    """
    differences = _pairs(values, baseline)
    n = len(differences)
    mean = float(differences.mean())
    if n < 2:
        return Interval(mean, -math.inf, math.inf)
    half = _quantile(n) * float(differences.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half)


def paired_p_value(values: Sequence[float], baseline: Sequence[float]) -> float:
    """Two-sided p of Student's t test that the mean of values[i] − baseline[i] is 0.

    1 for one pair, and for differences that are all 0. Raises ValueError for lists of different
    lengths.
    """
    differences = _pairs(values, baseline)
    n = len(differences)
    if n < 2 or not differences.any():
        return 1.0
    deviation = float(differences.std(ddof=1))
    if deviation == 0:
        return 0.0
    return float(2 * student_t.sf(abs(differences.mean()) * math.sqrt(n) / deviation, n - 1))


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p values of several comparisons, in their order.

    The k-th smallest of m is max over j ≤ k of (m − j + 1) · p_(j), at most 1. Rejecting those
    below a level keeps the chance of one false rejection or more below it, also where the
    comparisons share a baseline. Source: Holm (1979), A simple sequentially rejective multiple test
    procedure.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda n: p_values[n])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """mean(values) / mean(baseline) with Fieller's interval for paired normal values.

    {r: |mean(x − r·y)| ≤ t · se(x − r·y)}, a quadratic inequality in r. The interval is infinite
    where the baseline's mean is not significantly different from 0.
    Raises ValueError for lists of different lengths.
    """
    _pairs(values, baseline)
    x, y = np.asarray(values, np.float64), np.asarray(baseline, np.float64)
    n = len(x)
    ratio = float(x.mean() / y.mean())
    if n < 2:
        return Interval(ratio, -math.inf, math.inf)
    # With t² · covariance / n, the inequality is a·r² − 2·b·r + c ≤ 0.
    cov = np.cov(x, y) * _quantile(n) ** 2 / n
    a, b, c = y.mean() ** 2 - cov[1, 1], x.mean() * y.mean() - cov[0, 1], x.mean() ** 2 - cov[0, 0]
    # The inequality's solutions are not a bounded interval.
    if not (a > 0 and b * b > a * c):
        return Interval(ratio, -math.inf, math.inf)
    root = math.sqrt(b * b - a * c)
    return Interval(ratio, float(b - root) / float(a), float(b + root) / float(a))


def _pairs(values: Sequence[float], baseline: Sequence[float]) -> np.ndarray:
    if len(values) != len(baseline) or not values:
        raise ValueError(
            "paired values must be two lists of the same seeds, at least one, got "
            f"{len(values)} and {len(baseline)} values."
        )
    return np.asarray(values, np.float64) - np.asarray(baseline, np.float64)


def _quantile(n: int) -> float:
    """Student's t for the two-sided 95 % interval of n differences."""
    return float(student_t.ppf(0.975, n - 1))
