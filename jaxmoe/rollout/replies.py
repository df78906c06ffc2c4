# SPDX-License-Identifier: Apache-2.0
"""Replies of an environment, computed in threads: a slow one delays its own episode only.

A thread cannot be ended from outside. A reply that takes longer than the limit ends its episode
with ENV_TIMEOUT, and its thread is abandoned: it is counted, and replaced by another. Too many
abandoned threads end the run. Next: jaxmoe/rollout/turns.py keeps what is sampled and replied.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxmoe.config import EngineError
from jaxmoe.distributed.channel import Channel
from jaxmoe.records import StopReason


@dataclass(frozen=True)
class NewContext:
    """Tokens that replace all that the policy has read: its next turn follows them alone."""

    tokens: tuple[int, ...]


Reply = Sequence[int] | NewContext | StopReason
T = TypeVar("T")
POLL_S = 0.05  # a closed engine and a late reply are noticed within this time
IDLE_S = 60.0  # a thread without a call ends after this time, or those of a finished run would stay


@runtime_checkable
class TokenEnvironment(Protocol):
    """The other side of a batch of episodes, in token ids.

    An engine knows no text, and an environment of text no tokens: jaxmoe/environments/episodes.py
    is between the two. Engines call `reply` from threads, through PendingReplies; the turns of one
    episode come in order.
    """

    reply_timeout_s: float  # an episode whose reply takes longer ends; 0: no limit
    patience_s: float  # the other episodes wait this long for a late reply; 0: as long as it takes
    reply_threads: "ReplyThreads"  # one object for a run

    def reply(self, episode: int, turn: Sequence[int]) -> "Reply":
        """Return the tokens that follow a turn of the policy, or the reason why nothing follows.

        `episode` is the index of the rollout among those that `generate` returns. The turn is all
        that the policy sampled since the last reply, its stop token included.
        """
        ...


@dataclass
class _Call:
    """One call in a thread."""

    run: Callable[[], Any]
    started_s: float | None = None  # by the clock; None: no thread is free yet
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False
    abandoned: bool = False

    def is_late(self, limit_s: float) -> bool:
        """True if it has been running for more than `limit_s` seconds; 0 is no limit."""
        started_s = self.started_s
        has_time = not limit_s or started_s is None or time.monotonic() - started_s <= limit_s
        return not (has_time or self.is_done)


class ReplyThreads:
    """At most `count` daemon threads for the replies of a run, while they are needed."""

    def __init__(self, count: int) -> None:
        self._count, self._n_threads, self._n_idle = count, 0, 0
        self._queue: deque[_Call] = deque()
        self.changed = threading.Condition()  # guards all attributes, and those of the calls
        self.n_abandoned = 0  # threads whose call is late and has not returned

    def submit(self, run: Callable[[], Any]) -> _Call:
        """Compute `run()` in a thread; the call has its result when it is done."""
        call = _Call(run)
        with self.changed:
            self._queue.append(call)
            self._start_threads()
            self.changed.notify_all()
        return call

    def run_all(self, runs: Sequence[Callable[[], T]], limit_s: float) -> list[T | Exception]:
        """Return the result of each function, or its exception; TimeoutError if it is late."""
        calls = [self.submit(run) for run in runs]
        for call in calls:
            while not (call.is_done or call.abandoned):
                with self.changed:
                    if not call.is_done:
                        self.changed.wait(POLL_S)
                if call.is_late(limit_s):
                    self.abandon(call)
        results: list[T | Exception] = []
        for call in calls:
            if call.error is not None and not isinstance(call.error, Exception):
                raise call.error
            timeout_error = TimeoutError(f"it took more than {limit_s:g} s")
            results.append(timeout_error if call.abandoned else call.error or call.result)
        return results

    def abandon(self, call: _Call) -> None:
        """Give up a call that is late; its thread ends when the call returns. A call that has
        returned meanwhile is late all the same, and its thread goes on.

        Raises EngineError if more threads are abandoned than the run may have.
        """
        with self.changed:
            call.abandoned = True
            if call.is_done:
                return
            self._n_threads -= 1
            self.n_abandoned += 1
            if self.n_abandoned > self._count:
                raise EngineError(
                    f"at most {self._count} calls of the environment may be late at once "
                    f"(rollout.reply_threads); {self.n_abandoned} have not returned. Their threads "
                    "cannot be ended. Correct the environment, or try "
                    "--set rollout.reply_timeout_s=300."
                )
            self._start_threads()

    def _start_threads(self) -> None:
        """Start a thread for each call that waits, up to the limit; the lock is held."""
        for _ in range(min(len(self._queue) - self._n_idle, self._count - self._n_threads)):
            self._n_threads += 1
            # Daemons, so that a call that never returns does not keep the process alive.
            threading.Thread(target=self._work, name="jaxmoe-reply", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self.changed:
                self._n_idle += 1
                has_call = self.changed.wait_for(lambda: self._queue, IDLE_S)
                self._n_idle -= 1
                if not has_call:
                    self._n_threads -= 1
                    return
                call = self._queue.popleft()
                call.started_s = time.monotonic()
            try:
                result, error = call.run(), None
            # Whatever it is, the thread that waits for this reply raises it.
            except BaseException as raised:
                result, error = None, raised
            with self.changed:
                call.result, call.error, call.is_done = result, error, True
                self.changed.notify_all()
                if call.abandoned:
                    self.n_abandoned -= 1
                    return


class PendingReplies:
    """The replies that a batch of episodes waits for."""

    def __init__(
        self, environment: TokenEnvironment, is_closed: Callable[[], bool] = lambda: False
    ) -> None:
        self._environment, self._is_closed = environment, is_closed
        self._threads = environment.reply_threads
        self._calls: dict[int, _Call] = {}  # by episode

    def __len__(self) -> int:
        return len(self._calls)

    def submit(self, episode: int, turn: Sequence[int]) -> None:
        """Compute the reply to a turn; `wait` returns it."""
        self._calls[episode] = self._threads.submit(lambda: self._environment.reply(episode, turn))

    def wait(self, patience_s: float) -> dict[int, Reply]:
        """Return the replies that are there after `patience_s` seconds, or earlier all of them.

        0 waits until all are there. Late replies are ENV_TIMEOUT. Raises what a reply raised, and
        EngineError if the engine is closed meanwhile.
        """
        deadline = time.monotonic() + patience_s if patience_s else float("inf")
        ready = self.poll()
        while self._calls and time.monotonic() < deadline:
            self.wait_for_change(lambda: False)
            ready |= self.poll()
        return ready

    def wait_for_change(self, is_over: Callable[[], object]) -> None:
        """Wait until a reply is there or `is_over`, at most POLL_S."""
        changed = self._threads.changed
        with changed:
            changed.wait_for(lambda: is_over() or self.has_reply, POLL_S)

    @property
    def has_reply(self) -> bool:
        """True if `poll` has a reply, or raises an error of one."""
        return any(call.is_done for call in self._calls.values())

    def poll(self) -> dict[int, Reply]:
        """Return the replies that are there, without waiting; as `wait` otherwise."""
        ready: dict[int, Reply] = {}
        with self._threads.changed:
            for episode, call in list(self._calls.items()):
                if call.error is not None:
                    raise call.error
                if call.is_done:
                    ready[episode] = call.result
                    del self._calls[episode]
        if self._calls and self._is_closed():
            raise EngineError("the engine was closed while it waited for the environment.")
        limit_s = self._environment.reply_timeout_s
        for episode, call in list(self._calls.items()):
            if call.is_late(limit_s):
                self._threads.abandon(call)
                ready[episode] = StopReason.ENV_TIMEOUT
                del self._calls[episode]
        return ready


class SharedReplies:
    """The replies to a batch, by row. With several processes each computes a share of them.

    All processes wait for the slowest share, at most for the environment's patience, and exchange
    what is there. So the same replies arrive at the same turn in all of them.
    """

    def __init__(
        self, environment: TokenEnvironment, is_closed: Callable[[], bool], first: int
    ) -> None:
        self._pending = PendingReplies(environment, is_closed)
        self._patience_s, self._first = environment.patience_s, first
        self._channel, self._waiting = open_reply_channel(), set[int]()

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, row: int, turn: Sequence[int]) -> None:
        self._waiting.add(row)
        episode = self._first + row
        if episode % self._channel.count == self._channel.number:
            self._pending.submit(episode, turn)

    def wait(self) -> dict[int, Reply]:
        """Return the replies that are there in time, of all processes; possibly none."""

        def wait_for_share() -> dict[str, Any]:
            share = self._pending.wait(self._patience_s)
            return {str(episode - self._first): _to_json(x) for episode, x in share.items()}

        replies: dict[int, Reply] = {}
        for share in self._channel.gather_results(wait_for_share):
            for row, reply in share.items():
                replies[int(row)] = _from_json(reply)
        self._waiting -= set(replies)
        return replies


def _to_json(reply: Reply) -> Any:
    if isinstance(reply, StopReason):
        return str(reply)
    if isinstance(reply, NewContext):
        return {"context": list(map(int, reply.tokens))}
    return list(map(int, reply))


def _from_json(reply: Any) -> Reply:
    if isinstance(reply, dict):
        return NewContext(tuple(reply["context"]))
    return StopReason(reply) if isinstance(reply, str) else reply


@cache
def open_reply_channel() -> Channel:
    """The channel of replies; one for all engines of a process, whose messages are counted."""
    return Channel("replies")
