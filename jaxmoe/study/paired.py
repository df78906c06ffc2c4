# SPDX-License-Identifier: Apache-2.0
"""Statistics of paired runs: the same seeds under two settings.

Seeds differ more than settings do, so a setting is compared with another seed by seed.
Next: jaxmoe/study/families.py, many comparisons at once.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binom
from scipy.stats import t as student_t

_MAX_EXACT = 16  # pairs of which all signs are tried


class Interval(NamedTuple):
    """An estimate with its two-sided 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3g} ({self.low:+.3g} to {self.high:+.3g})"


class MedianInterval(NamedTuple):
    """A median with an interval that covers the true one at least at its `confidence`."""

    median: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.median:+.3g} ({self.low:+.3g} to {self.high:+.3g})"


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
    return float(student_p_values(_pairs(values, baseline)))


def student_p_values(differences: Any) -> np.ndarray:
    """Two-sided p of Student's t test along the last axis.

    1 for one difference and for zeros, 0 for equal ones.
    """
    differences = np.asarray(differences, np.float64)
    n = differences.shape[-1]
    if n < 2:
        return np.ones(differences.shape[:-1])
    mean, deviation = differences.mean(axis=-1), differences.std(axis=-1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.abs(mean) * math.sqrt(n) / deviation
    p_values = 2 * student_t.sf(statistic, n - 1)
    return np.where(differences.any(axis=-1), p_values, 1.0)


def paired_median(values: Sequence[float], baseline: Sequence[float]) -> MedianInterval:
    """Median of values[i] − baseline[i] with an exact interval of 95 % or more.

    The k-th smallest to the k-th largest difference, with confidence 1 − 2 · P(Bin(n, ½) < k) and
    the largest k for which that is 95 %. It assumes nothing of the differences but that seeds are
    independent, so it holds where some runs collapse, for which Student's interval of the mean is
    too narrow. With fewer than six pairs it is their range, and `confidence` is below 95 %.
    Raises ValueError for lists of different lengths. Source: Thompson (1936), On confidence ranges
    for the median and other expectation distributions.
    """
    differences = np.sort(_pairs(values, baseline))
    n = len(differences)
    # confidences[k - 1] is that of the k-th smallest to the k-th largest; it falls with k.
    confidences = 1 - 2 * binom.cdf(np.arange((n + 1) // 2), n, 0.5)
    k = max(1, int(np.sum(confidences >= 0.95)))
    low, high = differences[k - 1], differences[n - k]
    median, confidence = np.median(differences), confidences[k - 1]
    return MedianInterval(float(median), float(low), float(high), float(confidence))


def sign_flip_p_value(values: Sequence[float], baseline: Sequence[float]) -> float:
    """Exact two-sided p of the permutation test that exchanges the two runs of a seed.

    The share of all 2ⁿ signs of the differences whose mean is at least as far from 0. It assumes
    only that without an effect a seed's two runs can be exchanged; below 2 / 2ⁿ it cannot be. Of
    more than 16 pairs 65,535 random signs are tried, and the observed ones count as one more.
    Raises ValueError for lists of different lengths. Source: Fisher (1935), The design of
    experiments.
    """
    differences = _pairs(values, baseline)
    n = len(differences)
    if n <= _MAX_EXACT:
        # The signs of the first pair need not be tried: all others mirrored have the same mean.
        signs = np.array([(1.0, *signs) for signs in itertools.product((1.0, -1.0), repeat=n - 1)])
    else:
        rng = np.random.default_rng(0)
        signs = rng.choice([1.0, -1.0], size=(2**_MAX_EXACT, n))
        signs[0] = 1.0
    sums = np.abs(signs @ differences)
    # Equal sums differ by rounding.
    return float(np.mean(sums >= sums[0] - 1e-12 * np.abs(differences).sum()))


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
