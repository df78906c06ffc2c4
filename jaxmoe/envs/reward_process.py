# SPDX-License-Identifier: Apache-2.0
"""Calls reward functions in a process of their own, which can be ended when one never returns.

The process starts with the first call and stays; after an end another one starts.
Next: jaxmoe/envs/rewards.py.
"""

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
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.envs.reward_worker import Outcome, run_calls

_IMPORT_S = 600.0  # for a module to be imported: torch on a cold disk takes a minute
_GRACE_S = 5.0  # for async calls to be cancelled by the process itself
_MOST_LATE = 3  # calls in a row, before the function and not the answers is to blame
_HERE = "Or --set data.reward_timeout_s=0, which calls it inside the training process"

# (name in messages, "module:function", options, the function, arguments of each call, rows of each)
Runner = Callable[
    [str, str, dict[str, Any], Callable[..., Any], list[dict[str, Any]], Sequence[str]],
    list[Outcome],
]


def run_here(
    where: str, path: str, options: dict[str, Any], function: Callable[..., Any],
    calls: list[dict[str, Any]], rows: Sequence[str],
) -> list[Outcome]:  # fmt: skip
    """In this process and thread, for as long as it takes."""
    try:
        return run_calls(function, calls, None)
    except Exception as error:
        error.add_note(f"{where} raised this on {rows[getattr(error, 'call_number', 0)]}.")
        raise


class RewardProcess:
    """A Runner; see run_here.

    A call that takes longer than timeout_s is ended, and its outcome is ("late", None); the
    third in a row raises ConfigError, and so does the end of the process.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # an evaluation and the rollouts' thread may both score
        self._late: dict[str, int] = {}  # calls in a row, by function
        self._loaded: set[str] = set()
        self._link: Connection | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stop: Callable[[], Any] = lambda: None

    def __call__(
        self, where: str, path: str, options: dict[str, Any], function: Callable[..., Any],
        calls: list[dict[str, Any]], rows: Sequence[str],
    ) -> list[Outcome]:  # fmt: skip
        key = f"{path} {sorted(options.items())}"
        with self._lock:
            self._load(where, key, path, options)
            limit_s = self._timeout_s + (_GRACE_S if len(calls) > 1 else 0.0)
            answer = self._ask(where, (key, path, options, calls, self._timeout_s), limit_s, rows)
        if answer is None:
            outcomes: list[Outcome] = [("late", None)] * len(calls)
        else:
            kind, content = answer
            if kind == "raised":
                raise self._error(where, content, rows)
            outcomes = content
        for (kind, _), row in zip(outcomes, rows, strict=True):
            self._late[key] = self._late.get(key, 0) + 1 if kind == "late" else 0
            if self._late[key] == _MOST_LATE:
                raise ConfigError(
                    f"{where} must return within data.reward_timeout_s ({self._timeout_s:g}) "
                    f"seconds; {_MOST_LATE} calls in a row did not, the last on {row}. "
                    f"Try --set data.reward_timeout_s={2 * self._timeout_s:g}."
                )
        return outcomes

    def close(self) -> None:
        """End the process, whatever it does."""
        self._stop()
        self._link = None
        self._loaded.clear()

    def _load(self, where: str, key: str, path: str, options: dict[str, Any]) -> None:
        """Import the function there: that takes its time, and is no call."""
        if self._link is not None and key in self._loaded:
            return
        answer = self._ask(where, (key, path, options, [], None), _IMPORT_S, ["its import"])
        if answer is None or answer[0] == "raised":
            why = f"its import took more than {_IMPORT_S:g} s" if answer is None else answer[1][1]
            raise ConfigError(
                f"{where}: {path} must be importable in a process of its own, where rewards run; "
                f"{why}. Put it into a module on the Python path (PYTHONPATH=FOLDER). {_HERE}."
            )
        self._loaded.add(key)

    def _ask(
        self, where: str, message: Any, limit_s: float, rows: Sequence[str]
    ) -> tuple[str, Any] | None:
        """The answer; None where there is none in time, and the process was ended for it."""
        if self._link is None:
            self._start()
        link, child = self._link, self._child
        assert link is not None and child is not None
        try:
            content = pickle.dumps(message)
        except Exception as error:
            raise ConfigError(
                f"{where} must be called with what can be sent to its own process; pickle refuses "
                f"the columns of {rows[0]}: {error}. {_HERE[3:].capitalize()}."
            ) from error
        try:
            link.send_bytes(content)
            if not link.poll(limit_s):
                self.close()
                return None
            return pickle.loads(link.recv_bytes())
        except (EOFError, OSError) as error:
            status = child.wait()
            self.close()
            name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            raise ConfigError(
                f"{where} ended the process of the rewards ({name}) on {rows[0]}. Mend the "
                f"function. {_HERE}, to look for the cause."
            ) from error

    def _start(self) -> None:
        trainer_end, worker_end = socket.socketpair()
        with worker_end:
            self._child = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("reward_worker.py")),
                 str(worker_end.fileno())],
                pass_fds=[worker_end.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the trainer's
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the trainer holds the device
            )  # fmt: skip
        self._link = Connection(trainer_end.detach())
        self._stop = weakref.finalize(self, _ended, self._child, self._link)
        self._link.send(list(sys.path))

    def _error(self, where: str, content: Any, rows: Sequence[str]) -> BaseException:
        sent, text, trace, number = content
        error = RuntimeError(text) if sent is None else pickle.loads(sent)
        error.add_note(f"{where} raised this on {rows[number]}.")
        error.add_note(f"In the process of the rewards:\n{trace}")
        return error


def _ended(child: subprocess.Popen[bytes], link: Connection) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)  # with what the function itself started
    except ProcessLookupError:
        pass
    child.wait()
    link.close()
