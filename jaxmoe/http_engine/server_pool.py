# SPDX-License-Identifier: Apache-2.0
"""The pool of an engine's replicas, which share the work; unavailable ones are reconnected.

If a replica does not answer, the others take over its work at once, and a thread restores it
concurrently. If that fails, the replica becomes unavailable, and reconnecting is tried every few
seconds; it returns only with the weights that are current then. With one server left, callers wait
for it; with none, the run ends. Next: jaxmoe/http_engine/replica.py.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.http_engine.backend import Backend, RequestFailed
from jaxmoe.http_engine.probe import WeightSyncError
from jaxmoe.http_engine.replica import Replica
from jaxmoe.http_engine.target_weights import TargetWeights

NO_FAILURES: Mapping[Replica, int] = MappingProxyType({})
MIN_RECONNECT_S, MAX_RECONNECT_S = 2.0, 60.0  # between two attempts to reconnect


class ServerPool:
    """The replicas, and which of them can take work.

    `unavailable`: backends that did not answer when the run began.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        unavailable: Sequence[Backend],
        report: Callable[[str], None],
    ) -> None:
        self.replicas, self._report = list(replicas), report
        self.target: TargetWeights | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._unavailable = set[Replica]()  # until they are reconnected
        self._recovering = set[Replica]()  # failed, and being restored by a thread
        for replica in [r for r in self.replicas if r.backend in unavailable]:
            self._unavailable.add(replica)
            self._start_thread(self._keep_reconnecting, replica)

    @property
    def max_rows(self) -> int:
        """The number of sequences that each replica can compute at once."""
        return min((r.max_rows for r in self.replicas), default=sys.maxsize)

    def sync_weights(self, target: TargetWeights, mode: str) -> bool:
        """Sync the weights to all available replicas.

        Returns False if an unavailable replica may still read an earlier version's file. Raises
        WeightSyncError if a replica holds other weights, EngineError if none is left.
        """
        with self._lock:
            self.target = target
            unavailable = set(self._unavailable)

        def sync_replica(replica: Replica) -> None:
            if replica not in unavailable:
                try:
                    return replica.sync_weights(target, mode)
                except WeightSyncError:
                    raise
                except EngineError as error:
                    return self._mark_unavailable(replica, error)
            # Reconnect it now, or else with the next version.
            if target.build_update is not None and target.file is None:
                with suppress(RequestFailed, EngineError, ConfigError):
                    self._reconnect_replica(replica, target)

        with ThreadPoolExecutor(len(self.replicas)) as pool:
            list(pool.map(sync_replica, self.replicas))
        target.logps = target.build_update = None  # from here on the trainer may donate the weights
        for replica in self.replicas:
            if replica not in unavailable:
                with replica.lock:  # wait until nobody reads them any more
                    pass
        released = [r.lock.acquire(blocking=False) and not r.lock.release() for r in unavailable]
        return all(released)

    def acquire_replica(
        self,
        tokens: int,
        failures: Mapping[Replica, int] = NO_FAILURES,
        preferred: Replica | None = None,
    ) -> Replica:
        """Return the replica with the fewest tokens in flight, and add these tokens to it.

        Replicas with fewer `failures` of this request come first: a replica that fails at once has
        the fewest tokens in flight, and would use up the retries while others could answer.
        `preferred` is returned if it answers and has no more than twice the work of the others.
        """
        with self._lock:
            # The list is not empty: _mark_unavailable leaves one replica.
            available = [r for r in self.replicas if r not in self._unavailable]
            responsive = [r for r in available if r not in self._recovering] or available
            replica = min(responsive, key=lambda r: (failures.get(r, 0), r.in_flight))
            if preferred in responsive and not failures.get(preferred):
                if preferred.in_flight <= 2 * replica.in_flight + tokens:
                    replica = preferred
            replica.in_flight += tokens
            return replica

    def release_replica(self, replica: Replica, tokens: int) -> None:
        with self._lock:
            replica.in_flight -= tokens

    def handle_failure(self, replica: Replica, generation: int, target: TargetWeights) -> None:
        """Restore a replica after a failed request of `generation`, while the others work.

        The last replica is waited for: raises EngineError if it cannot be restored.
        """
        with self._lock:
            if replica in self._unavailable:
                return
            responsive = set(self.replicas) - self._unavailable - self._recovering - {replica}
            if responsive and replica not in self._recovering:
                self._recovering.add(replica)
                self._start_thread(self._recover_replica, replica, generation, target)
        if not responsive:
            replica.recover(generation, target)

    def close(self) -> None:
        self._closed.set()

    def _recover_replica(self, replica: Replica, generation: int, target: TargetWeights) -> None:
        try:
            replica.recover(generation, target)
        except (EngineError, ConfigError) as error:
            with suppress(EngineError, ConfigError):  # the last one: waiting callers get the error
                self._mark_unavailable(replica, error)
        finally:
            with self._lock:
                self._recovering.discard(replica)

    def _mark_unavailable(self, replica: Replica, error: Exception) -> None:
        """Continue without the replica. Raises the error if it is the last one."""
        if self._closed.is_set():
            raise error
        with self._lock:
            if replica in self._unavailable:
                return
            if len(self._unavailable) + 1 == len(self.replicas):
                raise error
            self._unavailable.add(replica)
        self._report(
            f"{replica.backend.name} is unavailable; the other servers continue without it"
        )
        self._start_thread(self._keep_reconnecting, replica)

    def _start_thread(self, run: Callable[..., None], *args: object) -> None:
        threading.Thread(target=run, args=args, name="jaxmoe-reconnect", daemon=True).start()

    def _keep_reconnecting(self, replica: Replica) -> None:
        """Try until the replica is available, with the weights that are current then."""
        delay_s = MIN_RECONNECT_S
        while not self._closed.wait(delay_s):
            with self._lock:
                if replica not in self._unavailable:
                    return
                target = self.target
            if target is None or target.probe_reference is None or target.logps is not None:
                continue  # no version is loaded yet, or one is being loaded
            if target.file is None:
                continue  # the next sync sends the weights of that time
            start = time.monotonic()
            try:
                self._reconnect_replica(replica, target)
            except RequestFailed:  # reported when it became unavailable
                if time.monotonic() - start > delay_s:  # costly attempt, e.g. a server start
                    delay_s = min(2 * delay_s, MAX_RECONNECT_S)
            except (EngineError, ConfigError) as error:
                if not self._closed.is_set():
                    self._report(str(error))
                delay_s = min(2 * delay_s, MAX_RECONNECT_S)

    def _reconnect_replica(self, replica: Replica, target: TargetWeights) -> None:
        replica.reconnect(target)
        with self._lock:
            if self.target is not target:
                return  # newer weights arrived meanwhile
            self._unavailable.discard(replica)
        self._report(
            f"{replica.backend.name} is reconnected, with weights of version {target.version}"
        )
