# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxmoe.study.paired import (
    paired_difference,
    paired_median,
    paired_p_value,
    paired_ratio,
    sign_flip_p_value,
)


def test_the_difference_is_scipys_paired_t_test():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.3, 1.0, 9), rng.normal(0.0, 1.0, 9)
    difference = paired_difference(list(x), list(y))
    expected = stats.ttest_rel(x, y).confidence_interval(0.95)
    np.testing.assert_allclose((difference.low, difference.high), expected, rtol=1e-12)
    np.testing.assert_allclose(difference.mean, np.mean(x - y), rtol=1e-12)
    p_value = stats.ttest_rel(x, y).pvalue
    np.testing.assert_allclose(paired_p_value(list(x), list(y)), p_value, rtol=1e-12)


def test_equal_pairs_and_one_pair_are_no_evidence():
    assert paired_p_value([0.5, 0.7], [0.5, 0.7]) == paired_p_value([1.0], [0.0]) == 1.0


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=9))
def test_exchanged_signs_are_scipys_permutation_test(differences):
    """Of small whole numbers, so that many sums are equal."""
    expected = stats.permutation_test(
        (np.array(differences, np.float64),),
        np.sum,
        permutation_type="samples",
        n_resamples=np.inf,
    ).pvalue
    p_value = sign_flip_p_value(differences, [0] * len(differences))
    assert p_value == pytest.approx(expected, rel=1e-12)


def test_exchanged_signs_of_many_pairs_are_sampled():
    rng = np.random.default_rng(0)
    x, y = list(rng.normal(0.55, 1.0, 17)), [0.0] * 17
    assert sign_flip_p_value(x, y) == pytest.approx(paired_p_value(x, y), abs=0.01)
    # never 0: the observed signs count
    assert sign_flip_p_value(list(range(1, 41)), [0] * 40) == 2.0**-16


@pytest.mark.parametrize("n", range(6, 21))
def test_the_medians_interval_is_scipys(n):
    differences = list(np.random.default_rng(n).normal(size=n))
    interval = paired_median(differences, [0.0] * n)
    expected = stats.quantile_test(differences, p=0.5).confidence_interval(0.95)
    assert (interval.low, interval.high) == tuple(expected)
    k = sorted(differences).index(interval.low)
    assert interval.confidence == pytest.approx(1 - 2 * stats.binom.cdf(k, n, 0.5), rel=1e-12)
    assert interval.confidence >= 0.95 and interval.median == np.median(differences)


def test_few_pairs_have_their_range():
    interval = paired_median([3.0, 1.0, 2.0, 5.0, 4.0], [0.0] * 5)
    assert (interval.median, interval.low, interval.high) == (3.0, 1.0, 5.0)
    assert interval.confidence == pytest.approx(1 - 2 / 32)
    assert str(interval) == "+3 (+1 to +5)"


def test_collapsed_runs_spoil_the_means_interval_only():
    rng = np.random.default_rng(4)
    trials, n = 1500, 8
    covered_mean = covered_median = 0
    for _ in range(trials):
        x = np.where(rng.random(n) < 1 / 8, 0.0, 0.6 + rng.normal(0, 0.03, n))
        y = 0.6 + rng.normal(0, 0.03, n)
        values, baseline = list(x), list(y)
        student, exact = paired_difference(values, baseline), paired_median(values, baseline)
        covered_mean += student.low <= -0.6 / 8 <= student.high
        # seven eighths of the differences are normal around 0, and an eighth lies far below
        true_median = stats.norm.ppf(3 / 7) * 0.03 * math.sqrt(2)
        covered_median += exact.low <= true_median <= exact.high
    assert covered_mean < 0.75 * trials
    assert covered_median >= 0.98 * trials


@pytest.mark.parametrize("n", [3, 8])
def test_intervals_cover_the_truth_at_their_rate(n):
    rng = np.random.default_rng(1)
    inside_difference = inside_ratio = 0
    trials = 1500
    for _ in range(trials):
        seeds = rng.normal(2.0, 0.3, n)
        y = seeds + rng.normal(0.0, 0.1, n)
        x = 1.5 * seeds + rng.normal(0.0, 0.1, n)
        inside_difference += (d := paired_difference(list(x), list(y))).low <= 1.0 <= d.high
        inside_ratio += (r := paired_ratio(list(x), list(y))).low <= 1.5 <= r.high
    # 95 % of 1,500, four standard deviations of the count
    allowed = 4 * math.sqrt(trials * 0.95 * 0.05)
    assert abs(inside_difference - 0.95 * trials) < allowed
    assert abs(inside_ratio - 0.95 * trials) < allowed


def test_one_pair_says_nothing():
    assert paired_difference([1.0], [0.5])[1:] == (-math.inf, math.inf)
    assert paired_ratio([1.0], [0.5])[1:] == (-math.inf, math.inf)


def test_a_baseline_near_zero_has_no_ratio():
    ratio = paired_ratio([1.0, 1.1, 0.9], [0.1, -0.1, 0.02])
    assert ratio.low == -math.inf and ratio.high == math.inf


@pytest.mark.parametrize("pair", [([1.0], [1.0, 2.0]), ([], [])])
def test_lists_of_different_seeds_are_refused(pair):
    for compare in (
        paired_difference,
        paired_median,
        paired_p_value,
        paired_ratio,
        sign_flip_p_value,
    ):
        with pytest.raises(ValueError, match="the same seeds"):
            compare(*pair)
