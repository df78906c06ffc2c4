# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rollouts: batches sampled in a thread, steps ahead of the training; or in sync.

A batch is the result of `make(step)`. Step k trains on batch k and syncs version k. Batch k is
started when version k-1-n is synced, so it has no token of an older version; n is the staleness.
One thread makes one batch after the other, and none while `paused()`.
Next: jaxmoe/rollout/staleness.py checks the versions.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from jaxmoe.shapes import Metrics

T = TypeVar("T")

# A stop request is polled, because a signal does not wake a Condition.
POLL_S = 0.05
GRACE_S = 60.0  # time for an interrupted batch to end


class SyncRollouts(Generic[T]):
    """Makes each batch when it is taken, with the newest weights; has AsyncRollouts' methods."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make

    def take_batch(self, step: int) -> T:
        return self._make(step)

    def weights_synced(self, version: int) -> None:
        pass

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield

    def wait_metrics(self) -> Metrics:
        return {}  # the trainer waits for all rollouts, in time/rollout_s

    def close(self) -> None:
        pass


class AsyncRollouts(Generic[T]):
    """Makes batches first..last in a thread, at most `max_staleness` versions behind their step.

    The first batch starts when version first-1-max_staleness or a newer one is synced.
    An error of make() is raised by the caller's next call, before any batch that is ready.
    close() calls `interrupt` if a batch is being made; it must end make() soon, with an error if
    necessary. `stop` is polled while the caller waits.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        *,
        first: int,
        last: int,
        max_staleness: int,
        stop: Callable[[], object],
        interrupt: Callable[[], None],
    ) -> None:
        self._make, self._stop, self._interrupt = make, stop, interrupt
        self._first, self._last, self._max_staleness = first, last, max_staleness
        self._changed = threading.Condition()  # guards all attributes below
        self._ready: deque[tuple[int, T]] = deque()
        self._version: float = -math.inf
        self._paused = self._closed = self._making = False
        self._error: BaseException | None = None
        self._idle_since, self._idle_s, self._trainer_wait_s = time.perf_counter(), 0.0, 0.0
        self._reported_s, self._n_ready_at_take = self._idle_since, 0
        # A daemon, so that a second Ctrl-C does not wait for it.
        self._thread = threading.Thread(target=self._make_batches, name="rollouts", daemon=True)
        self._thread.start()

    def take_batch(self, step: int) -> T | None:
        """Return the batch of a step; None if a stop was requested before it was ready."""
        start = time.perf_counter()
        with self._changed:
            self._n_ready_at_take = len(self._ready)
            self._wait_until(lambda: self._ready or self._stop())
            self._trainer_wait_s += time.perf_counter() - start
            # A batch that is ready is trained on even if a stop was requested, because the run
            # saves after that step.
            if not self._ready:
                return None
            batch_step, batch = self._ready.popleft()
        assert batch_step == step, (batch_step, step)
        return batch

    def weights_synced(self, version: int) -> None:
        """Report that the engine has this version of the weights."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which no batch is made; waits for the current batch first."""
        start = time.perf_counter()
        with self._changed:
            self._paused = True
            self._wait_until(lambda: not self._making)
            self._trainer_wait_s += time.perf_counter() - start
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def wait_metrics(self) -> Metrics:
        """Metrics of idle time since the last call.

        time/wait_for_rollouts_s: of the trainer. time/wait_for_trainer_s: of the thread, because of
        the staleness limit, an evaluation, or the end of the run. rollout/overlap_frac: share of
        the time in which neither was idle. rollout/ready_batches: batches that were ready when the
        last one was taken.
        """
        with self._changed:
            now_s = time.perf_counter()
            # An idle period that still goes on is counted up to now, and begins again at this
            # moment.
            if not self._making:
                self._idle_s, self._idle_since = self._idle_s + now_s - self._idle_since, now_s
            trainer_wait_s, thread_wait_s, elapsed_s = (
                self._trainer_wait_s,
                self._idle_s,
                now_s - self._reported_s,
            )
            self._trainer_wait_s, self._idle_s, self._reported_s = 0.0, 0.0, now_s
            return {
                "time/wait_for_rollouts_s": trainer_wait_s,
                "time/wait_for_trainer_s": thread_wait_s,
                "rollout/overlap_frac": max(
                    0.0, 1.0 - (trainer_wait_s + thread_wait_s) / elapsed_s
                ),
                "rollout/ready_batches": self._n_ready_at_take,
            }

    def close(self) -> None:
        """Stop making batches; the current batch is interrupted, and ready ones are discarded."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            making = self._making
        # Not under the lock, because the thread needs it to end its batch.
        if making:
            self._interrupt()
        # If it does not end in time, it ends with the process, since it is a daemon.
        self._thread.join(GRACE_S)

    def _wait_until(self, condition: Callable[[], object]) -> None:
        while not (self._error or condition()):
            self._changed.wait(POLL_S)
        # Raised even if batches are ready. Otherwise the trainer would learn of it only some steps
        # later.
        if self._error:
            raise self._error

    def _make_batches(self) -> None:
        try:
            for step in range(self._first, self._last + 1):
                with self._changed:
                    # Tested under the lock together with _closed, so that no batch is started after
                    # close().
                    self._changed.wait_for(lambda step=step: self._closed or self._may_start(step))
                    if self._closed:
                        return
                    self._making = True
                    self._idle_s += time.perf_counter() - self._idle_since
                batch = self._make(step)
                with self._changed:
                    self._ready.append((step, batch))
                    self._mark_idle()
        # SystemExit too: if the thread ended without a word, the trainer would wait for its batch
        # forever.
        except BaseException as error:
            with self._changed:
                self._error = error
                self._mark_idle()

    def _may_start(self, step: int) -> bool:
        return not self._paused and self._version >= step - 1 - self._max_staleness

    def _mark_idle(self) -> None:
        self._making, self._idle_since = False, time.perf_counter()
        self._changed.notify_all()
