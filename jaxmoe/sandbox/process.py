# SPDX-License-Identifier: Apache-2.0
"""One sandbox as its user sees it: run a program, call a function, end it.

Nothing that comes out of a sandbox is trusted: a line that is not the reply to the current
request, a reply that is too long, or a task left behind ends the sandbox at once.
"""

import enum
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmoe.sandbox.inside.plain_data import (
    NotPlainData,
    PlainForm,
    check_form,
    encode_value,
)
from jaxmoe.sandbox.pipe_wait import wait_for
from jaxmoe.sandbox.process_state import read_parent, read_state

MAX_OUTPUT_CHARS = 20_000  # of a call; what is printed beyond is dropped
MAX_REQUEST_CHARS = 1_000_000  # of a program
START_LIMIT_S = 30.0
_MAX_LINE_BYTES = 8_000_000
_THREAD_END_S = 0.1  # a thread that was joined takes a moment to end
_READ_BYTES = 1 << 16
_SLEEP_LIMIT_S = 0.1  # for a process that replied to go to sleep
_STOP_LIMIT_S = 0.1  # for a process to stop
_STOPPED, _GONE = ("T", 1), ("Z", "X", "")
_CPU_CLOCK = 2  # CPUCLOCK_SCHED of the kernel: what the scheduler counted, in nanoseconds

AnswerOutside = Callable[[str, Sequence[PlainForm], Mapping[str, PlainForm]], Any]


class CallStatus(enum.StrEnum):
    """How a call ended. After the last four its sandbox is gone."""

    OK = "ok"
    ERROR = "error"  # the program raised
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # the process ended
    FORGED = "forged"  # something else than the reply was written to the pipe
    UNFINISHED_TASKS = "unfinished_tasks"  # threads still ran


@dataclass(frozen=True)
class CallResult:
    """The result of a call: what it printed, and for calls of functions a value."""

    status: CallStatus
    output: str = ""
    error: str = ""  # the name of the exception, or how the process ended
    value: PlainForm | None = None
    is_lost: bool = False  # it ended before the call, which no program in it can do

    @property
    def is_alive(self) -> bool:
        """True if the sandbox can be called again."""
        return self.status in (CallStatus.OK, CallStatus.ERROR)


class SandboxError(RuntimeError):
    """A sandbox did not start, or was lost; the message is one line."""


class _Forged(Exception):
    """The pipe held something else than one reply."""


class Sandbox:
    """A running process that answers one call at a time. Made by jaxmoe.sandbox.launch."""

    def __init__(
        self, child: subprocess.Popen[bytes], info_fd: int | None, setup: Mapping[str, Any]
    ) -> None:
        assert child.stdin is not None and child.stdout is not None
        self._child, self._info_fd = child, info_fd
        self._requests, self._replies = child.stdin.fileno(), child.stdout.fileno()
        self._lock = threading.Lock()  # of calls
        self._end_lock = threading.Lock()
        self._is_ended = False
        self._buffer = b""
        self.worker_pid = 0 if info_fd is not None else child.pid
        self._is_ready = False
        self._pauses = "pause" not in setup["removed"]
        self._is_idle = True  # no program runs or can run
        # The pipe holds most of it, and the process reads the rest or ends: this waits for neither.
        try:
            content = memoryview(json.dumps(setup).encode() + b"\n")
            while content:
                content = content[os.write(self._requests, content) :]
        except BrokenPipeError:
            pass  # `wait_ready` reports why it ended

    @property
    def is_running(self) -> bool:
        """False if the process ended, by itself or by `kill`."""
        return not self._is_ended and self._child.poll() is None

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until the program may be sent. Raises SandboxError if it does not start."""
        with self._lock:
            if self._is_ready:
                return
            deadline = time.monotonic() + limit_s
            problem = ""
            try:
                first = json.loads(self._read_line(deadline))
                is_ready = first == {"ready": True}
                problem = str(first.get("problem", "")) if isinstance(first, dict) else ""
                if is_ready:
                    self._read_worker_pid()
            except (OSError, EOFError, ValueError, TimeoutError, _Forged, KeyError):
                is_ready = False
            if not is_ready:
                ending = self._describe_failure()
                raise SandboxError(" ".join(problem.split())[:300] or ending)
            if self._child.stderr is not None:
                self._child.stderr.close()
            self._is_ready = True

    def run(
        self,
        code: str,
        timeout_s: float,
        outside: Mapping[str, AnswerOutside] | None = None,
        *,
        module: str = "",
    ) -> CallResult:
        """Run a program in the interpreter, whose variables stay for the next call.

        outside: functions that the program may call and that this process answers; their
            arguments are forms of plain data, their results plain data or such forms.
        module: the program's `__name__` from here on, "__main__" before the first.
        """
        functions = outside or {}
        content = {"code": code, "outside": list(functions), "module": module}
        return self._request(content, timeout_s, functions)

    def call(
        self,
        name: str,
        arguments: Sequence[Any],
        timeout_s: float,
        named: Mapping[str, Any] | None = None,
    ) -> CallResult:
        """Call a function that a program defined; arguments and value are plain data.

        Raises: NotPlainData for arguments that are not.
        """
        call = {
            "name": name,
            "arguments": [encode_value(x) for x in arguments],
            "named": {key: encode_value(x) for key, x in (named or {}).items()},
        }
        return self._request({"call": call}, timeout_s, {})

    def read_cpu_s(self) -> float:
        """CPU seconds of the process so far, as the kernel counts them. Raises OSError.

        Of all its threads, also of those that ended: /proc/PID/schedstat has only the first one's.
        While a process runs, its clock is up to 10 ms late, so this waits until it does not.
        """
        end = time.monotonic() + _SLEEP_LIMIT_S
        while read_state(self.worker_pid)[0] == "R" and time.monotonic() < end:
            time.sleep(0.0002)
        # The clock of another process, as clock_getcpuclockid(3) names it.
        return time.clock_gettime((~self.worker_pid << 3) | _CPU_CLOCK)

    def kill(self) -> str:
        """End the process with all that it started; return how it ended. It may be repeated."""
        with self._end_lock:
            if not self._is_ended:
                self._is_ended = True
                self._end_process()
        code = self._child.returncode
        # bubblewrap reports a signal of its child as 128 + its number.
        number = -code if code < 0 else code - 128
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"exit status {code}"

    def _end_process(self) -> None:
        if self.worker_pid and self.worker_pid != self._child.pid and self._child.poll() is None:
            # The worker first: bubblewrap waits for it. An orphan would stay a zombie where the
            # container's first process reaps none.
            if read_parent(self.worker_pid) == self._child.pid:
                os.kill(self.worker_pid, signal.SIGKILL)
                try:
                    self._child.wait(1.0)
                except subprocess.TimeoutExpired:
                    pass
        self._child.kill()
        self._child.wait()
        for file in (self._child.stdin, self._child.stdout, self._child.stderr):
            if file is not None:
                try:
                    file.close()
                except OSError:
                    pass
        if self._info_fd is not None:
            os.close(self._info_fd)
            self._info_fd = None

    def _request(
        self, content: dict[str, Any], timeout_s: float, functions: Mapping[str, AnswerOutside]
    ) -> CallResult:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            # A new id for each request: an old reply, or a guess, is not taken for the new one.
            request_id = os.urandom(8).hex()
            line = json.dumps({"id": request_id} | content).encode() + b"\n"
            # Arguments of a function need no limit: another sandbox sends no more than a reply has.
            if "code" in content and len(line) > MAX_REQUEST_CHARS:
                text = f"a program may have {MAX_REQUEST_CHARS:,} characters, got {len(line):,}"
                return CallResult(CallStatus.ERROR, error=text)
            is_lost = self._is_idle and not self._is_ended and self._child.poll() is not None
            self._is_idle = False
            try:
                if not self.is_running:
                    raise EOFError
                if self._buffer or self._has_unread_bytes():
                    raise _Forged
                self._signal_worker(signal.SIGCONT)
                self._send(line, deadline)
                result = self._await_reply(request_id, deadline, functions)
                if result.is_alive and self._pauses:
                    # A timer's handler would use a processor until the next call.
                    self._signal_worker(signal.SIGSTOP)
                    # Seldom worth its time between calls of a function, which follow at once.
                    self._is_idle = "code" in content and self._await_stop()
                return result
            except TimeoutError:
                self.kill()
                return CallResult(CallStatus.TIMEOUT)
            except _Forged:
                self.kill()
                return CallResult(CallStatus.FORGED)
            except (EOFError, OSError):
                ending = self._await_end()
                return CallResult(CallStatus.CRASHED, error=ending, is_lost=is_lost)

    def _await_reply(
        self, request_id: str, deadline: float, functions: Mapping[str, AnswerOutside]
    ) -> CallResult:
        while True:
            reply = _parse_reply(self._read_line(deadline), request_id)
            if "outside" not in reply:
                break
            if not functions:
                raise _Forged
            self._send(_answer_outside(reply["outside"], functions), deadline)
        output, error = reply.get("output"), reply.get("error")
        if not isinstance(output, str) or not isinstance(error, str):
            raise _Forged
        output, error = output[: MAX_OUTPUT_CHARS + 100], error[:100]
        if self._has_tasks_left():
            self.kill()
            return CallResult(CallStatus.UNFINISHED_TASKS, output, error)
        if error:
            return CallResult(CallStatus.ERROR, output, error)
        try:
            value = check_form(reply.get("value"))
        except (NotPlainData, RecursionError) as wrong:
            raise _Forged from wrong
        return CallResult(CallStatus.OK, output, value=value)

    def _has_tasks_left(self) -> bool:
        """True if the process has more threads than the one that answers."""
        end = time.monotonic() + _THREAD_END_S
        while True:
            try:
                if len(os.listdir(f"/proc/{self.worker_pid}/task")) <= 1:
                    return False
            except OSError:  # it ended; the next call reports that
                return False
            if time.monotonic() > end:
                return True
            time.sleep(0.001)

    def _await_stop(self) -> bool:
        """True if the process has stopped, which one that is about to end does not.

        From then on it can do nothing, and if it ends, something outside ended it: the program may
        set no timer that kills, and every other signal waits. A process that ended after its reply,
        or takes long to stop, may have done so on purpose, to have no reward.
        """
        end = time.monotonic() + _STOP_LIMIT_S
        while (state := read_state(self.worker_pid)) != _STOPPED:
            if state[0] in _GONE or time.monotonic() > end:
                return False
            time.sleep(0.00002)
        return True

    def _await_end(self) -> str:
        try:
            self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            self.kill()
            return "it closed its pipe"  # and went on
        return self.kill()

    def _signal_worker(self, number: signal.Signals) -> None:
        """Send a signal, if the worker still runs: another process may have its id later.

        bubblewrap ends as soon as its worker does, and to ask for that takes a microsecond.
        """
        if self._child.poll() is None:
            try:
                os.kill(self.worker_pid, number)
            except ProcessLookupError:
                pass  # the next look at the pipe finds its end

    def _send(self, content: bytes, deadline: float) -> None:
        view = memoryview(content)
        while view:
            wait_for(self._requests, select.POLLOUT, deadline)
            # A pipe that is writable takes at least this much without blocking.
            view = view[os.write(self._requests, view[: select.PIPE_BUF]) :]

    def _read_line(self, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise _Forged
            wait_for(self._replies, select.POLLIN, deadline)
            content = os.read(self._replies, _READ_BYTES)
            if not content:
                raise EOFError
            self._buffer += content
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _has_unread_bytes(self) -> bool:
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(0))

    def _read_worker_pid(self) -> None:
        if self._info_fd is None:
            return
        wait_for(self._info_fd, select.POLLIN, time.monotonic() + 1.0)
        self.worker_pid = int(json.loads(os.read(self._info_fd, 4096))["child-pid"])
        os.close(self._info_fd)
        self._info_fd = None

    def _describe_failure(self) -> str:
        """End a process that did not start, and return the last line of what it wrote."""
        self._child.kill()
        text = b"" if self._child.stderr is None else self._child.stderr.read(_READ_BYTES)
        ending = self.kill()
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"it ended with {ending}"


def _parse_reply(line: bytes, request_id: str) -> dict[str, Any]:
    """The reply to a request. Raises _Forged for any other line."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Forged from error
    if not isinstance(reply, dict) or reply.get("id") != request_id:
        raise _Forged
    return reply


def _answer_outside(call: Any, functions: Mapping[str, AnswerOutside]) -> bytes:
    """Answer a program's call of a function of this process, as a line."""
    try:
        name = call["name"]
        function = functions[name]
        arguments = [check_form(form) for form in call["arguments"]]
        named = {str(key): check_form(form) for key, form in call["named"].items()}
    except (NotPlainData, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise _Forged from error
    try:
        answer = {"value": encode_value(function(name, arguments, named)), "error": ""}
    except Exception as error:
        answer = {"value": None, "error": str(error) or type(error).__name__}
    return json.dumps(answer).encode() + b"\n"
