# SPDX-License-Identifier: Apache-2.0
"""A run that is asked to stop saves and stops, whenever the signal comes and whichever it is.

JAXMOE_SIGNALS=100 sends so many at random moments to one process, and so many to one of two.
"""

import os
import pty
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmoe.cli import STOP_SIGNALS, Stopped, handle_stop_signals
from jaxmoe.distributed.processes import PROCESS_VARIABLES
from jaxmoe.run import job
from tests.jaxmoe.scripted import Run, Scripted

ROOT = Path(__file__).parents[3]
TRIES = int(os.environ.get("JAXMOE_SIGNALS", "5"))
NAMES = [number.name for number in STOP_SIGNALS]


@pytest.fixture(autouse=True)
def default_hangup():
    """Under nohup these tests, and the processes that they start, would ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=NAMES)
def test_each_of_the_signals_saves_and_stops(tmp_path, number):
    def script(call, engine):
        if call == "sample" and len(engine.sampled) == 3:
            signal.raise_signal(number)

    message = rf"{number.name}: saved rl step 3 in .*; the same command resumes"
    with pytest.raises(Stopped, match=message) as error, handle_stop_signals() as stop:
        Run(tmp_path, Scripted(script), stop=stop)()
    assert error.value.signal == number


def test_a_signal_during_agreement_acts_a_step_later(tmp_path, monkeypatch):
    """It comes after the flag was read: the answer must not overwrite it."""
    agreed_on = []

    def agree(flag):
        agreed_on.append(flag)
        if len(agreed_on) == 2:
            signal.raise_signal(signal.SIGTERM)
        return flag

    monkeypatch.setattr(job, "max_over_processes", agree)
    with pytest.raises(Stopped, match="SIGTERM: saved rl step 3"), handle_stop_signals() as stop:
        Run(tmp_path, Scripted(), stop=stop)()
    assert agreed_on == [0, 0, signal.SIGTERM]


def test_ignored_signals_and_earlier_handlers_are_restored():
    before = {n: signal.getsignal(n) for n in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handle_stop_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal == 0
            signal.raise_signal(signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert {n: signal.getsignal(n) for n in STOP_SIGNALS} == before


STEP_AFTER_STEP = """
import sys, time
from types import SimpleNamespace
from jaxmoe.cli import Stopped, handle_stop_signals
from jaxmoe.run.job import Job
from jaxmoe.distributed.processes import joined_processes

class Steps(Job):
    def __init__(self, stop):
        self.stop, self.position = stop, SimpleNamespace(step=0, stage="rl")
        self.cfg = SimpleNamespace(save=SimpleNamespace(every_steps=1000))
        self.log = SimpleNamespace(check_in_place=lambda: None)

    def save_checkpoint(self):
        return str(self.position.step)

answers = open(sys.argv[1], "w", buffering=1)
with joined_processes():
    for attempt in range(int(sys.argv[2])):
        with handle_stop_signals() as stop:
            job, until = Steps(stop), int(sys.argv[3])
            job.save_or_stop(last=False)  # both have their handlers
            print("begun", attempt, file=answers)
            try:
                while job.position.step < until:
                    job.position.step += 1
                    job.save_or_stop(last=False)
                print("lost", file=answers)
            except Stopped as error:
                print(error, file=answers)
            job.stop, job.position.step = SimpleNamespace(signal=0), 0
            job.save_or_stop(last=False)  # nobody begins anew before both have ended
"""


def obeyed(folder, count, tries):
    """Answers of `count` processes to each signal that one of them received."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    files = [folder / f"answers{number}" for number in range(count)]
    started = []
    for number, file in enumerate(files):
        processes_env = dict(
            zip(PROCESS_VARIABLES, (address, str(count), str(number)), strict=True)
        )
        env = {**os.environ, "JAX_PLATFORMS": "cpu", **(processes_env if count > 1 else {})}
        env.pop("JAX_COMPILATION_CACHE_DIR", None)
        steps = "3000" if count > 1 else "3000000"
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", STEP_AFTER_STEP, str(file), str(tries), steps],
                cwd=ROOT,
                env=env,
                text=True,
                stderr=subprocess.PIPE,
            )
        )
    dice = random.Random(count)
    try:
        for attempt in range(tries):
            deadline = time.monotonic() + 120
            while not all(f.exists() and f"begun {attempt}\n" in f.read_text() for f in files):
                assert time.monotonic() < deadline and all(p.poll() is None for p in started)
                time.sleep(0.001)
            time.sleep(dice.uniform(0, 0.03))
            dice.choice(started).send_signal(dice.choice(STOP_SIGNALS))
        ends = [process.communicate(timeout=120)[1] for process in started]
        assert all(process.returncode == 0 for process in started), ends
    finally:
        for process in started:
            process.kill()
            process.communicate()
    processes = [
        [line for line in f.read_text().splitlines() if not line.startswith("begun")] for f in files
    ]
    return list(zip(*processes, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_no_signal_at_a_random_moment_is_lost(tmp_path, count):
    answers = obeyed(tmp_path, count, TRIES)
    assert len(answers) == TRIES
    assert all(answer[0].startswith(tuple(NAMES)) for answer in answers), answers
    assert all(len(set(answer)) == 1 for answer in answers), answers  # all stop after the same step


ON_A_TERMINAL = """
import fcntl, sys, termios, time
from jaxmoe.cli import handle_stop_signals
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its terminal from here on
with handle_stop_signals() as stop:
    print("ready", flush=True)
    while not stop.signal:
        time.sleep(0.01)
    print("on the terminal that is gone", flush=True)
    print("more", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write(str(stop.signal))
"""


def test_a_closed_terminal_does_not_break_the_save(tmp_path):
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, str(tmp_path / "saved")],
        cwd=ROOT,
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
    )
    os.close(end)
    output = b""
    while b"ready" not in output:
        output += os.read(terminal, 100)
    os.close(terminal)  # the kernel sends SIGHUP
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "saved").read_text() == str(int(signal.SIGHUP))
