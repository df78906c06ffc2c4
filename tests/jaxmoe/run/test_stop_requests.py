# SPDX-License-Identifier: Apache-2.0
"""A run that is asked to stop saves and stops, whichever signal asks."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.cli import STOP_SIGNALS, Stopped, handle_stop_signals
from jaxmoe.run import job
from tests.jaxmoe.scripted import Run, Scripted

ROOT = Path(__file__).parents[3]

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
