# SPDX-License-Identifier: Apache-2.0
"""The kinds of sandbox that start on this machine, and short ways to use them in tests."""

import functools
import os
import signal

import pytest

from benchmarks import sandbox
from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.probe import probe_sandbox

KINDS = ("bubblewrap", "landlock")
CONFIG = SandboxConfig(disk_mb=8)


class BrokenLauncher(Launcher):
    """A launcher on a machine where a sandbox ends before it has started."""

    def _python_command(self, executable):
        return ["/bin/false"]


@functools.cache
def find_problem(kind):
    return probe_sandbox(Launcher(kind, CONFIG))


def require_kind(kind):
    """Skip a test where this kind cannot start."""
    if problem := find_problem(kind):
        pytest.skip(f"{kind} does not start on this machine: {problem}")


def first_kind():
    """A kind that starts here; skips without one."""
    for kind in KINDS:
        if not find_problem(kind):
            return kind
    pytest.skip(f"no sandbox starts on this machine: {find_problem('bubblewrap')}")


def end_from_outside(sandbox):
    """Kill a sandbox as the machine does that has no memory left."""
    os.kill(sandbox.worker_pid, signal.SIGKILL)
    sandbox._child.wait()


def open_sandbox(kind=None, removed=(), **settings):
    """A started sandbox, as a context."""
    config = SandboxConfig(**{"disk_mb": 8, **settings})
    return sandbox.open_sandbox(Launcher(kind or first_kind(), config, frozenset(removed)))
