# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that have started and wait, so that an episode does not wait for one.

A sandbox is used once: it is ended, and not given to another episode.
"""

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.process import Sandbox, SandboxError
from jaxmoe.sandbox.starter import StarterThread

_START_TRIES = 3


@dataclass
class _PoolState:
    """The sandboxes of a pool."""

    launcher: Launcher
    n_warm: int
    idle: deque[Sandbox] = field(default_factory=deque)
    in_use: set[Sandbox] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_closed: bool = False


class SandboxPool:
    """Starts sandboxes, and keeps `n_warm` of them waiting once the first was asked for."""

    def __init__(self, launcher: Launcher, n_warm: int) -> None:
        self._state = _PoolState(launcher, n_warm)
        self._starter = StarterThread()
        # finalize also runs when the interpreter exits.
        self._end = weakref.finalize(self, _end_pool, self._state, self._starter)

    def acquire(self) -> Sandbox:
        """A sandbox that nothing ran in; the caller must `release` it. Raises SandboxError."""
        for tries_left in reversed(range(_START_TRIES)):
            sandbox = self._pop_idle() or self._start_sandbox()
            with self._state.lock:
                self._state.in_use.add(sandbox)
                is_closed = self._state.is_closed
            try:
                if is_closed:
                    raise SandboxError("the pool is closed")
                self._starter.submit(lambda state=self._state: _fill_pool(state))
                sandbox.wait_ready()
                return sandbox
            except RuntimeError:  # SandboxError, or closed in the meantime
                self.release(sandbox)
                if not tries_left or is_closed:
                    raise
        raise AssertionError("unreachable")

    def release(self, sandbox: Sandbox) -> None:
        """End a sandbox."""
        sandbox.kill()
        with self._state.lock:
            self._state.in_use.discard(sandbox)

    def close(self) -> None:
        """End all sandboxes, also those in use."""
        self._end()

    def _start_sandbox(self) -> Sandbox:
        try:
            return self._starter.submit(self._state.launcher.start).result()
        except RuntimeError as error:
            raise SandboxError(str(error)) from error

    def _pop_idle(self) -> Sandbox | None:
        while True:
            with self._state.lock:
                if not self._state.idle:
                    return None
                sandbox = self._state.idle.popleft()
            if sandbox.is_running:
                return sandbox
            sandbox.kill()


def _fill_pool(state: _PoolState) -> None:
    while True:
        with state.lock:
            if state.is_closed or len(state.idle) >= state.n_warm:
                return
        sandbox = state.launcher.start()
        with state.lock:
            is_closed = state.is_closed
            if not is_closed:
                state.idle.append(sandbox)
        if is_closed:
            sandbox.kill()


def _end_pool(state: _PoolState, starter: StarterThread) -> None:
    with state.lock:
        state.is_closed = True
        sandboxes = [*state.idle, *state.in_use]
        state.idle.clear()
        state.in_use.clear()
    for sandbox in sandboxes:
        sandbox.kill()
    starter.close()
