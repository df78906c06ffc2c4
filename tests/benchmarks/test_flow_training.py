# SPDX-License-Identifier: Apache-2.0
"""Runs that compare schedules of rollouts train on the same rows, and are not repeated."""

import gzip
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.flow_training import CONTENDERS, format_results, main, summarize
from benchmarks.late_lookups import LateLookup, demonstrate_lookup, write_rows
from jaxmoe.data.files import read_task_rows
from jaxmoe.data.rows import Message


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, 400, seed=0, slow_s=5.0, max_thought=100)
    return read_task_rows(str(path), answers=True, columns=None)


def test_delays_and_thoughts_have_long_tails(rows):
    delays = np.array([row.columns["delays"] for row in rows])
    assert delays.max() <= 5 and np.median(delays) < 0.2 < 0.6 < delays.mean() < 0.9
    thoughts = [row.columns["thought"] for row in rows]
    assert min(thoughts) == 1 and max(thoughts) == 100 and np.median(thoughts) < 10
    calls = [len(demonstrate_lookup(row)) == 3 for row in rows]
    assert 0.25 < np.mean(calls) < 0.35


def test_only_a_call_gets_the_answer(rows, monkeypatch):
    slept = []
    monkeypatch.setattr("benchmarks.late_lookups.time.sleep", slept.append)
    episode, row = LateLookup(), rows[0]
    episode.reset(row, seed=0)
    for turn in range(2):
        call = Message("assistant", "..", channel="analysis", recipient="t")
        (reply,), reward, terminated, *_ = episode.step([call])
        assert (reply.content, reward, terminated) == (row.answer, 0.0, False)
        assert slept.pop() == row.columns["delays"][turn]
    assert episode.step([Message("assistant", row.answer)])[1:3] == (1.0, True)
    assert episode.step([Message("assistant", "1")])[1:3] == (0.0, True) and not slept


def step_row(step, **numbers):
    common = {"step": step, "reward/mean": 0.5, "time/step_s": 2.0, "time/rollout_s": 1.5}
    return common | numbers


def test_speed_leaves_out_compiling_and_evaluation():
    rows = [step_row(step, **{"time/step_s": 60.0}) for step in (1, 2, 3)]
    rows += [step_row(step) for step in (4, 5)]
    rows += [step_row(6, **{"time/step_s": 9.0, "time/eval_s": 7.0, "eval/accuracy": 0.75})]
    result = summarize(rows)
    assert result["steps_per_hour"] == 1800 and result["accuracy"] == 0.75
    assert (result["engine_idle"], result["trainer_idle"]) == (0.25, 0.75)
    waits = {"time/wait_for_rollouts_s": 1.0, "time/wait_for_trainer_s": 0.5}
    result = summarize([*rows[:3], *(row | waits for row in rows[3:])])
    assert (result["engine_idle"], result["trainer_idle"]) == (0.25, 0.5)
    shares = {"rollout/engine_idle_frac": 0.1, "rollout/trainer_idle_frac": 0.2}
    result = summarize([*rows[:3], *(row | waits | shares for row in rows[3:])])
    assert (result["engine_idle"], result["trainer_idle"]) == (0.1, 0.2)


def test_a_table_compares_seed_by_seed():
    common = dict(engine_idle=0.1, trainer_idle=0.2, staleness_mean=0.5, staleness_max=1)
    common |= dict(lag_max=1, lengths=[4, 20, 300, 512])
    results = {
        name: [
            common | {"steps_per_hour": speed * (1 + seed / 10), "accuracy": accuracy + seed / 10}
            for seed in range(3)
        ]
        for name, speed, accuracy in (("a", 100, 0.5), ("b", 150, 0.5), ("c", 300, 0.6))
    }
    lines = format_results(results, 0.3).splitlines()
    assert lines[2].startswith("| a | 110 (100 to 120) | 1 | 0.67 (0.67 to 0.67) | 0.600 |  |")
    assert "3.00 (3.00 to 3.00) | 2.00 (2.00 to 2.00) | 0.700 | +0.1 (+0.1 to +0.1)" in lines[4]
    assert "warm start: 0.300" in lines[-1] and "4 to 512 tokens" in lines[-1]


SMALL = (
    *("warmup.steps=2", "warmup.sequences_per_step=4", "eval.samples_per_prompt=1"),
    *("rollout.sequences_per_step=4", "rollout.samples_per_prompt=2"),
    *("rollout.max_parallel_sequences=4", "rollout.max_new_tokens=64"),
    *("rollout.max_turn_tokens=40", "rollout.max_context=128", "data.held_out_rows=4"),
    "optim.tokens_per_microbatch=256",
)


@pytest.mark.slow
def test_each_schedule_trains_the_same_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(CONTENDERS, "native", CONTENDERS["native"][::3])
    words = ["--seeds", "1", "--steps", "2", "--slow-s", "0.01", "--out", str(tmp_path)]
    words += [word for setting in SMALL for word in ("--set", setting)]
    with jax.numpy_dtype_promotion("standard"):  # the command's
        assert main(words) == 0
    path = tmp_path / "native.jsonl"
    text = path.read_text()
    start, *runs = map(json.loads, text.splitlines())
    assert start["run"] == "start" and 0 <= start["result"] <= 1
    assert [run["run"] for run in runs] == ["synchronous batches", "groups, keep"]
    assert len({run["result"]["rows"] for run in runs}) == 1
    assert all(run["result"]["steps_per_hour"] > 0 for run in runs)
    table = capsys.readouterr().out
    assert main(words) == 0 and path.read_text() == text
    assert capsys.readouterr().out.splitlines()[-6:] == table.splitlines()[-6:]


RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize(
    "path", sorted((RESULTS / "flow_training").glob("*.gz")), ids=lambda path: path.name
)
def test_the_page_has_the_figures_of_raw_results(path):
    engine = path.name.split(".")[0]
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    runs = {c.name: [r["result"] for r in rows if r["run"] == c.name] for c in CONTENDERS[engine]}
    assert {len(results) for results in runs.values()} == {5}
    lines = format_results(runs, 0.0).splitlines()[3 : 2 + len(runs)]  # but for the first
    cells = [cell.strip() for line in lines for cell in line.split("|")[3:8]]
    figures = [cell for cell in cells if " to " in cell or "." in cell]
    page = (RESULTS / "rollouts.md").read_text()
    (row,) = (line for line in page.splitlines() if f"flow_training/{engine}.jsonl" in line)
    # The accuracies are there by their differences to the first contender's.
    differences = [figure for figure in figures if " to " in figure and figure[:4] != "1.00"]
    assert differences and [figure for figure in differences if figure not in row] == []
