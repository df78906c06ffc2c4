# SPDX-License-Identifier: Apache-2.0
"""The referee: null studies through the frame, coverage, and its tables."""

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.study.tables import is_verdict
from studies import __main__ as command
from studies.referee import (
    ONE_SEED,
    SCENARIOS,
    Scenario,
    measure_coverage,
    measure_scenario,
    simulate_study,
)

SMALL = Scenario("small", 8, 0.03, 0.1)


@pytest.mark.parametrize("scenario", [SMALL, replace(SMALL, collapse=1 / 8)])
def test_null_studies_rarely_have_a_verdict(scenario):
    studies = 60
    share, chances, _ = measure_scenario(scenario, studies)
    assert share == chances.any_verdict
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / studies)


def test_rates_by_one_seed_mislead():
    share, _, _ = measure_scenario(replace(SMALL, tuning_seeds=1), 40)
    assert share > 0.3


def test_a_planted_effect_is_a_verdict():
    _, chances, power = measure_scenario(replace(SMALL, effect=0.2), 40)
    assert power > 0.9 and 0.06 < chances.visible_effect < 0.12


def test_simulated_studies_have_the_noise_of_their_scenario():
    scenario = replace(SMALL, rows=40, seeds=30, tuning_seeds=1, curvature=0.0)
    comparisons = simulate_study(scenario, 0)
    values = np.array([c.values for c in comparisons])
    residuals = values - values.mean(axis=0)
    assert residuals.std() == pytest.approx(0.03, rel=0.1)
    assert values.mean(axis=0).std() == pytest.approx(0.06, rel=0.4)
    assert not any(map(is_verdict, comparisons[:1]))
    collapsed = simulate_study(replace(scenario, collapse=1 / 8), 0)
    assert np.mean(np.array([c.values for c in collapsed]) == 0.0) == pytest.approx(1 / 8, abs=0.03)


def test_only_the_medians_interval_holds_under_collapse():
    student, exact = measure_coverage((1 / 8, 0.0), 8, 500)
    assert student < 0.75 and exact > 0.97
    student, exact = measure_coverage((0.0, 0.0), 8, 500)
    assert student == pytest.approx(0.95, abs=0.03) and exact > 0.97


def test_the_command_prints_all_scenarios(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("studies.referee.SCENARIOS", SCENARIOS[2:5])
    assert command.main(["referee", "--studies", "4", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "referee.md").read_text()
    for scenario in (*SCENARIOS[2:5], ONE_SEED):
        assert f"| {scenario.name} | {scenario.rows} |" in text
    assert text.count("| these together |") == 1 and "one in eight, of one side | 8 |" in text
