# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxmoe.study.families import (
    correct_discoveries,
    correct_p_values,
    measure_family,
    measure_power,
    simulate_family,
)
from jaxmoe.study.paired import student_p_values

P_VALUES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7)


def test_holms_correction_is_that_of_its_table():
    # by hand: 4·0.005, 3·0.01, then the larger one before, then 1·0.04 raised to it
    corrected = correct_p_values([0.01, 0.04, 0.03, 0.005])
    np.testing.assert_allclose(corrected, [0.03, 0.06, 0.06, 0.02], rtol=1e-12)
    assert correct_p_values([0.9, 0.8]).tolist() == [1.0, 1.0]
    assert correct_p_values([]).tolist() == correct_discoveries([]).tolist() == []


@given(P_VALUES)
def test_holm_is_closed_testing_with_bonferroni(p_values):
    """The oracle: the largest Bonferroni p of all families that a hypothesis is in."""
    m = len(p_values)
    expected = [0.0] * m
    for size in range(1, m + 1):
        for family in itertools.combinations(range(m), size):
            p_value = min(1.0, size * min(p_values[n] for n in family))
            for n in family:
                expected[n] = max(expected[n], p_value)
    np.testing.assert_allclose(correct_p_values(p_values), expected, rtol=1e-12)


@given(P_VALUES)
def test_discoveries_are_scipys_benjamini_hochberg(p_values):
    expected = stats.false_discovery_control(p_values, method="bh")
    np.testing.assert_allclose(correct_discoveries(p_values), expected, rtol=1e-12)
    assert np.all(correct_discoveries(p_values) <= correct_p_values(p_values) * (1 + 1e-12))


@given(P_VALUES, st.randoms())
def test_corrections_do_not_depend_on_order(p_values, random):
    order = list(range(len(p_values)))
    random.shuffle(order)
    shuffled = [p_values[n] for n in order]
    for correct in (correct_p_values, correct_discoveries):
        np.testing.assert_array_equal(correct(shuffled), correct(p_values)[order])
        rows = correct([p_values, shuffled])
        np.testing.assert_array_equal(rows, [correct(p_values), correct(shuffled)])


def test_contenders_without_effect_are_rarely_significant():
    """Holm keeps the rate of a false one among ten that share a baseline; uncorrected p do not."""
    studies = 4000
    values = np.random.default_rng(2).normal(size=(studies, 11, 8))
    chances = measure_family(values[:, 1:] - values[:, :1])
    allowed = 0.05 + 4 * math.sqrt(0.05 * 0.95 / studies)  # four standard deviations
    assert 0.02 < chances.any_verdict <= chances.any_discovery < allowed
    assert chances.n_intervals[0] > 0.25
    assert list(chances.n_intervals) == sorted(chances.n_intervals, reverse=True)


def test_a_visible_effect_has_its_power():
    values = np.random.default_rng(3).normal(size=(4000, 6, 8))
    differences = values[:, 1:] - values[:, :1]
    visible = measure_family(differences).visible_effect
    assert 0.79 < measure_power(differences, visible) < 0.82
    # a noncentral t test at the level that Bonferroni leaves: Holm's is hardly better
    level, df = 0.05 / 5, 7
    shift = visible / math.sqrt(2) * math.sqrt(8)
    power = stats.nct.sf(stats.t.isf(level / 2, df), df, shift)
    assert power == pytest.approx(0.8, abs=0.04)


def test_a_simulated_table_has_residuals_of_its_own():
    rng = np.random.default_rng(0)
    seeds = rng.normal(0.5, 0.2, 8)
    noise = rng.normal(0.0, 0.03, (9, 8))
    gains = np.arange(9)[:, None] * 0.1
    plain = simulate_family(noise)
    # effects of contenders and seeds are no noise
    shifted = simulate_family(noise + seeds + gains)
    assert shifted.visible_effect == pytest.approx(plain.visible_effect, rel=0.02)
    assert simulate_family(3 * noise).visible_effect == pytest.approx(3 * plain.visible_effect)
    assert plain.any_verdict <= 0.05


def test_p_values_of_many_are_those_of_one():
    differences = np.random.default_rng(0).normal(0.3, 1.0, (2, 3, 9))
    differences[0, 0] = 0.0
    p_values = student_p_values(differences)
    assert p_values[0, 0] == 1.0
    expected = stats.ttest_1samp(differences, 0.0, axis=-1).pvalue
    np.testing.assert_allclose(p_values.ravel()[1:], expected.ravel()[1:], rtol=1e-12)
    assert student_p_values([[0.5]]).tolist() == [1.0]
