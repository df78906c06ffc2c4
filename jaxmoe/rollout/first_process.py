# SPDX-License-Identifier: Apache-2.0
"""Rollouts that the first of several processes makes ahead of the training, for all of them.

Only that process has a thread of rollouts, and no thread has a collective: batches go to the other
processes when all of them take one, in their main threads.
Next: jaxmoe/collection/open_rollouts.py opens them.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

from jaxmoe.distributed.channel import Channel
from jaxmoe.rollout.async_rollouts import AsyncRollouts
from jaxmoe.shapes import Metrics

T = TypeVar("T")


@runtime_checkable
class GroupSaver(Protocol):
    """Rollouts with groups that wait, which a checkpoint saves."""

    def save(self, step: int) -> tuple[dict[str, Any], bytes]:
        """Return the state after a step, as JSON values, and the groups that wait."""
        ...

    def settle(self, step: int) -> None:
        """Wait for groups that began with weights older than those after this step."""
        ...

    def discard_drawn(self) -> None:
        """Leave groups that were drawn and not trained out of the next `save`."""
        ...


class FirstProcessRollouts(Generic[T]):
    """AsyncRollouts for all processes, whose methods all of them call, in the same order.

    rollouts: those of the first process; None in the others.
    pack, unpack: a batch as bytes, and back.
    """

    def __init__(
        self,
        rollouts: AsyncRollouts[T] | None,
        pack: Callable[[T], bytes],
        unpack: Callable[[bytes], T],
        *,
        channel: Channel | None = None,
    ) -> None:
        self._rollouts, self._pack, self._unpack = rollouts, pack, unpack
        self._channel = channel or Channel("rollouts")

    def take_batch(self, step: int) -> T | None:
        """Return the batch of a step; None if the first process was to stop before it was ready.

        An error of the first process is raised in all.
        """
        batch: T | None = None

        def take_and_pack() -> bytes:
            nonlocal batch
            assert self._rollouts is not None, "the first process makes the batches"
            batch = self._rollouts.take_batch(step)
            return b"" if batch is None else self._pack(batch)

        data = self._channel.broadcast_from_first(take_and_pack)
        if self._rollouts is None and data:
            batch = self._unpack(data)
        return batch

    def weights_synced(self, version: int) -> None:
        """Report that the engine has this version of the weights."""
        if self._rollouts is not None:
            self._rollouts.weights_synced(version)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which the first process makes no batch."""
        if self._rollouts is None:
            yield
            return
        with self._rollouts.paused():
            yield

    def wait_metrics(self) -> Metrics:
        """Metrics of idle time in the first process, which writes the metrics of a run."""
        return {} if self._rollouts is None else self._rollouts.wait_metrics()

    def close(self) -> None:
        if self._rollouts is not None:
            self._rollouts.close()


class FirstProcessGroups(FirstProcessRollouts[T]):
    """FirstProcessRollouts over GroupRollouts."""

    def save(self, step: int) -> tuple[dict[str, Any], bytes]:
        """Return in all processes what the first one saves; see GroupSaver.save."""

        def pack_state() -> bytes:
            saved, queue = cast(GroupSaver, self._rollouts).save(step)
            return json.dumps(saved).encode() + b"\n" + queue

        state, _, queue = self._channel.broadcast_from_first(pack_state).partition(b"\n")
        return json.loads(state), queue

    def settle(self, step: int) -> None:
        if self._rollouts is not None:
            cast(GroupSaver, self._rollouts).settle(step)

    def discard_drawn(self) -> None:
        if self._rollouts is not None:
            cast(GroupSaver, self._rollouts).discard_drawn()
