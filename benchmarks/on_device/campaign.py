# SPDX-License-Identifier: Apache-2.0
"""Run stages as processes, several at a time, each within its limits of time and memory.

A stage that fails, hangs, dies or fills the memory costs its own time only, and its message is
kept. Stages end with the campaign, also when it is killed. Next: stages.py, which lists the stages;
stage.py, what they import.
"""

import contextlib
import heapq
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.on_device.results import DONE
from benchmarks.on_device.stage import LOCK_FOLDER, MARK

TICK_S = 0.2
LOG_TAIL = 20_000  # characters of a stage's output that are kept
MESSAGE = 600
# A process that ends the stages of a campaign that was killed: it reads "+ID" and "-ID" of process
# groups until the campaign, which writes them, is no more.
GUARD = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


@dataclass(frozen=True)
class Stage:
    """One process of the campaign; times are seconds, as earlier campaigns showed them."""

    name: str
    command: tuple[str, ...]  # after `python -m`
    limit_s: float  # from its start, waiting for the device included
    compile_s: float = 30.0  # expected time without the device
    device_s: float = 10.0  # expected time with the device alone
    memory_gb: float = 40.0  # limit of host memory
    environment: tuple[tuple[str, str], ...] = ()
    # Stages of a later phase begin when those of the earlier ones have ended: comparisons share the
    # device for minutes, and a measurement would wait for them.
    phase: int = 0
    expected: str = DONE  # a rehearsal has stages that must hang, die or fill the memory


@dataclass
class Running:
    stage: Stage
    process: subprocess.Popen[bytes]
    output: Path
    start: float
    guard: subprocess.Popen[bytes]


def run_campaign(
    stages: Sequence[Stage],
    *,
    folder: Path,
    seconds: float,
    together: int,
    save: Callable[[Stage, dict[str, Any]], None],
    log_line: Callable[[str], None] = print,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Run the stages in order, `together` at a time, and `save` each one's outcome as it ends.

    After `seconds` whatever still runs is ended and saved as "cut off".
    folder: of the stages' output while they run, and of the device's locks.
    """
    end, waiting, running = time.monotonic() + seconds, list(stages), []
    with _start_guard() as guard:
        try:
            while running or (waiting and time.monotonic() < end):
                while (
                    waiting
                    and len(running) < together
                    and all(job.stage.phase >= waiting[0].phase for job in running)
                    and time.monotonic() < end
                ):
                    running.append(_start(waiting.pop(0), folder, environ, guard))
                    log_line(f"{_clock(end, seconds)} begins {running[-1].stage.name}")
                for job in list(running):
                    ended = _find_end(job, end)
                    if ended is None:
                        continue
                    running.remove(job)
                    _end_group(job)
                    outcome = read_outcome(job, *ended)
                    log_line(
                        f"{_clock(end, seconds)} {job.stage.name}: {outcome['status']} in "
                        f"{outcome['seconds']:.0f} s. {outcome['message'][-200:]}"
                    )
                    save(job.stage, outcome)
                time.sleep(TICK_S)
        finally:
            for job in running:
                _end_group(job)
    for stage in waiting:
        log_line(f"not begun: {stage.name}")


@contextlib.contextmanager
def _start_guard() -> Iterator[subprocess.Popen[bytes]]:
    guard = subprocess.Popen(
        [sys.executable, "-S", "-c", GUARD], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield guard
    finally:
        guard.communicate()


def _tell_guard(guard: subprocess.Popen[bytes], sign: str, group: int) -> None:
    assert guard.stdin
    with suppress(BrokenPipeError):
        guard.stdin.write(f"{sign}{group}\n".encode())
        guard.stdin.flush()


def _clock(end: float, seconds: float) -> str:
    return f"{seconds - (end - time.monotonic()):5.0f} s"


def _start(
    stage: Stage, folder: Path, environ: Mapping[str, str], guard: subprocess.Popen[bytes]
) -> Running:
    output = folder / f"{stage.name}.txt"
    settings = {
        LOCK_FOLDER: str(folder),
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *stage.command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environ, **settings, **dict(stage.environment)},
        )
    _tell_guard(guard, "+", process.pid)
    return Running(stage, process, output, time.monotonic(), guard)


def _find_end(job: Running, end: float) -> tuple[str, str] | None:
    """How a stage ended or must end, and why if its output cannot say; None while it may go on."""
    code, stage = job.process.poll(), job.stage
    if code is not None:
        died = f"killed by signal {-code}" if code < 0 else ""
        return (DONE, "") if code == 0 else ("failed", died)
    now = time.monotonic()
    if now > end:
        return "cut off", "the campaign's time was over"
    if now - job.start > stage.limit_s:
        return "timed out", f"gave no end in {stage.limit_s:g} s"
    if resident_bytes(job.process.pid) > stage.memory_gb * 1e9:
        return "out of memory", f"host memory above {stage.memory_gb:g} GB"
    return None


def resident_bytes(pid: int) -> int:
    """Memory of a process and of those that it started, bytes; shared pages count in each."""
    total = 0
    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def _end_group(job: Running) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(job.process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        job.process.wait(10)  # a driver may keep it; then it is abandoned
    _tell_guard(job.guard, "-", job.process.pid)


def read_outcome(job: Running, status: str, reason: str) -> dict[str, Any]:
    """Status, figures, message and the end of the output of a stage that has ended."""
    text = job.output.read_text(errors="replace")
    lines = text.splitlines()
    figures = []
    for line in lines:
        if line.startswith(MARK):
            with suppress(json.JSONDecodeError):  # a kill may cut the last line
                figures.append(json.loads(line.removeprefix(MARK)))
    message = ""
    if status != DONE:
        said = [x.strip() for x in lines if x.strip() and not x.startswith(MARK)]
        message = ": ".join(filter(None, (reason, said[-1] if said else "")))[:MESSAGE]
    return {
        "status": status,
        "figures": figures,
        "message": message,
        "seconds": round(time.monotonic() - job.start, 1),
        "output": text[-LOG_TAIL:],
    }


def simulate(stages: Sequence[Stage], together: int) -> list[tuple[str, float]]:
    """(stage, second of its end) by the expected times: `together` compile, one has the device."""
    ends: list[tuple[str, float]] = []
    waiting, active = list(enumerate(stages)), dict[int, Stage]()
    events: list[tuple[float, int, bool]] = []  # second, stage, has had the device
    now = device = 0.0
    while waiting or events:
        while (
            waiting
            and len(active) < together
            and all(stage.phase >= waiting[0][1].phase for stage in active.values())
        ):
            index, stage = waiting.pop(0)
            active[index] = stage
            heapq.heappush(events, (now + stage.compile_s, index, False))
        now, index, is_end = heapq.heappop(events)
        if is_end:
            ends.append((active.pop(index).name, now))
        else:
            device = max(device, now) + active[index].device_s
            heapq.heappush(events, (device, index, True))
    return ends
