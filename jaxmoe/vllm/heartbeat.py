# SPDX-License-Identifier: Apache-2.0
"""Whether a server that we started still works: one that hangs is found in seconds.

A request may take minutes, so a late answer says nothing. A server that answers nobody else either,
or whose processes stand still while somebody waits for them, will not answer this one.
Next: jaxmoe/vllm/replica.py starts another.
"""

import threading
import time
from pathlib import Path

from jaxmoe.vllm import processes
from jaxmoe.vllm.http_backend import HttpBackend

EVERY_S = 2.0
HANG_S = 15.0  # without an answer
WATCHED_S = 5.0  # of these, the last: what waits for others may turn in circles for a while
IDLE_CPU_S = 0.25  # in that time: more, and they work
ALIVE, WORKS = "/health", "/is_paused"  # answered by the server; by the process that computes


class Heartbeat:
    """A thread beside one server, until `stop`; `hung` says why it ended the connections.

    `segments`: the shared memory of its processes, for when these are gone.
    """

    def __init__(self, backend: HttpBackend, group: int, name: str) -> None:
        self._backend, self._group, self._name = backend, group, name
        self.hung = ""
        self.segments = set[Path]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxmoe-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            self.segments |= processes.segments(self._group)
            why = self._look()
            if why and not self._over.is_set():
                self.hung = f"{self._name} hangs: {why}"
                self._backend.close(self.hung)
                return
            self._over.wait(EVERY_S)

    def _look(self) -> str:
        """Why it is taken to hang, or nothing. One that has ended is not: that shows by itself."""
        start = time.monotonic()
        if self._backend.answers(WORKS, HANG_S - WATCHED_S):
            return ""
        before = processes.work(self._group)
        answers = self._backend.answers(WORKS, WATCHED_S)
        if answers or time.monotonic() - start < 0.9 * HANG_S:  # refused, not waited for: it ended
            return ""
        after = processes.work(self._group)
        if before is not None and after is not None and after.still_since(before, IDLE_CPU_S):
            return f"no answer in {HANG_S:g} s, and its processes stand still"
        return "" if self._backend.answers(ALIVE, WATCHED_S) else "its server answers nobody"
