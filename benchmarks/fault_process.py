# SPDX-License-Identifier: Apache-2.0
"""Faults that a process of their own meets, one after another, so that a hang or a crash of it is
seen and the others go on.

Next: fault_files.py, fault_episodes.py.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.patience import ends_in_time

ROOT = Path(__file__).resolve().parents[1]
START_S = 120.0  # by a clock that stands still while it waits for a processor


def meet_in_process(
    program: str, kinds: list[str], dice: random.Random, soon_s: float
) -> list[dict]:
    """Meet a fault of each kind by the program, which takes "kind seed" in a line and answers with
    a line of JSON. `soon_s`: for one fault."""
    lines = [f"{kind} {dice.randrange(2**32)}" for kind in kinds]
    faults = list[dict]()
    while len(faults) < len(lines):
        faults += _ask(program, lines[len(faults) :], soon_s)
    return faults


def _ask(program: str, lines: list[str], soon_s: float) -> list[dict]:
    """One answer for each line, or fewer: the process of the last one hung or died."""
    child = subprocess.Popen(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    faults, wait_s = list[dict](), START_S
    try:
        for line in lines:
            kind, _, seed = line.partition(" ")
            with contextlib.suppress(BrokenPipeError):
                print(line, file=child.stdin, flush=True)
            ready = ends_in_time(lambda: _has_output(child), child.pid, wait_s)
            answer = child.stdout.readline() if ready else ""
            if not answer:
                failure = "traceback" if ready else "hang"
                _kill(child)
                what = f"{kind} of seed {seed}{child.stderr.read()[-2000:]}"
                return [*faults, {"kind": kind, "failure": failure, "what": what}]
            faults.append({"kind": kind, **json.loads(answer)})
            wait_s = soon_s
        return faults
    finally:
        _kill(child)
        child.communicate()


def _has_output(child: subprocess.Popen[str]) -> bool:
    """A line, or the end of them. One line is asked for at a time, so none waits in a buffer."""
    assert child.stdout is not None
    return bool(select.select([child.stdout], [], [], 0)[0])


def _kill(child: subprocess.Popen[str]) -> None:
    """With what it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
