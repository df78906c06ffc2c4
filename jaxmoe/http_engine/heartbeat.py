# SPDX-License-Identifier: Apache-2.0
"""Detection of a hanging server within seconds, for servers that this run started.

A request may take minutes, so a late answer alone proves nothing. A server hangs if it does not
answer other requests either, or if its processes use no CPU while somebody waits for them. Next:
jaxmoe/http_engine/replica.py starts another one.
"""

import threading
import time
from pathlib import Path

from jaxmoe.http_engine import server_processes
from jaxmoe.http_engine.json_client import JsonClient

CHECK_INTERVAL_S = 2.0
HANG_TIMEOUT_S = 15.0  # without an answer
CPU_WINDOW_S = 5.0  # the last part of it; a worker that waits for others may spin for a while
IDLE_CPU_S = 0.25  # processes that use more in that window are working


class Heartbeat:
    """A thread that watches one server until `stop`; `hung` says why it closed the connections.

    `segments` is the shared memory of its processes, to be removed when they have ended.
    `server_route` is answered by the HTTP server, `engine_route` by the process that computes.
    """

    def __init__(
        self, backend: JsonClient, group: int, name: str, *, server_route: str, engine_route: str
    ) -> None:
        self._backend, self._group, self._name = backend, group, name
        self._server_route, self._engine_route = server_route, engine_route
        self.hung = ""
        self.segments = set[Path]()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxmoe-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.segments |= server_processes.find_shared_memory(self._group)
            reason = self._find_hang()
            if reason and not self._stopped.is_set():
                self.hung = f"{self._name} hangs: {reason}"
                self._backend.close(self.hung)
                return
            self._stopped.wait(CHECK_INTERVAL_S)

    def _find_hang(self) -> str:
        """Return why the server is taken to hang, or "". A server that has ended does not hang."""
        start = time.monotonic()
        if self._backend.answers_within(self._engine_route, HANG_TIMEOUT_S - CPU_WINDOW_S):
            return ""
        before = server_processes.measure_cpu_time(self._group)
        answered = self._backend.answers_within(self._engine_route, CPU_WINDOW_S)
        # A fast failure is a refused connection: the server has ended.
        if answered or time.monotonic() - start < 0.9 * HANG_TIMEOUT_S:
            return ""
        after = server_processes.measure_cpu_time(self._group)
        if before is not None and after is not None and after.is_idle_since(before, IDLE_CPU_S):
            return f"no answer in {HANG_TIMEOUT_S:g} s, and its processes use no CPU"
        return (
            ""
            if self._backend.answers_within(self._server_route, CPU_WINDOW_S)
            else "its server answers no request"
        )
