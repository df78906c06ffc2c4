# SPDX-License-Identifier: Apache-2.0
"""The detached run: it refuses before it starts, and one folder has one run."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.checkpoint.run import LOCK, lock_run_folder

ROOT = Path(__file__).parents[2]
SMALL = (
    "--config tiny.py --set model.d_model=32 --set model.d_expert=24 --set data.train_rows=64 "
    "--set data.held_out_rows=4 --set warmup.steps=0 "
    "--set rollout.sequences_per_step=8 --set rollout.samples_per_prompt=8"
).split()
# A run that checks nothing and waits to be killed, unless it is to end at once.
WAITS = f"""#!{sys.executable}
import signal, sys
if "--dry-run" not in sys.argv:
    print("begins", flush=True)
    signal.alarm(60)
    signal.pause() if "ends" not in sys.argv else sys.exit("error: no GPU")
"""


def launch(*args, python=sys.executable, **options):
    env = {**os.environ, "PYTHON": str(python), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [str(ROOT / "launch" / "local.sh"), *map(str, args)],
        env=env,
        text=True,
        capture_output=True,
        timeout=120,
        **options,
    )


@pytest.fixture
def waits(tmp_path):
    path = tmp_path / "waits"
    path.write_text(WAITS)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("folder", "words", "answer"),
    [
        ("run", ["--set", "optim.lrr=1"], "Did you mean optim.lr?"),
        ("gs://bucket/run", [], "Mount the bucket"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_starts(tmp_path, folder, words, answer):
    completed = launch(folder, *SMALL, *words, cwd=tmp_path)
    assert completed.returncode == 2 and completed.stderr.count("\n") == 1
    assert answer in completed.stderr and not list(tmp_path.iterdir())


def test_one_folder_in_other_words_is_refused(tmp_path, waits):
    assert launch("runs/a", python=waits, cwd=tmp_path).returncode == 0
    number = (tmp_path / "runs" / "a" / "pid").read_text()
    try:
        for folder in ("runs/a", "runs/a/", "./runs/b/../a", tmp_path / "runs" / "a"):
            second = launch(folder, python=waits, cwd=tmp_path)
            assert second.returncode == 2 and second.stderr.count("\n") == 1
            assert f"kill {number.strip()}" in second.stderr
        assert (tmp_path / "runs" / "a" / "pid").read_text() == number
        assert (tmp_path / "runs" / "a" / "log.txt").read_text() == "begins\n"
        # a longer name is another folder
        (tmp_path / "runs" / "a" / "pid").rename(tmp_path / "runs" / "pid")
        assert launch("runs", python=waits, cwd=tmp_path).returncode == 0
        os.kill(int((tmp_path / "runs" / "pid").read_text()), signal.SIGKILL)
    finally:
        os.kill(int(number), signal.SIGKILL)


def test_a_folder_locked_by_any_run_is_refused(tmp_path, waits):
    work = tmp_path / "run"
    with lock_run_folder(work):
        second = launch(work, python=waits)
    assert second.returncode == 2 and second.stderr.count("\n") == 1
    assert "another process trains in it" in second.stderr
    assert [path.name for path in work.iterdir()] == [LOCK]
    assert launch(work, python=waits).returncode == 0
    os.kill(int((work / "pid").read_text()), signal.SIGKILL)
    with (work / LOCK).open() as file:  # the launcher left no lock
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_ending_at_once_has_no_pid(tmp_path, waits):
    completed = launch(tmp_path / "run", "ends", python=waits)
    assert completed.returncode == 1 and not (tmp_path / "run" / "pid").exists()
    assert "error: no GPU" in completed.stderr and "log.txt" in completed.stderr


@pytest.mark.slow
def test_a_recycled_pid_is_not_another_run(tmp_path):
    """It was written by a run that has ended; the system gave the number to somebody else."""
    work = tmp_path / "run"
    work.mkdir()
    (work / "pid").write_text(f"{os.getpid()}\n")
    completed = launch(work, *SMALL)
    assert completed.returncode == 0, completed.stderr
    pid = int((work / "pid").read_text())
    assert pid != os.getpid()
    second_run = launch(work, *SMALL)
    os.kill(pid, signal.SIGKILL)
    assert second_run.returncode == 2 and str(pid) in second_run.stderr
