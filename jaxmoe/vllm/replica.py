# SPDX-License-Identifier: Apache-2.0
"""One vLLM replica: which weights it was verified to hold, and how it is brought back.

No response leaves here but with weight labels that this very process was verified for, none older
than the version that was current when it was requested. Next: jaxmoe/vllm/sync.py.
"""

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxmoe.config import EngineError, ModelConfig
from jaxmoe.observe.progress import phase
from jaxmoe.records import Rollout, Sampling, StopReason
from jaxmoe.vllm.backend import Backend, RequestFailed
from jaxmoe.vllm.request import PromptRequest, sample, score
from jaxmoe.vllm.responses import Completion
from jaxmoe.vllm.server import Server
from jaxmoe.vllm.strict_json import shown
from jaxmoe.vllm.sync import Logps, Probe, ProbeReference, names, transfer_weights, workers
from jaxmoe.vllm.transport import Transport
from jaxmoe.weight_sync.files import WeightFile
from jaxmoe.weight_sync.update import WeightUpdate

LONGEST_S = 10.0  # between two attempts


@dataclass
class TargetWeights:
    """The version that every replica must hold."""

    label: str
    version: int
    file: WeightFile | None  # for every replica, or
    make: Callable[[Transport], WeightUpdate] | None  # for one, while the weights are at hand
    logps: Logps | None  # likewise
    probe_reference: ProbeReference | None = None  # afterwards


def backoff(attempt: int) -> None:
    """0.1 s, doubled each time, times 0.5 to 1.5 so that threads do not come back at once."""
    time.sleep(min(LONGEST_S, 0.1 * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.5))


class Replica:
    """Its lock is held while weights change; `generation` counts how often they came anew."""

    def __init__(
        self, backend: Backend, server: Server | None, *, transport: str, cfg: ModelConfig,
        probe: Probe, retries: int, report: Callable[[str], None],
        check: Callable[[Backend], object], try_out: Callable[[Backend], None] | None = None,
    ) -> None:  # fmt: skip
        self.backend, self._server, self._transport = backend, server, Transport(transport)
        self._cfg, self._probe, self._retries = cfg, probe, retries
        self.lock = threading.RLock()
        self.generation = 0
        self.in_flight = 0  # tokens; the fleet's to count
        self.max_rows = sys.maxsize  # sequences that it computes at once
        self._check = check  # whether it can be used at all
        self._try_out = try_out  # and, once it is connected, serve what it will be sent
        self._report, self._failures = report, deque[str](maxlen=3)  # the last few
        self._verified: dict[str, int] = {}  # label -> version
        self._current_version = -1
        self._invalidations = 0  # times that its weights were no longer known
        self._given_up: EngineError | None = None  # why nobody tries any more
        self._closed = False
        self._connected: list[str] | None = None  # the workers whose transfer was set up

    def sync_weights(self, target: TargetWeights, mode: str, *, restart: bool = False) -> None:
        """Send the weights and verify them; whatever breaks meanwhile is tried again.

        Raises WeightSyncError where it holds other weights than it was given, EngineError where
        it does not come back.
        """
        with self.lock:
            for attempt in range(self._retries + 1):
                self._check_open()
                try:
                    if restart or attempt:
                        self._restart(always=attempt > 1)
                    self._sync_once(target, mode)
                    self._given_up = None
                    return
                except RequestFailed as error:
                    self._invalidate()
                    self.report_failure(str(error))
                    backoff(attempt)
            raise self.gave_up(f"weights of version {target.version} could not be synced")

    def _sync_once(self, target: TargetWeights, mode: str) -> None:
        found = workers(self.backend)
        if found.names != self._connected:
            self._invalidate()
            self._transport.open(self.backend)
            if self._try_out is not None:
                self._try_out(self.backend)
            found = workers(self.backend)
        self._connected, self.max_rows = found.names, found.rows
        update = target.file
        if update is None:
            if target.make is None:
                raise self.gave_up(
                    "its weights are gone, and only files can be sent again: try --set "
                    "rollout.vllm.transport=files"
                )
            update = target.make(self._transport)
        try:
            transfer_weights(self.backend, update, mode, self._invalidate, found.names)
            target.probe_reference = self._probe.check(
                self.backend, update, target.logps, target.probe_reference
            )
        except BaseException:
            self._invalidate()
            if self._transport.name == "nccl":  # a broadcast may still run: connect anew
                self._transport.close()
                self._connected = None
            raise
        finally:
            if target.file is None:
                update.close()
        self._verified[target.label] = self._current_version = target.version
        self.generation += 1

    def _invalidate(self) -> None:
        """Nothing it holds is verified any more.

        In this order: who reads the count and then finds labels will see it change.
        """
        self._verified.clear()
        self._invalidations += 1

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"{self.backend.name} was closed.")

    def _restart(self, *, always: bool) -> None:
        if self._server is None:
            self.backend.health()
            return
        if self._server.alive() and not always:
            try:
                return self.backend.health()
            except RequestFailed:
                pass
        self._check_open()
        self._invalidate()
        self.backend.close()
        with phase(f"{self.backend.name} does not answer; starting another"):
            try:
                self.backend = self._server.start()
            except EngineError as error:
                raise RequestFailed(str(error)) from error
        if self._closed:
            self.backend.close()
            self._server.stop()
            self._check_open()

    def recover(self, seen: int, target: TargetWeights) -> None:
        """After a failure of generation `seen`: back to the target weights.

        Where that failed once, those who wait do not try it again: raises EngineError.
        """
        with self.lock:
            self._check_open()
            if self._given_up is not None:
                raise self._given_up
            if self.generation != seen and self._verified:
                return  # another thread was here first
            if target.label in self._verified:
                try:
                    self.backend.health()
                    loaded = self.backend.loaded_state()
                    same = names(loaded) == self._connected
                    if same and all(w.get("label") == target.label for w in loaded):
                        return  # a passing failure
                    self.report_failure(f"{self.backend.name} came back with other weights")
                except RequestFailed as error:
                    self.report_failure(str(error))
            self._invalidate()
            try:
                self.sync_weights(target, "abort", restart=True)
            except EngineError as error:
                self._given_up = error
                raise

    def bring_back(self, target: TargetWeights) -> None:
        """One attempt with one that was away. Raises RequestFailed, EngineError or ConfigError."""
        with self.lock:
            self._check_open()
            self._restart(always=False)
            self._check(self.backend)
            self._invalidate()
            self._sync_once(target, "abort")
            self._given_up = None

    def _verified_state(self, target: TargetWeights) -> int:
        """The count of invalidations, read while the weights are verified."""
        while True:
            seen, count = self.generation, self._invalidations
            if self._verified:
                return count
            self.recover(seen, target)

    def _check_unchanged(self, before: int) -> None:
        if self._invalidations != before:
            raise RequestFailed(f"{self.backend.name} changed its weights during the request")

    def generate(
        self, request: PromptRequest, sampling: Sampling, seed: int, target: TargetWeights
    ) -> list[Rollout]:
        """The request's rollouts, each of verified weights. Raises RequestFailed."""
        before = self._verified_state(target)
        oldest, backend = self._current_version, self.backend
        made = sample(backend, request, sampling, seed, self._cfg)
        cuts = sampling.temperature > 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0)
        rollouts = [
            self._rollout(request, p, self._versions(p, oldest), backend if cuts else None)
            for p in made
        ]
        self._check_unchanged(before)
        return rollouts

    def score(self, tokens: list[int], target: TargetWeights) -> np.ndarray:
        """Log-probs of given tokens under the current weights. Raises RequestFailed."""
        before, oldest = self._verified_state(target), self._current_version
        theirs, label = score(self.backend, tokens, self._cfg)
        self._versions(Completion(tokens[:1], [0.0], "length", [label], None), oldest)
        self._check_unchanged(before)
        return theirs

    def _versions(self, completion: Completion, oldest: int) -> np.ndarray:
        labels = set(completion.labels)
        if not labels <= self._verified.keys():
            with self.lock:  # it may be verified at this moment
                unknown = sorted(labels - self._verified.keys())
                if unknown:
                    raise RequestFailed(
                        f"{self.backend.name} sampled from weights {shown(unknown)}, which it was "
                        "not verified to hold"
                    )
        try:
            versions = np.asarray([self._verified[name] for name in completion.labels], np.int32)
        except KeyError as error:
            raise RequestFailed(f"{self.backend.name} lost {error} meanwhile") from error
        if versions.size and versions.min() < oldest:
            raise RequestFailed(
                f"{self.backend.name} sampled from version {versions.min()} when {oldest} was "
                "current"
            )
        return versions

    def _rollout(
        self,
        request: PromptRequest,
        completion: Completion,
        versions: np.ndarray,
        cut_by: Backend | None,
    ) -> Rollout:
        tokens, logp = (
            np.asarray(completion.tokens, np.int32),
            np.asarray(completion.logp, np.float32),
        )
        log_kept = None
        if cut_by is not None:
            prompt = list(request.prompt.tokens)
            whole, label = score(cut_by, prompt + completion.tokens, self._cfg)
            if set(completion.labels) != {label}:
                raise RequestFailed(
                    "weights changed between a response and its log-probs before the cut"
                )
            log_kept = np.minimum(whole[len(prompt) :] - logp, 0.0)
        stop = StopReason.STOP_TOKEN if completion.finish == "stop" else StopReason.MAX_TOKENS
        return Rollout(
            request.prompt, tokens, logp, stop, versions, log_kept,
            None if completion.experts is None else completion.experts.copy(),
        )  # fmt: skip

    def report_failure(self, what: str) -> None:
        """Keep and pass on what failed, with the name of the vLLM."""
        name = self.backend.name
        self._failures.append(what if name in what else f"{name}: {what}")
        self._report(self._failures[-1])

    def gave_up(self, why: str) -> EngineError:
        """The error where it does not come back."""
        last = "".join(f"\n  - {line}" for line in list(self._failures))  # others write to it
        more = f"--set rollout.vllm.retries={2 * self._retries + 2}"
        hint = f" Where it only needs longer to come back: {more}."
        log = hint if self._server is None else f" Its log: {self._server.log}."
        return EngineError(
            f"vLLM ({self.backend.name}): {why}, tried {self._retries + 1} times.{log} "
            f"What happened last:{last}"
        )

    def close(self) -> None:
        self._closed = True
        self._invalidate()
        self._transport.close()
        self.backend.close()
        if self._server is not None:
            self._server.stop()
