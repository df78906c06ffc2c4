# SPDX-License-Identifier: Apache-2.0
"""The campaign of random faults finds what it is made to find, and a short one ends well."""

import json
import math
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import fault_answers, fault_episodes, fault_files, fault_parts, fault_training
from benchmarks.faults import Results, batches, run_batch
from jaxmoe.data.rows import Row
from jaxmoe.records import Prompt

# a training in small: a line and a checkpoint a step, the odd sum of what was saved before
TRAINING = """
import json, signal, sys, time
from pathlib import Path
work, broken, POSITION = Path(sys.argv[1]), sys.argv[2], ("stage", "step", "data")
if broken == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(work / "checkpoints").mkdir(parents=True, exist_ok=True)
file = work / "metrics.jsonl"
done = sorted(int(p.name) for p in (work / "checkpoints").iterdir())
lines = file.read_text().splitlines() if file.exists() else []
if broken != "doubles":
    file.write_text("".join(f"{line}\\n" for line in lines[: done[-1] if done else 0]))
for step in range(done[-1] + 1 if done else 1, 6):
    with open(file, "a") as out:
        weight = step + (broken == "drifts" and bool(done))
        print(json.dumps({"stage": "rl", "step": step, "loss": weight}), file=out)
    time.sleep(0.1)
    for name, content in ("digests", {"arrays": step}), ("extra", dict.fromkeys(POSITION, step)):
        folder = work / "checkpoints" / str(step) / name
        folder.mkdir(parents=True)
        (folder / "metadata").write_text(json.dumps(content))
    if broken == "noisy":
        print("Traceback (most recent call last):", file=sys.stderr)
(work / "samples.jsonl").write_text("")
"""


@pytest.fixture
def training(monkeypatch, tmp_path):
    """Give a function that meets three faults in a training which is broken so."""

    def start(out, work, broken):
        return subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(work), broken], stderr=subprocess.PIPE, text=True
        )

    def meet(kind, broken):
        def start_broken(out, work, training):
            return start(out, work, broken)

        monkeypatch.setattr(fault_training, "start", start_broken)
        faults = fault_training.meet([kind] * 3, random.Random(1), tmp_path, "answers")
        return [fault["failure"] for fault in faults]

    reference = start(tmp_path, tmp_path / "reference-answers", "")
    assert reference.communicate()[1] == "" and reference.returncode == 0
    monkeypatch.setattr(fault_training, "START_S", 0.5)
    monkeypatch.setattr(fault_training, "HANG_S", 10.0)
    monkeypatch.setattr(fault_training, "SIGNALS", fault_training.SIGNALS[:1])
    return meet


@pytest.mark.parametrize("kind", ["kill", pytest.param("signal", marks=pytest.mark.slow)])
def test_a_training_that_resumes_well_passes(training, kind):
    assert training(kind, "") == ["", "", ""]


@pytest.mark.parametrize(
    "kind, broken, failure",
    [
        ("kill", "drifts", "lost"),
        pytest.param("kill", "noisy", "traceback", marks=pytest.mark.slow),
        ("signal", "deaf", "hang"),
    ],
)
def test_a_training_that_does_not_is_found(training, monkeypatch, kind, broken, failure):
    if broken == "deaf":
        monkeypatch.setattr(fault_training, "HANG_S", 0.05)
    assert failure in training(kind, broken)


def test_a_line_that_is_there_twice_is_lost(tmp_path):
    fault = {"failure": "", "what": ""}
    for name, lines in (("a", 1), ("b", 2)):
        for part, content in (("digests", "arrays"), ("extra", "stage step data")):
            folder = tmp_path / name / "checkpoints" / "1" / part
            folder.mkdir(parents=True)
            (folder / "metadata").write_text(json.dumps(dict.fromkeys(content.split())))
        (tmp_path / name / "samples.jsonl").write_text('{"step": 1}\n' * lines)
        row = json.dumps({"stage": "rl", "step": 1, "loss": 1.0, "time/step_s": lines})
        (tmp_path / name / "metrics.jsonl").write_text(f"{row}\n")
    fault_training.compare(tmp_path / "a", tmp_path / "a", [fault])
    assert fault["failure"] == ""
    fault = {"failure": "", "what": ""}
    fault_training.compare(tmp_path / "b", tmp_path / "a", [fault])
    assert fault["failure"] == "lost" and "samples.jsonl" in fault["what"]


@pytest.mark.parametrize(
    "status, output, passes",
    [
        (2, "error: the disk must\n", True),
        (1, "error: the disk must\n", False),
        (2, "! Retrying once.\nerror: no room\n", True),
        (2, "error: a\nOSError: b\n", False),
        (2, "", False),
    ],
)
def test_a_full_disk_is_one_line_and_status(status, output, passes):
    assert fault_training.expected("disk", status, fault_training.SIGNALS[0], output) == passes


@pytest.mark.parametrize(
    "answer, failure",
    [
        ((0.1, 0, "RequestFailed", "no"), ""),
        ((9.0, 0, "RequestFailed", "no"), "hang"),
        ((0.1, 0, "", ""), "lost"),
        ((0.1, 0, "RecursionError", ""), "traceback"),
        ((0.1, 1 << 30, "RequestFailed", "no"), "other"),
        ((0.1, 0, "RequestFailed", fault_answers.KEY), "other"),
    ],
)
def test_answers_are_judged_by_time_memory_error_key(answer, failure):
    assert fault_answers.judged("generate: x", *answer) == failure


PAID = fault_parts.PAID
CRASHED = {"tool/sandbox_crashes": 1.0}


@pytest.mark.parametrize(
    "kind, broken, signals, reward, counts, failure",
    [
        ("environment", {}, 0, 1 + PAID, {}, ""),
        ("environment", {}, 0, PAID, {}, "lost"),
        ("environment", {"q": ["step", "exit"]}, 0, math.nan, {}, ""),
        ("environment", {"q": ["step", "exit"]}, 0, 1 + PAID, {}, "lost"),
        ("environment", {"other": ["step", "exit"]}, 0, math.nan, {}, "lost"),
        ("reward", {"q": ["reward", "binary"]}, 0, 1 + PAID, {}, ""),
        ("reward", {}, 1, math.nan, {}, ""),
        ("reward", {}, 1, PAID, {}, "lost"),
        ("reward", {}, 0, math.nan, {}, "lost"),
        ("sandbox", {}, 1, PAID, CRASHED, ""),
        ("sandbox", {}, 1, PAID, {}, "lost"),
        ("sandbox", {}, 0, PAID, CRASHED, "lost"),
    ],
)
def test_an_episode_is_judged_by_reward_and_fault(kind, broken, signals, reward, counts, failure):
    rollout = SimpleNamespace(
        prompt=Prompt(0, "q", (1,), "a"), lost="", env_fault="", env_metrics=counts
    )
    scores = SimpleNamespace(rewards=[reward], first_fault="")
    judged = fault_episodes.judge([Row("q", "a")], kind, broken, signals, [rollout], scores)
    assert judged.partition(":")[0] == failure


PLANTED = """
    def planted(dice):
        exec(FAULTS.pop(0))

    return {"x": planted}
"""
FAULTS = {
    "pass": "",
    "raise ValueError('x')": "traceback",
    "assert False": "lost",
    "print('Traceback', file=sys.stderr)": "traceback",
    "raise SystemExit(3)": "traceback",
    "time.sleep(60)": "hang",
}


def test_a_file_that_breaks_its_reader_is_found(tmp_path, monkeypatch):
    source = (fault_files.ROOT / "benchmarks/fault_files.py").read_text()
    text = source.replace("    import pyarrow as pa\n", PLANTED, 1)
    assert text != source
    (tmp_path / "planted.py").write_text(f"FAULTS = {list(FAULTS)}\n{text}")
    monkeypatch.setattr(fault_files, "__file__", str(tmp_path / "planted.py"))
    monkeypatch.setattr(fault_files, "SOON_S", 2.0)
    faults = fault_files.meet(len(FAULTS), random.Random(0))
    assert [fault["failure"] for fault in faults] == list(FAULTS.values()), faults


def test_a_reader_that_ends_its_process_is_found(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('out of memory')\n")
    monkeypatch.setattr(fault_files, "__file__", str(tmp_path / "planted.py"))
    [fault] = fault_files.meet(1, random.Random(0))
    assert fault["failure"] == "traceback" and "out of memory" in fault["what"]


def test_every_fault_is_drawn_once_and_calls_resume(tmp_path):
    all_batches = batches(200, 0, ["kill", "signal", "disk", "answer", "file"])
    kinds = [kind for faults in all_batches.values() for kind in faults]
    assert {k: kinds.count(k) for k in kinds} == {
        "kill": 25,
        "signal": 25,
        "disk": 20,
        "answer": 65,
        "file": 65,
    }
    only = batches(130, 0, ["answer", "file"])
    assert only.items() <= all_batches.items()
    results = Results(tmp_path / "results.jsonl")
    results.add("file 0 0", [{"kind": "file", "failure": "lost", "what": "x"}])
    reopened = Results(tmp_path / "results.jsonl")
    assert reopened.has("file 0 0") and not reopened.has("file 0 1")
    assert reopened.table().splitlines()[-1] == "| all | 1 | 0 | 1 | 0 | 0 |"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["answer", "file", *fault_episodes.KINDS])
def test_a_short_campaign_ends_well(tmp_path, kind):
    group = "episodes" if kind in fault_episodes.KINDS else kind
    faults = run_batch(f"{group} 1 0", [kind] * 3, tmp_path)
    assert [fault["failure"] for fault in faults] == [""] * 3, faults
