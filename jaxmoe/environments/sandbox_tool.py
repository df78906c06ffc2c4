# SPDX-License-Identifier: Apache-2.0
"""The tool `python_sandbox`: an interpreter for each episode, whose variables stay between calls.

Its recipient is harmony's `python`, which takes code and not JSON.
Next: jaxmoe/sandbox/pool.py.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace

from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.data.rows import Row, ToolDescription
from jaxmoe.environments.step_check import EnvironmentFault
from jaxmoe.environments.tools import Tool, ToolResult
from jaxmoe.sandbox.pool import SandboxPool
from jaxmoe.sandbox.probe import choose_sandbox
from jaxmoe.sandbox.process import CallResult, CallStatus, Sandbox, SandboxError

_RESTART = "The next call starts a new interpreter: variables and files are lost."
_METRICS = {
    CallStatus.TIMEOUT: "tool/sandbox_timeouts",
    CallStatus.CRASHED: "tool/sandbox_crashes",
    CallStatus.FORGED: "hack/forged_reply",
    CallStatus.UNFINISHED_TASKS: "tool/unfinished_tasks",
}


def make_sandbox_tool(config: SandboxConfig) -> Tool:
    """The tool of a config. Raises ConfigError if no sandbox starts on this machine."""
    launcher = choose_sandbox(config)
    pool = SandboxPool(launcher, config.warm)
    files = (
        f"Files of up to {launcher.disk_mb} MB may be written to the current folder. "
        if launcher.disk_mb
        else ""
    )
    description = ToolDescription(
        "python",
        "Run a Python program and read what it prints. The value of an expression on the last "
        "line is printed too. Variables stay for the next call. Only the standard library is "
        f"available, without a network. {files}A call may take {config.call_s:g} seconds.",
        {},
    )

    def run_unstarted(_code: str) -> str:
        raise RuntimeError("an episode must start this tool before a call")

    def start_episode(_row: Row) -> Tool:
        session = SandboxSession(pool, config.call_s)
        return replace(tool, call=session.run, close=session.close, start=None)

    tool = Tool(
        description, run_unstarted, recipient="python", takes_text=True, start=start_episode
    )
    return tool


class SandboxSession:
    """The calls of one episode. Its sandbox starts with the first call."""

    def __init__(self, pool: SandboxPool, call_s: float) -> None:
        self._pool, self._call_s = pool, call_s
        self._sandbox: Sandbox | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def run(self, code: str) -> ToolResult:
        """Run a program; the result is the text for the policy.

        Raises: EnvironmentFault if no sandbox starts, or something outside ended it between two
            calls: neither is the policy's doing.
        """
        try:
            sandbox = self._sandbox or self._pool.acquire()
        except SandboxError as error:
            raise EnvironmentFault(f"a sandbox must start for python_sandbox; {error}") from error
        with self._lock:
            self._sandbox = sandbox
            is_closed = self._is_closed
        if is_closed:  # the episode ended while a sandbox started
            self._release()
            return ToolResult("Error: the episode has ended", is_error=True)
        result = sandbox.run(code, self._call_s)
        if not result.is_alive:
            self._release()
        if result.is_lost:
            error = SandboxError(f"it ended between two calls ({result.error})")
            raise EnvironmentFault(
                f"a sandbox must stay alive for python_sandbox; {error}"
            ) from error
        metrics = {name: float(status is result.status) for status, name in _METRICS.items()}
        return ToolResult(
            describe_result(result, self._call_s),
            metrics=metrics,
            is_error=result.status is not CallStatus.OK,
        )

    def close(self) -> Mapping[str, float] | None:
        """End the sandbox, even in the middle of a call."""
        with self._lock:
            self._is_closed = True
        self._release()
        return None

    def _release(self) -> None:
        with self._lock:
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._pool.release(sandbox)


def describe_result(result: CallResult, call_s: float) -> str:
    """The text for the policy: what its program printed, and what happened to the interpreter."""
    output = result.output.rstrip("\n")
    match result.status:
        case CallStatus.OK:
            return output
        case CallStatus.ERROR:
            return output or f"Error: {result.error}"
        case CallStatus.TIMEOUT:
            return f"Error: the call took more than {call_s:g} s and was stopped. {_RESTART}"
        case CallStatus.CRASHED:
            return f"Error: the program ended its interpreter ({result.error}). {_RESTART}"
        case CallStatus.FORGED:
            return f"Error: the program wrote to the interpreter's own pipe. {_RESTART}"
        case CallStatus.UNFINISHED_TASKS:
            note = f"Error: threads still ran after the call and were stopped. {_RESTART}"
            return f"{output}\n{note}" if output else note
