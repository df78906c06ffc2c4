# SPDX-License-Identifier: Apache-2.0
"""A thread that starts sandboxes and lives as long as they do.

The kernel kills a sandbox when the *thread* that started it ends, so a thread of a pool of workers
must not start one.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Job = tuple[Callable[[], Any], "Future[Any]"]


class StarterThread:
    """Runs functions one after another in a thread of its own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        # Of the queue alone, so that the owner of this object can be collected.
        thread = threading.Thread(
            target=_run_jobs, args=(self._jobs,), name="sandbox-starter", daemon=True
        )
        thread.start()

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Call a function in the thread. Raises RuntimeError after `close`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed:  # nothing would ever answer
                raise RuntimeError("the thread that starts sandboxes has ended")
            self._jobs.put((function, future))
        return future

    def close(self) -> None:
        """End the thread after its current job, and with it all that it started."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)


def _run_jobs(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        function, future = job
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del job, function, future  # nothing is kept while the thread waits
