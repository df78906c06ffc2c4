# SPDX-License-Identifier: Apache-2.0
"""The replicas of an engine: those here share the work, those away are fetched back.

A replica that does not answer loses its work to the others at once, and a thread brings it back
beside them; where it cannot, it is away, and asked again every few seconds. It comes back only with
the weights that are current then. Who is alone is waited for. The run ends where nobody is left.
Next: jaxmoe/vllm/replica.py.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.vllm.backend import Backend, RequestFailed
from jaxmoe.vllm.replica import Replica, TargetWeights
from jaxmoe.vllm.sync import WeightSyncError

NO_FAILURES: Mapping[Replica, int] = MappingProxyType({})
AGAIN_S, LONGEST_S = 2.0, 60.0  # between two looks at one that is away


class Fleet:
    """`away`: backends that did not answer when the run began."""

    def __init__(
        self, replicas: Sequence[Replica], away: Sequence[Backend], report: Callable[[str], None]
    ) -> None:
        self.replicas, self._report = list(replicas), report
        self.target: TargetWeights | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._away = set[Replica]()  # until they are fetched back
        self._mending = set[Replica]()  # do not answer at the moment
        for replica in [r for r in self.replicas if r.backend in away]:
            self._away.add(replica)
            self._thread(self._fetch_back, replica)

    @property
    def max_rows(self) -> int:
        """Sequences that each of them computes at once."""
        return min((r.max_rows for r in self.replicas), default=sys.maxsize)

    def sync(self, target: TargetWeights, mode: str) -> bool:
        """Give the weights to all who are here.

        False where one that is away may still read an earlier version's file.
        Raises WeightSyncError where one holds other weights, EngineError where none is left.
        """
        with self._lock:
            self.target = target
            away = set(self._away)

        def one(replica: Replica) -> None:
            if replica not in away:
                try:
                    return replica.sync_weights(target, mode)
                except WeightSyncError:
                    raise
                except EngineError as error:
                    return self._drop(replica, error)
            if target.make is not None and target.file is None:  # now, or with the next version
                with suppress(RequestFailed, EngineError, ConfigError):
                    self._bring_back(replica, target)

        with ThreadPoolExecutor(len(self.replicas)) as pool:
            list(pool.map(one, self.replicas))
        target.logps = target.make = None  # the trainer may give the weights away now
        for replica in self.replicas:
            if replica not in away:
                with replica.lock:  # nobody reads them any more
                    pass
        idle = [r.lock.acquire(blocking=False) and not r.lock.release() for r in away]
        return all(idle)

    def take(self, tokens: int, failures: Mapping[Replica, int] = NO_FAILURES) -> Replica:
        """The one with the fewest tokens in flight, which these are added to.

        `failures` of the request so far: one that fails at once has the fewest tokens in flight,
        and would be asked until the retries are spent while others could answer.
        """
        with self._lock:
            left = [r for r in self.replicas if r not in self._away]  # never empty: see _drop
            here = [r for r in left if r not in self._mending] or left
            replica = min(here, key=lambda r: (failures.get(r, 0), r.in_flight))
            replica.in_flight += tokens
            return replica

    def give_back(self, replica: Replica, tokens: int) -> None:
        with self._lock:
            replica.in_flight -= tokens

    def failed(self, replica: Replica, seen: int, target: TargetWeights) -> None:
        """After a request that failed with generation `seen`: mend it, beside the work of others.

        Who is alone is waited for: raises EngineError where it does not come back.
        """
        with self._lock:
            if replica in self._away:
                return
            others = set(self.replicas) - self._away - self._mending - {replica}
            if others and replica not in self._mending:
                self._mending.add(replica)
                self._thread(self._mend, replica, seen, target)
        if not others:
            replica.recover(seen, target)

    def close(self) -> None:
        self._closed.set()

    def _mend(self, replica: Replica, seen: int, target: TargetWeights) -> None:
        try:
            replica.recover(seen, target)
        except (EngineError, ConfigError) as error:
            with suppress(EngineError, ConfigError):  # the last: whoever waits for it is told
                self._drop(replica, error)
        finally:
            with self._lock:
                self._mending.discard(replica)

    def _drop(self, replica: Replica, error: Exception) -> None:
        """Go on without it. Raises the error where it is the last."""
        if self._closed.is_set():
            raise error
        with self._lock:
            if replica in self._away:
                return
            if len(self._away) + 1 == len(self.replicas):
                raise error
            self._away.add(replica)
        self._report(f"{replica.backend.name} is away; the others go on without it")
        self._thread(self._fetch_back, replica)

    def _thread(self, run: Callable[..., None], *args: object) -> None:
        threading.Thread(target=run, args=args, name="jaxmoe-fetch", daemon=True).start()

    def _fetch_back(self, replica: Replica) -> None:
        """Until it is here with what is current then."""
        pause = AGAIN_S
        while not self._closed.wait(pause):
            with self._lock:
                if replica not in self._away:
                    return
                target = self.target
            if target is None or target.probe_reference is None or target.logps is not None:
                continue  # the first to be loaded, or one that is being loaded
            if target.file is None:
                continue  # the next sync gives it what is then at hand
            start = time.monotonic()
            try:
                self._bring_back(replica, target)
            except RequestFailed:  # told when it went
                if time.monotonic() - start > pause:  # more than a look: a server was started, say
                    pause = min(2 * pause, LONGEST_S)
            except (EngineError, ConfigError) as error:
                if not self._closed.is_set():
                    self._report(str(error))
                pause = min(2 * pause, LONGEST_S)

    def _bring_back(self, replica: Replica, target: TargetWeights) -> None:
        replica.bring_back(target)
        with self._lock:
            if self.target is not target:
                return  # newer ones came meanwhile
            self._away.discard(replica)
        self._report(f"{replica.backend.name} is back, with weights of version {target.version}")
