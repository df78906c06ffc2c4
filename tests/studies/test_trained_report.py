# SPDX-License-Identifier: Apache-2.0
"""Tables and figure of the trained study: differences, intervals that leave out 0, and cost."""

from dataclasses import replace

import pytest

from jaxmoe.study.contenders import Comparison, Contender
from jaxmoe.study.paired import paired_difference
from studies import __main__ as command
from studies.trained_report import format_trained_tables, plot_trained


def comparison(name, values, baseline=None):
    metrics = [{"start": 0.4, "end": x, "grad_norm_p99": 2.0, "ratio_max": 7.0 + x} for x in values]
    difference = None if baseline is None else paired_difference(values, baseline)
    return Comparison(Contender(name), 5e-4, values, difference, metrics)


BASE = [0.2, 0.3, 0.25]
NOTHING = comparison("nothing", BASE)
BETTER = comparison("better", [0.5, 0.59, 0.56], BASE)
SAME = comparison("same", [0.2, 0.31, 0.24], BASE)


def test_the_overview_has_a_row_a_remedy_and_marks_intervals_without_zero():
    results = {"a": [NOTHING, BETTER, SAME], "b": [NOTHING, BETTER]}
    text = format_trained_tables(results, {"nothing": 1.0, "better": 2.0})
    rows = {line.split("|")[1].strip(): line for line in text.splitlines()[:5]}
    assert rows["nothing"] == "| nothing | 0.250 | 0.250 | 1.00x |"
    assert rows["better"].count("**+0.300 (") == 2 and rows["better"].endswith("| 2.00x |")
    assert "**" not in rows["same"] and rows["same"].endswith("|  |  |")
    assert "### b" in text and "| better | 0.0005 | 0.40 | 0.550 | 0.50 0.59 0.56 |" in text


def test_the_figure_is_written(tmp_path):
    plot_trained({"a": [NOTHING, BETTER, SAME]}, tmp_path / "router.png")
    assert (tmp_path / "router.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def stored_runs(monkeypatch):
    calls = []

    def run_bed(bed, folder, **options):
        calls.append((bed.name, options["seeds"], options["steps"]))
        if bed.name == "many_updates":
            raise KeyboardInterrupt
        return [NOTHING, BETTER]

    router, *others = command.TRAINED_STUDIES
    stored = replace(router, run_bed=run_bed, measure_costs=lambda folder, report: {"better": 1.25})
    monkeypatch.setattr(command, "TRAINED_STUDIES", (stored, *others))
    monkeypatch.setattr(command.jax.config, "update", lambda *setting: None)
    return calls


def test_the_command_writes_the_tables_of_each_bed(tmp_path, stored_runs, capsys):
    argv = ["router", "--beds", "two_forwards", "noisy_engine", "--out", str(tmp_path / "out")]
    assert command.main([*argv, "--seeds", "3", "--steps", "7"]) == 0
    assert stored_runs == [("two_forwards", 3, 7), ("noisy_engine", 3, 7)]
    text = (tmp_path / "out" / "router.md").read_text()
    assert "### two_forwards" in text and "### noisy_engine" in text and "| 1.25x |" in text
    assert text in capsys.readouterr().out


def test_ctrl_c_keeps_the_tables_of_the_beds_before_and_says_how_to_continue(
    tmp_path, stored_runs, capsys
):
    argv = ["router", "--beds", "two_forwards", "many_updates", "--out", str(tmp_path)]
    assert command.main(argv) == 130
    assert "the same command continues" in capsys.readouterr().out
    assert "### two_forwards" in (tmp_path / "router.md").read_text()


@pytest.mark.parametrize("setting", [("--seeds", "1"), ("--steps", "0")])
def test_a_wrong_number_is_refused_in_one_line(tmp_path, stored_runs, capsys, setting):
    assert command.main(["router", *setting, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{setting[0]} must be at least" in error and error.count("\n") == 1
    assert not stored_runs
