# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from scipy import stats

from jaxmoe.study.paired import paired_difference, paired_ratio


def test_the_difference_is_scipys_paired_t_test():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.3, 1.0, 9), rng.normal(0.0, 1.0, 9)
    difference = paired_difference(list(x), list(y))
    expected = stats.ttest_rel(x, y).confidence_interval(0.95)
    np.testing.assert_allclose((difference.low, difference.high), expected, rtol=1e-12)
    np.testing.assert_allclose(difference.mean, np.mean(x - y), rtol=1e-12)


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
    for compare in (paired_difference, paired_ratio):
        with pytest.raises(ValueError, match="the same seeds"):
            compare(*pair)
