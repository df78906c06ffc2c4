# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from scipy import stats

from jaxmoe.study.paired import (
    correct_p_values,
    paired_difference,
    paired_p_value,
    paired_ratio,
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


def test_holms_correction_is_that_of_its_table():
    # by hand: 4·0.005, 3·0.01, then the larger one before, then 1·0.04 raised to it
    corrected = correct_p_values([0.01, 0.04, 0.03, 0.005])
    np.testing.assert_allclose(corrected, [0.03, 0.06, 0.06, 0.02], rtol=1e-12)
    assert correct_p_values([0.9, 0.8]) == [1.0, 1.0] and correct_p_values([]) == []


def test_contenders_without_effect_are_rarely_significant():
    """Holm keeps the rate of a false one among ten that share a baseline; uncorrected p do not."""
    rng = np.random.default_rng(2)
    studies = 400
    p_values = []
    for _ in range(studies):
        baseline, *others = rng.normal(size=(11, 8))
        p_values.append([paired_p_value(list(x), list(baseline)) for x in others])
    false = sum(min(correct_p_values(p)) < 0.05 for p in p_values)
    uncorrected = sum(min(p) < 0.05 for p in p_values)
    # 5 % of the studies, four standard deviations of the count
    assert false <= 0.05 * studies + 4 * math.sqrt(studies * 0.05 * 0.95)
    assert uncorrected > 0.2 * studies


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
    for compare in (paired_difference, paired_p_value, paired_ratio):
        with pytest.raises(ValueError, match="the same seeds"):
            compare(*pair)
