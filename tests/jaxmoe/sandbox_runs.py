# SPDX-License-Identifier: Apache-2.0
"""Small runs whose tool is `python_sandbox`, and the processes of their sandboxes.

As a command it trains, and notes each call of the tool in the file that CALLS_VARIABLE names.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

from jaxmoe.environments.sandbox_tool import SandboxSession
from tests.jaxmoe import tool_runs

MODULE = "tests.jaxmoe.sandbox_runs"
CALLS_VARIABLE = "JAXMOE_TEST_CALLS"
# One process on two devices has the mesh of two processes, and shares its programs with a resume.
CHANGES: dict[str, Any] = {
    "data__tools": "python_sandbox",
    "sandbox__kind": "bubblewrap",
    "sandbox__warm": 1,
    "sandbox__call_s": 60,
    "mesh__fsdp": 2,
    "warmup__demonstrations": "jaxmoe.configs.tiny_tool:demonstrate_calculator(share=1.0)",
}
PROCESSES_PER_SANDBOX = 2  # bubblewrap and what it runs
_IN_COMMAND = b"jaxmoe.sandbox.inside.worker"


def start_run(work, **options):
    """Start the small run; by the command of the product, unless `module` is another."""
    settings: dict[str, Any] = {"module": "jaxmoe.train"} | CHANGES | options
    return tool_runs.start_tools(work, **settings)


def find_sandboxes(trainer):
    """Process ids of the sandboxes that this process started."""
    parents = dict(filter(None, map(_read_parent, Path("/proc").glob("[0-9]*"))))
    return {pid for pid in parents if trainer in _ancestors(pid, parents) and _is_sandbox(pid)}


def _read_parent(folder):
    try:
        return int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


def _ancestors(pid, parents):
    while pid in parents:
        pid = parents[pid]
        yield pid


def _is_sandbox(pid):
    try:
        return _IN_COMMAND in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class SandboxWatch:
    """All sandboxes of some processes, seen while they run."""

    def __init__(self, trainers):
        self.seen = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, args=(trainers,))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _look(self, trainers):
        while not self._ended.wait(0.05):
            for pid in trainers:
                self.seen |= find_sandboxes(pid)

    @property
    def left(self):
        return {pid for pid in self.seen if _is_sandbox(pid)}


def main():
    run = SandboxSession.run

    def run_and_note(session, code):
        with open(os.environ[CALLS_VARIABLE], "a") as file:
            print(os.getpid(), file=file)
        return run(session, code)

    setattr(SandboxSession, "run", run_and_note)  # noqa: B010
    return tool_runs.main()


if __name__ == "__main__":
    sys.exit(main())
