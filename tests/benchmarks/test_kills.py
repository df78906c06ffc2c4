# SPDX-License-Identifier: Apache-2.0
"""What the program of kills must see in a run folder, and what a soak must see in a process."""

import json
import mmap
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import soak
from benchmarks.kill_checks import (
    admitted_groups,
    check_begun,
    check_complete,
    check_restart,
    list_children,
    list_shared_memory,
    may_end_so,
)
from benchmarks.kills import CONFIG, ENGINES, SETTINGS, Run, Totals, has_full_queue, main, report
from benchmarks.soak import find_growth, fit_slope, measure
from jaxmoe.config_file import load_config, override

CFG = override(load_config(CONFIG), *SETTINGS, "steps=4", "warmup.steps=2")
ROWS = [30, 10, 20, 40, 50, 80, 60, 70]  # by group


def metrics_rows():
    warm = [{"stage": "warmup", "step": step, "loss": 1.0} for step in (1, 2)]
    numbers = [(0, 2), (1, 3), (4, 5), (6, 7)]
    return warm + [
        {
            "stage": "rl",
            "step": step,
            "loss": 1.0,
            "rollout/oldest_group": oldest,
            "rollout/newest_group": newest,
            "staleness/max": 3,
        }
        for step, (oldest, newest) in enumerate(numbers, 1)
    ]


def sample_rows():
    rows = [(2, 10), (2, 40), (4, 60), (4, 70)]
    return [{"stage": "rl", "step": step, "kind": "group", "row": row} for step, row in rows]


def write_run(work: Path, metrics, samples):
    for number in ("1000002", "1000004"):
        (work / "checkpoints" / number).mkdir(parents=True)
    for name, rows in ("metrics", metrics), ("samples", samples):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (work / f"{name}.jsonl").write_text(lines)


def test_a_run_that_lost_nothing_passes(tmp_path):
    write_run(tmp_path, metrics_rows(), sample_rows())
    assert check_complete(CFG, tmp_path, ROWS) == []


@pytest.mark.parametrize(
    "index, change, message",
    [
        (2, {"step": 2}, "metrics have steps"),
        (1, {"step": 1}, "metrics have steps"),
        (4, {"rollout/oldest_group": 3}, r"too many {3: 1}, missing {4: 1}"),
        (5, {"rollout/oldest_group": 1}, "too late"),
        (5, {"staleness/max": 4}, "too old"),
    ],
)
def test_doubled_steps_and_groups_are_seen(tmp_path, index, change, message):
    rows = metrics_rows()
    rows[index] |= change
    write_run(tmp_path, rows, sample_rows())
    with pytest.raises(AssertionError, match=message):
        assert "\n".join(check_complete(CFG, tmp_path, ROWS)) == ""


@pytest.mark.parametrize("rows", [sample_rows()[1:], sample_rows() + sample_rows()[:1]])
def test_samples_of_other_groups_are_seen(tmp_path, rows):
    write_run(tmp_path, metrics_rows(), rows)
    (problem,) = check_complete(CFG, tmp_path, ROWS)
    assert problem.startswith("rows of the samples: too many")


@pytest.mark.parametrize("name", [".config.json.0.tmp", "checkpoints/1000006.tmp", "queue"])
def test_leftover_files_are_seen(tmp_path, name):
    write_run(tmp_path, metrics_rows(), sample_rows())
    (tmp_path / name).touch()
    (problem,) = check_complete(CFG, tmp_path, ROWS)
    assert problem.startswith("the run folder has") and Path(name).name in problem


OUT = "resuming runs/x after rl step 2\nrows     1\ngroups   {} of the queue are kept; {} others "


@pytest.mark.parametrize(
    "position, kept, n_problems", [(("rl", 2), 1, 0), (("rl", 2), 2, 1), (("rl", 4), 1, 2)]
)
def test_a_restart_keeps_or_repeats_all_groups(position, kept, n_problems):
    assert admitted_groups(CFG, 2) == 4
    out = OUT.format(kept, 3) + "are sampled anew\n"
    problems, *counts = check_restart(CFG, position, out)
    assert counts == [kept, 3] and len(problems) == n_problems


def test_a_start_that_forgets_its_checkpoint_is_seen():
    assert len(check_restart(CFG, ("rl", 2), "rows     1\n")[0]) == 1
    assert check_restart(CFG, ("", 0), "rows     1\n")[0] == []


def test_an_answer_that_begins_twice_is_seen():
    assert check_begun(["a"] * 8 + ["b"] * 4 + ["other"] * 9, ["a", "a", "b"], 4) == []
    assert len(check_begun(["a"] * 8 + ["b"] * 5, ["a", "a", "b"], 4)) == 1


def test_a_queue_is_full_without_unfinished_groups(tmp_path):
    run = Run(CFG, [], tmp_path, questions=["a"])
    assert not has_full_queue(run, tmp_path)
    held_out, group = "begin x\nend\n", "begin a\nbegin a\nend\n"
    for lines, is_full in (held_out, False), (held_out + group, False), (group + "end\n", True):
        (tmp_path / "events").write_text(lines)
        assert has_full_queue(run, tmp_path) == is_full


def test_a_process_that_stays_is_seen():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.pid in list_children()
    child.communicate()
    assert child.pid not in list_children()


def test_shared_memory_of_living_processes_is_not_left(tmp_path):
    for name in ("old", "left", "mapped"):
        (tmp_path / name).write_bytes(b"x" * 10)
    with (
        open(tmp_path / "mapped", "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ),
    ):
        assert list_shared_memory(without={"old"}, root=tmp_path) == ["left"]
    assert list_shared_memory(without={"old"}, root=tmp_path) == ["left", "mapped"]


def test_a_signal_has_its_status():
    assert may_end_so((9,), -9) and not may_end_so((9,), 1)
    assert may_end_so((15,), 143) and may_end_so((2, 2), 130) and not may_end_so((2,), 143)


def test_a_report_is_one_line_of_json():
    totals = Totals(restart_s=[1.0, 3.0])
    totals.kills.update(["start", "SIGINT", "start"])
    line = json.loads(report(totals))
    assert line["kills"] == {"start": 2, "SIGINT": 1}
    assert line["restart_s"] == {"median": 2.0, "max": 3.0}


def test_a_soak_sees_each_kind_of_growth(tmp_path):
    leaks, samples = [], {}
    for step in range(200, 500, 50):
        samples[step] = measure(tmp_path)
        (tmp_path / f"{step}").touch()
        leaks += [jnp.zeros(3 * step), open(tmp_path / f"{step}")]
    for file in leaks[1::2]:
        file.close()
    growing = find_growth(samples)
    assert {"open_files", "folder_files", "live_arrays", "live_array_bytes"} <= {*growing}
    assert "threads" not in growing


def test_the_least_of_several_looks_counts(monkeypatch):
    @dataclass(frozen=True)
    class Parts:
        make_batch: Callable[[], object] = object

    def train(cfg, parts):
        for _ in range(310):
            parts.make_batch()

    looks = []
    monkeypatch.setattr(soak, "LOOK_S", 0.0)
    monkeypatch.setattr(soak, "make_parts", lambda cfg: Parts())
    monkeypatch.setattr(soak.train, "train", train)
    monkeypatch.setattr(soak, "measure", lambda work: looks.append(1) or {"n": 9 - len(looks) % 5})
    assert soak.run(CFG) == {200: {"n": 5}, 250: {"n": 5}, 300: {"n": 5}} and len(looks) == 24


def test_a_slope_has_its_error():
    assert fit_slope([0, 1, 2, 3], [5, 7, 9, 11]) == (2.0, 0.0)
    slope, error = fit_slope([0, 1, 2, 3], [0, 9, 1, 8])
    assert 0 < slope < 2 * error


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_killed_runs_lose_nothing(tmp_path, engine):
    words = ["--kills", "2", "--steps", "4", "--engines", engine, "--out", str(tmp_path / "out")]
    assert main(words) == 0
