# SPDX-License-Identifier: Apache-2.0
"""Call reward functions in a separate process, which can be killed if a call never returns.

The process starts with the first call and is reused. If it was killed, the next call starts a new
one. Next: jaxmoe/rewards/rewards.py.
"""

import contextlib
import functools
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from jaxmoe.config import ConfigError
from jaxmoe.observe.printable import escape_unprintable
from jaxmoe.rewards.reward_worker import Outcome, run_calls

_IMPORT_LIMIT_S = 600.0  # importing torch from a cold disk takes a minute
_GRACE_S = 5.0  # extra time in which the process itself cancels late async calls
_MAX_LATE_CALLS = 3  # this many late calls in a row are the fault of the function, not of answers
_OR_CALL_INLINE = "Or --set data.reward_timeout_s=0, which calls it in the training process"

# (name in messages, "module:function", options, the function, arguments of each call, rows of each)
Runner = Callable[
    [str, str, dict[str, Any], Callable[..., Any], list[dict[str, Any]], Sequence[str]],
    list[Outcome],
]


def run_inline(
    label: str,
    path: str,
    options: dict[str, Any],
    function: Callable[..., Any],
    calls: list[dict[str, Any]],
    rows: Sequence[str],
) -> list[Outcome]:
    """A Runner that calls the function in this process and thread, without a time limit."""
    outcomes = run_calls(function, calls, None)
    for (kind, value), row in zip(outcomes, rows, strict=True):
        if kind == "raised":
            value.add_note(f"{label} raised this on {row}.")
    return outcomes


class LateError(ConfigError):
    """A reward function was late too often to go on."""


class CrashError(ConfigError):
    """A reward function ended its process, or answered twice."""


def call_limit_s(function: Callable[..., Any]) -> float:
    """The time limit of a call that a function sets itself, as its attribute `call_limit_s`.

    It is infinite for other functions. A function with a limit needs a process that can be killed.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return float(getattr(function, "call_limit_s", math.inf))


class UnimportableError(ConfigError):
    """A reward function cannot be imported in the process that is to call it."""


class RewardProcess:
    """A Runner that calls functions in a separate process, with a time limit.

    A call that takes longer than timeout_s is killed, and its outcome is ("late", None). The
    third late call in a row raises LateError, and a crash of the process CrashError. If a
    function sets a shorter limit itself, late calls are expected, and no number of them is an
    error here; jaxmoe/rewards/rewards.py limits their share.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # An evaluation and the thread of the rollouts may both score.
        self._lock = threading.Lock()
        # Calls in a row, by label and function: jaxmoe/collection/swapped_rewards.py calls the same
        # functions by another label, and its late calls must not end the run.
        self._late_calls: dict[tuple[str, str], int] = {}
        self._loaded: set[str] = set()
        self._connection: Connection | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_process: Callable[[], Any] = lambda: None
        self._n_requests = 0  # the number of a request comes back with its answer

    def __call__(
        self,
        label: str,
        path: str,
        options: dict[str, Any],
        function: Callable[..., Any],
        calls: list[dict[str, Any]],
        rows: Sequence[str],
    ) -> list[Outcome]:
        key = f"{path} {sorted(options.items())}"
        with self._lock:
            self._import_function(label, key, path, options)
            # Several calls at once are asynchronous, and the process itself cancels those that are
            # late. The extra time lets it report the others before it would be killed.
            timeout_s = min(self._timeout_s, call_limit_s(function))
            limit_s = timeout_s + (_GRACE_S if len(calls) > 1 else 0.0)
            answer = self._request(label, (key, path, options, calls, timeout_s), limit_s, rows)
        if answer is None:
            outcomes: list[Outcome] = [("late", None)] * len(calls)
        else:
            kind, content = answer
            if kind == "raised":
                raise _rebuild_error(label, content, rows[0])
            outcomes = [
                (kind, _rebuild_error(label, value, row) if kind == "raised" else value)
                for (kind, value), row in zip(content, rows, strict=True)
            ]
        if timeout_s < self._timeout_s:
            return outcomes
        counter = (label, key)
        for (kind, _), row in zip(outcomes, rows, strict=True):
            n_late = self._late_calls.get(counter, 0) + 1 if kind == "late" else 0
            self._late_calls[counter] = n_late % _MAX_LATE_CALLS
            if n_late == _MAX_LATE_CALLS:
                raise LateError(
                    f"{label} must return within data.reward_timeout_s ({self._timeout_s:g}) "
                    f"seconds; {_MAX_LATE_CALLS} calls in a row did not, the last on {row}. "
                    f"Try --set data.reward_timeout_s={2 * self._timeout_s:g}."
                )
        return outcomes

    def close(self) -> None:
        """Kill the process, even in the middle of a call."""
        self._stop_process()
        self._connection = None
        self._loaded.clear()

    def _import_function(self, label: str, key: str, path: str, options: dict[str, Any]) -> None:
        """Import the function in the process; an import has its own, longer time limit."""
        if self._connection is not None and key in self._loaded:
            return
        answer = self._request(
            label, (key, path, options, [], None), _IMPORT_LIMIT_S, ["its import"]
        )
        if answer is None or answer[0] == "raised":
            reason = (
                f"its import took more than {_IMPORT_LIMIT_S:g} s"
                if answer is None
                else answer[1][1]
            )
            raise UnimportableError(
                f"{label}: {path} must be importable in the separate process that runs reward "
                f"functions; {reason}. Put it into a module on the Python path "
                f"(PYTHONPATH=FOLDER). {_OR_CALL_INLINE}."
            )
        self._loaded.add(key)

    def _request(
        self, label: str, message: Any, limit_s: float, rows: Sequence[str]
    ) -> tuple[str, Any] | None:
        """The answer of the process; None if it took too long, in which case it was killed."""
        if self._connection is None:
            self._start_process()
        connection, child = self._connection, self._child
        assert connection is not None and child is not None
        try:
            # Pickled before it is sent, so that an error of pickling is not taken for one of the
            # connection.
            self._n_requests += 1
            content = pickle.dumps((self._n_requests, message))
        except Exception as error:
            raise ConfigError(
                f"{label} must be called with values that can be sent to a separate process; "
                f"pickle refuses the columns of {rows[0]}: {error}. "
                f"{_OR_CALL_INLINE[3:].capitalize()}."
            ) from error
        try:
            connection.send_bytes(content)
            if not connection.poll(limit_s):
                self.close()
                return None
            number, pid, answer = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            status = child.wait()
            self.close()
            name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            raise CrashError(
                f"{label} must not end its process; it ended with {name} on {rows[0]}. Correct "
                f"the function. {_OR_CALL_INLINE}, to find the cause."
            ) from error
        # Otherwise each later answer would be paid what the one before it earned.
        if (number, pid) != (self._n_requests, child.pid):
            self.close()
            raise CrashError(
                f"{label} must answer each call once, in its own process; on {rows[0]} came answer "
                f"{number} of process {pid}, not answer {self._n_requests} of {child.pid}. Let the "
                "function fork no process that returns."
            )
        return pickle.loads(answer)

    def _start_process(self) -> None:
        trainer_end, worker_end = socket.socketpair()
        # The trainer's copy is closed. While it is open, the end of the process would not end the
        # connection.
        with worker_end:
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("reward_worker.py")),
                    str(worker_end.fileno()),
                ],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                # The trainer alone handles Ctrl-C.
                start_new_session=True,
                # What it prints may be of an answer, and control a terminal.
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # The trainer owns the accelerator.
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
            )
        for source, target in ((self._child.stdout, sys.stdout), (self._child.stderr, sys.stderr)):
            threading.Thread(target=_print_escaped, args=(source, target), daemon=True).start()
        self._connection = Connection(trainer_end.detach())
        # finalize also runs when the interpreter exits, so that the process does not outlive the
        # run.
        self._stop_process = weakref.finalize(self, _kill_process, self._child, self._connection)
        # A script or a config file may have changed the trainer's path, and the process must find
        # the same modules.
        self._connection.send(list(sys.path))


def _print_escaped(source: IO[bytes], target: Any) -> None:
    """Print the lines of a process to a stream, in which no control character has an effect."""
    with source:
        for line in source:
            text = line.rstrip(b"\n").decode(errors="replace")
            # A stream that was closed must not stop the reading, or the process would wait for it.
            with contextlib.suppress(OSError, ValueError):
                print(escape_unprintable(text.replace("\t", "    ")), file=target, flush=True)


def _rebuild_error(label: str, content: Any, row: str) -> Exception:
    pickled, text, trace = content
    error = RuntimeError(text) if pickled is None else pickle.loads(pickled)
    error.add_note(f"{label} raised this on {row}.")
    error.add_note(f"Traceback in the reward process:\n{trace}")
    return error


def _kill_process(child: subprocess.Popen[bytes], connection: Connection) -> None:
    try:
        # The group, so that processes which the function started end with it.
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    connection.close()
