# SPDX-License-Identifier: Apache-2.0
"""The detached run: it refuses before it starts, and one folder has one run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "--config tiny.py --set model.d_model=32 --set model.d_expert=24 --set data.train_rows=64 "
    "--set data.held_out_rows=4 --set warmup.steps=0 "
    "--set rollout.sequences_per_step=8 --set rollout.samples_per_prompt=8"
).split()


def launch(*args):
    env = {**os.environ, "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [str(ROOT / "launch" / "local.sh"), *map(str, args)],
        env=env,
        text=True,
        capture_output=True,
        timeout=120,
    )


def test_a_mistake_is_one_line_and_nothing_starts(tmp_path):
    completed = launch(tmp_path / "run", *SMALL, "--set", "optim.lrr=1")
    assert completed.returncode == 2 and completed.stderr.count("\n") == 1
    assert "Did you mean optim.lr?" in completed.stderr and not (tmp_path / "run").exists()


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
