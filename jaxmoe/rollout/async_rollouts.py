# SPDX-License-Identifier: Apache-2.0
"""Async rollouts: batches sampled in a thread, steps ahead of the training; or one by one, in sync.

A batch is whatever `make(step)` returns. Step k trains on batch k and syncs version k, so batch k,
begun when version k-1-n was synced, holds no token older than that; n is the staleness. One
thread makes one batch after the other, and no batch is made while `paused()`.
Next: jaxmoe/rollout/staleness.py checks what came of it.
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

POLL_S = 0.05  # between looks at a request to stop, which comes as a signal and wakes no one
GRACE_S = 60.0  # for an unfinished batch to end after it was asked to


class SyncRollouts(Generic[T]):
    """Each batch is made when it is asked for, by the newest weights; AsyncRollouts' methods."""

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
        return {}  # the trainer waits for every rollout: time/rollout_s says how long

    def close(self) -> None:
        pass


class AsyncRollouts(Generic[T]):
    """Batches first..last, made in a thread, each at most `max_staleness` versions behind its step.

    The first begins when version first-1 is synced, or an older one that it may still use.
    What make() raises is raised in the caller's next call, before any batch that is ready.
    `interrupt` is called where a batch is being made at close(): it must end make() soon, by an
    error if need be. `stop` is looked at while the caller waits.
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
        self._changed = threading.Condition()  # guards all below
        self._ready: deque[tuple[int, T]] = deque()
        self._version: float = -math.inf
        self._paused = self._closed = self._making = False
        self._error: BaseException | None = None
        self._idle_since, self._idle_s, self._waited_s = time.perf_counter(), 0.0, 0.0
        self._told_at, self._ready_when_taken = self._idle_since, 0
        # daemon: a second Ctrl-C does not wait for it
        self._thread = threading.Thread(target=self._make_batches, name="rollouts", daemon=True)
        self._thread.start()

    def take_batch(self, step: int) -> T | None:
        """The batch of a step; None where the run was asked to stop first."""
        start = time.perf_counter()
        with self._changed:
            self._ready_when_taken = len(self._ready)
            self._wait_until(lambda: self._ready or self._stop())
            self._waited_s += time.perf_counter() - start
            if not self._ready:
                return None
            made_for, batch = self._ready.popleft()
        assert made_for == step, (made_for, step)
        return batch

    def weights_synced(self, version: int) -> None:
        """The engine holds this version now."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No batch is being made meanwhile; waits for the one being made."""
        start = time.perf_counter()
        with self._changed:
            self._paused = True
            self._wait_until(lambda: not self._making)
            self._waited_s += time.perf_counter() - start
        try:
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def wait_metrics(self) -> Metrics:
        """Since the last call: both sides' idle seconds, the share in which neither was idle.

        time/wait_for_rollouts_s: the trainer's. time/wait_for_trainer_s: the thread's, held up by
        the staleness it may not pass, by an evaluation, or with nothing left to make.
        rollout/ready_batches: batches that were ready when the last one was taken.
        """
        with self._changed:
            now = time.perf_counter()
            if not self._making:
                self._idle_s, self._idle_since = self._idle_s + now - self._idle_since, now
            mine, theirs, spent = self._waited_s, self._idle_s, now - self._told_at
            self._waited_s, self._idle_s, self._told_at = 0.0, 0.0, now
            return {
                "time/wait_for_rollouts_s": mine, "time/wait_for_trainer_s": theirs,
                "rollout/overlap_frac": max(0.0, 1.0 - (mine + theirs) / spent),
                "rollout/ready_batches": self._ready_when_taken,
            }  # fmt: skip

    def close(self) -> None:
        """Make no more; the one being made is interrupted, and lost with those that are ready."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            making = self._making
        if making:
            self._interrupt()
        self._thread.join(GRACE_S)

    def _wait_until(self, until: Callable[[], object]) -> None:
        while not (self._error or until()):
            self._changed.wait(POLL_S)
        if self._error:
            raise self._error

    def _make_batches(self) -> None:
        try:
            for step in range(self._first, self._last + 1):
                with self._changed:
                    self._changed.wait_for(lambda step=step: self._closed or self._may_start(step))
                    if self._closed:
                        return
                    self._making = True
                    self._idle_s += time.perf_counter() - self._idle_since
                batch = self._make(step)
                with self._changed:
                    self._ready.append((step, batch))
                    self._mark_idle()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._mark_idle()

    def _may_start(self, step: int) -> bool:
        return not self._paused and self._version >= step - 1 - self._max_staleness

    def _mark_idle(self) -> None:
        self._making, self._idle_since = False, time.perf_counter()
        self._changed.notify_all()
