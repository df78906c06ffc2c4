# SPDX-License-Identifier: Apache-2.0
"""The command of studies on beds: sections, figure, what continues, and how long it takes."""

import json
from dataclasses import replace

import pytest

from jaxmoe.study.contenders import Comparison, Contender, compare_values
from studies import __main__ as command
from studies.bed_study import BedRuns, BedStudy, count_bed_runs, format_beds
from studies.mxfp4_trained import MXFP4
from studies.router_trained import ROUTER
from studies.trained_report import format_advice, plot_trained

BASE = [0.2, 0.3, 0.25, 0.27]


def compare(**rows):
    rows = {"nothing": BASE, **rows}
    comparisons = [
        Comparison(
            Contender(name),
            (),
            values,
            [{"start": 0.4, "end": x, "grad_norm_p99": 2.0, "ratio_max": 7.0 + x} for x in values],
        )
        for name, values in rows.items()
    ]
    return compare_values(comparisons, list(rows.values()))


BETTER = {"better": [0.5, 0.59, 0.56, 0.57]}
RESULTS = {"a": compare(**BETTER, same=[0.2, 0.31, 0.24, 0.27]), "b": compare(**BETTER)}


def test_the_overview_has_a_row_per_remedy():
    text = format_beds(ROUTER, RESULTS, {"nothing": 1.0, "better": 2.0})
    rows = {line.split("|")[1].strip(): line for line in text.splitlines()[2:7]}
    assert rows["nothing"] == "| nothing | 0.255 | 0.255 | 1.00x |"
    assert rows["better"].count("**+0.3 (") == 2 and rows["better"].endswith("| 2.00x |")
    assert "**" not in rows["same"] and rows["same"].endswith("|  |  |")
    assert "### b\n\n`python -m studies router --beds b`. nothing starts at 0.400." in text
    assert text.splitlines()[12].endswith("| by seed | gradient norm, p99 | largest ratio |")
    assert "cost of a step" not in format_beds(ROUTER, RESULTS)


def test_advice_is_given_by_bed():
    text = format_advice(RESULTS)
    assert text.count("**Shown to be better than nothing**: better +0.3 (") == 2
    assert "On `a`:" in text and "- Open: same." in text


def test_the_figure_is_written(tmp_path):
    plot_trained(RESULTS, tmp_path / "router.png")
    assert (tmp_path / "router.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def stored_runs(monkeypatch):
    """A study whose runs cost nothing, and which is stopped on its third bed."""
    calls = []

    def train(programs, seed, weights, rate):
        bed, steps, settings = programs
        if bed == "many_updates":
            raise KeyboardInterrupt
        calls.append((bed, steps, settings, rate, seed))
        end = (0.5 if settings else 0.4) + 0.01 * seed % 0.07 - abs(rate - 2e-3)
        metrics = {"start": 0.4, "end": end, "grad_norm_p99": 1.0, "ratio_max": 2.0}
        return metrics | {"rewards": [0.1]}

    study = BedStudy(
        "router",
        "",
        {name: name for name in ("two_forwards", "noisy_engine", "many_updates")},
        lambda bed: [Contender("nothing", (), (1e-3, 2e-3)), Contender("R3", ("x",), (1e-3, 2e-3))],
        lambda bed, seed, folder, quick: {},
        lambda bed, steps, settings: (bed, steps, settings),
        train,
        seeds=8,
        steps=40,
        run_seconds=9.0,
        quick_bed="noisy_engine",
        columns=ROUTER.columns,
        measure_costs=lambda store, report: {"R3": 1.25},
    )
    monkeypatch.setattr(command, "BED_STUDIES", (study,))
    monkeypatch.setattr(command.jax.config, "update", lambda *setting: None)
    return calls


def test_the_command_writes_sections_and_continues(tmp_path, stored_runs, capsys):
    argv = ["router", "--beds", "two_forwards", "noisy_engine", "--out", str(tmp_path / "out")]
    argv += ["--seeds", "3", "--steps", "7"]
    assert command.main(argv) == 0
    # three rates on three seeds of tuning, then three counted ones
    assert len(stored_runs) == len(set(stored_runs)) == 2 * 2 * (3 * 3 + 3)
    assert {rate for *_, rate, seed in stored_runs if seed < 1000} == {2e-3}
    assert {steps for _, steps, *_ in stored_runs} == {7}
    text = (tmp_path / "out" / "router.md").read_text()
    assert "### two_forwards" in text and "### noisy_engine" in text and "| 1.25x |" in text
    assert text in capsys.readouterr().out
    lines = (tmp_path / "out" / "router.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["result"]["rewards"] == [0.1]
    page = tmp_path / "page.md"
    page.write_text("A <!-- router: tables --> stale <!-- end --> B\n")
    assert command.main([*argv, "--page", str(page)]) == 0
    assert len(stored_runs) == len(lines) == 48
    assert "stale" not in page.read_text() and "### two_forwards" in page.read_text()
    assert page.read_text().startswith("A <!--") and page.read_text().endswith("<!-- end --> B\n")


def test_ctrl_c_preserves_tables_and_says_what_continues(tmp_path, stored_runs, capsys):
    argv = ["router", "--beds", "two_forwards", "many_updates", "--out", str(tmp_path)]
    assert command.main(argv) == 130
    assert "the same command continues" in capsys.readouterr().out
    assert "### two_forwards" in (tmp_path / "router.md").read_text()


def test_a_dry_run_says_how_long_it_takes(tmp_path, stored_runs, capsys):
    assert command.main(["router", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    # three beds, two contenders, eight seeds with four rates and a counted run each
    assert "0 runs are stored, of about 240; 9 CPU" in capsys.readouterr().out
    assert not stored_runs and not (tmp_path / "out").exists()


def test_a_quick_study_leaves_other_results_alone(tmp_path, stored_runs):
    assert command.main(["router", "--quick", "--out", str(tmp_path)]) == 0
    assert {bed for bed, *_ in stored_runs} == {"noisy_engine"}
    assert len(stored_runs) == 2 * (2 * 3 + 2)
    assert [path.name for path in tmp_path.iterdir()] == ["quick"]


@pytest.mark.parametrize(("study", "runs"), [(ROUTER, 4960), (MXFP4, 752)])
def test_studies_have_their_planned_size(study, runs):
    planned = BedRuns(list(study.beds), study.seeds, study.steps)
    assert count_bed_runs(study, planned) == runs
    quick = replace(planned, quick=True)
    assert all(len(quick.choose_contenders(study, bed)) == 2 for bed in study.beds)


@pytest.mark.parametrize("setting", [("--seeds", "1"), ("--steps", "0")])
def test_a_wrong_number_is_refused_in_one_line(tmp_path, stored_runs, capsys, setting):
    assert command.main(["router", *setting, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{setting[0]} must be at least" in error and error.count("\n") == 1
    assert not stored_runs
