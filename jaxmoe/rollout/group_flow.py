# SPDX-License-Identifier: Apache-2.0
"""Groups that are sampled one by one, each in a thread, and drawn in the order of admission.

A group is all samples of one prompt. When one ends, the next one that is admitted begins, so that
the longest answer of a batch delays no other. Three kinds of threads meet here: the trainer reports
the weights, which admits groups; the thread of jaxmoe/rollout/async_rollouts.py draws the groups of
a step and scores them; each group in flight has one of its own.

Group g may be `max_lag` steps late. So that no token gets older than `max_staleness`, sampling is
only `ahead` = max_staleness - max_lag steps ahead, which also bounds the groups that wait.
Next: jaxmoe/rollout/group_order.py has the rule.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jaxmoe.config import EngineError
from jaxmoe.rollout.async_rollouts import GRACE_S, POLL_S, AsyncRollouts
from jaxmoe.rollout.group_order import GroupOrder
from jaxmoe.shapes import Metrics

T = TypeVar("T")
B = TypeVar("B")


@dataclass(frozen=True)
class FlowState(Generic[T]):
    """The groups after a step: what a resume needs."""

    n_draws: int
    oldest: int  # that is not trained
    drawn: list[int]  # trained before an older one
    finished: Mapping[int, T]  # not trained
    unfinished: int  # groups that were admitted, and are sampled anew


class GroupFlow(Generic[T]):
    """Admits groups, samples at most `places` of them at once, and hands them out in order.

    `begun`: groups whose function runs at once, if they share the places.

    `admit(number)` is called for one number after the other, from that of the oldest group that is
    not trained, with the newest weights loaded; it returns the function that samples the group.
    `finished` are groups of an earlier process.
    """

    def __init__(
        self,
        admit: Callable[[int], Callable[[], T]],
        order: GroupOrder,
        *,
        places: int,
        begun: int = 0,
        ahead: int,
        last: int,
        step: int,
        finished: Mapping[int, T] | None = None,
    ) -> None:
        self._admit_group, self._order, self._places = admit, order, places
        self._begun = begun or places
        self._ahead, self._last, self._collected = ahead, last, step
        self._changed = threading.Condition()  # guards all attributes
        self._finished = dict(finished or {})
        self._drawn: dict[int, dict[int, T]] = {}  # by step, until it is trained
        self._waiting: deque[tuple[int, Callable[[], T]]] = deque()
        self._unfinished: dict[int, float] = {}  # version at the admission, by number
        self._next, self._version, self._n_running = order.oldest, -math.inf, 0
        self._closed, self._error, self._discards_drawn = False, None, False
        self._busy_s, self._counted_s = 0.0, time.perf_counter()
        self._reported_s = self._counted_s

    def weights_synced(self, version: int) -> None:
        """Admit the groups that these weights allow; the groups of steps up to it are trained."""
        with self._changed:
            self._version = version
            self._drawn = {step: g for step, g in self._drawn.items() if step > version}
            self._admit()

    def draw(self, step: int) -> tuple[dict[int, T], Metrics]:
        """Wait for the groups that are next, by number. Raises what a group raised.

        A step may draw several times.
        """
        with self._changed:
            self._collected = step - 1
            self._admit()
            while self._error or (numbers := self._order.draw(self._finished)) is None:
                # Even if groups are ready: the trainer should learn of it at once.
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise EngineError("the rollouts were closed while groups were sampled.")
                self._changed.wait(POLL_S)
            self._collected = step
            groups = {number: self._finished.pop(number) for number in numbers}
            self._drawn[step] = self._drawn.get(step, {}) | groups
            lags = [self._order.lag(number) for number in numbers]
            return groups, {
                "rollout/oldest_group": numbers[0],
                "rollout/newest_group": numbers[-1],
                "rollout/group_lag_max": max(0, *lags),
                "rollout/finished_groups": len(self._finished),
            }

    @property
    def n_drawn(self) -> int:
        """Number of groups that were drawn so far."""
        return self._order.n_draws * self._order.per_draw

    def state(self, step: int) -> FlowState[T]:
        """Return the state after a step; groups drawn for later steps count as finished, unless
        they were discarded."""
        with self._changed:
            order = self._order
            returned = {
                n: g for s, groups in self._drawn.items() if s > step for n, g in groups.items()
            }
            n_draws = order.n_draws - len(returned) // order.per_draw
            is_drawn = {*range(order.oldest), *order.drawn} - returned.keys()
            oldest = min([order.oldest, *returned])
            return FlowState(
                n_draws,
                oldest,
                sorted(n for n in is_drawn if n > oldest),
                self._finished | ({} if self._discards_drawn else returned),
                len(self._unfinished) + len(returned) * self._discards_drawn,
            )

    def discard_drawn(self) -> None:
        """Leave groups that were drawn and not trained out of the next `state`."""
        with self._changed:
            self._discards_drawn = True

    def settle(self, version: int, stop: Callable[[], object]) -> None:
        """Wait for the groups that began with older weights, which cannot be sampled again."""
        with self._changed:
            while min(self._unfinished.values(), default=version) < version and not (
                self._closed or self._error or stop()
            ):
                self._changed.wait(POLL_S)

    def idle_metrics(self, trainer_wait_s: float) -> Metrics:
        """Shares of the time since the last call in which places, and the trainer, were idle."""
        with self._changed:
            self._count_time()
            elapsed_s = self._counted_s - self._reported_s
            busy_frac = self._busy_s / (self._places * elapsed_s)
            self._busy_s, self._reported_s = 0.0, self._counted_s
        return {
            "rollout/engine_idle_frac": max(0.0, 1.0 - busy_frac),
            "rollout/trainer_idle_frac": min(1.0, trainer_wait_s / elapsed_s),
        }

    def close(self, interrupt: Callable[[], None]) -> None:
        """Admit no more; `interrupt` ends the groups in flight, which may take a while."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            is_running = self._n_running > 0
        if is_running:
            interrupt()
        with self._changed:
            self._changed.wait_for(lambda: self._n_running == 0, GRACE_S)

    def _admit(self) -> None:
        if self._closed or self._version == -math.inf:
            return
        order, steps = self._order, min(self._version + 1 + self._ahead, self._last)
        # One draw for each step that may be sampled, since more may never be needed.
        end = order.per_draw * (order.n_draws + int(steps) - self._collected)
        while self._next < end:
            number, self._next = self._next, self._next + 1
            sample = self._admit_group(number)
            if number in order.drawn or number in self._finished:
                continue
            self._unfinished[number] = self._version
            self._waiting.append((number, sample))
        self._start()

    def _start(self) -> None:
        self._count_time()
        while self._waiting and self._n_running < self._begun:
            self._n_running += 1
            # A daemon, so that a second Ctrl-C does not wait for it.
            thread = threading.Thread(
                target=self._sample, args=self._waiting.popleft(), name="group", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # no more threads; a draw would wait for ever
                self._n_running -= 1
                self._error = self._error or error
                return

    def _sample(self, number: int, sample: Callable[[], T]) -> None:
        result, error = None, None
        try:
            result = sample()
        # SystemExit too: nobody would learn of it, and the draw would wait forever.
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error = self._error or error
            if result is not None:
                self._finished[number] = result
                del self._unfinished[number]
            self._count_time()
            self._n_running -= 1
            self._start()
            self._changed.notify_all()

    def _count_time(self) -> None:
        now_s = time.perf_counter()
        self._busy_s += min(self._n_running, self._places) * (now_s - self._counted_s)
        self._counted_s = now_s


class GroupRollouts(AsyncRollouts[B], Generic[B, T]):
    """AsyncRollouts whose batches are drawn from a flow of groups."""

    def __init__(
        self,
        make: Callable[[int], B],
        flow: GroupFlow[T],
        *,
        first: int,
        last: int,
        ahead: int,
        stop: Callable[[], object],
        interrupt: Callable[[], None],
        save: Callable[[int], tuple[dict[str, Any], bytes]],
    ) -> None:
        self.flow, self.save = flow, save
        super().__init__(
            make, first=first, last=last, max_staleness=ahead, stop=stop, interrupt=interrupt
        )

    def settle(self, step: int) -> None:
        """Wait for groups that began with weights older than those after this step."""
        start = time.perf_counter()
        self.flow.settle(step, self._stop)
        self._trainer_wait_s += time.perf_counter() - start

    def discard_drawn(self) -> None:
        """Leave groups that were drawn and not trained out of the next `save`."""
        self.flow.discard_drawn()

    def weights_synced(self, version: int) -> None:
        self.flow.weights_synced(version)
        super().weights_synced(version)

    def wait_metrics(self) -> Metrics:
        """Metrics of idle time; see AsyncRollouts.wait_metrics and GroupFlow.idle_metrics."""
        metrics = super().wait_metrics()
        return metrics | self.flow.idle_metrics(metrics["time/wait_for_rollouts_s"])

    def close(self) -> None:
        self.flow.close(self._interrupt)
        super().close()
