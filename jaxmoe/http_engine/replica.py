# SPDX-License-Identifier: Apache-2.0
"""One server of a pool: the weights that it was verified to hold, and its recovery.

A response is returned only if its weight labels were verified for this process of the server, and
none is older than the version that was current at the request. Next: jaxmoe/http_engine/probe.py.
"""

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxmoe.config import EngineError, ModelConfig
from jaxmoe.http_engine.backend import Backend, Completion, RequestFailed, ServerProcess
from jaxmoe.http_engine.probe import NameSetting, Probe, WeightSyncError, name_option
from jaxmoe.http_engine.request import PromptRequest, sample_completions
from jaxmoe.http_engine.strict_json import format_value
from jaxmoe.http_engine.target_weights import FileSender, TargetWeights, WeightSender
from jaxmoe.observe.progress import report_phase
from jaxmoe.records import Rollout, Sampling, StopReason

MAX_BACKOFF_S = 10.0  # between two attempts


def sleep_backoff(attempt: int) -> None:
    """Sleep 0.1 s doubled with each attempt, times a random 0.5 to 1.5 that spreads the threads."""
    time.sleep(min(MAX_BACKOFF_S, 0.1 * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.5))


class Replica:
    """One server. `lock` is held while weights change; `generation` counts the completed syncs."""

    def __init__(
        self,
        backend: Backend,
        server: ServerProcess | None = None,
        *,
        sender: WeightSender | None = None,
        cfg: ModelConfig,
        probe: Probe,
        retries: int,
        report: Callable[[str], None],
        check: Callable[[Any], object],
        try_out: Callable[[Any], None] | None = None,
        name_setting: NameSetting = name_option,
    ) -> None:
        self.backend, self._server, self._sender = backend, server, sender or FileSender()
        self._name_setting = name_setting
        self._cfg, self._probe, self._retries = cfg, probe, retries
        # Reentrant, because `recover` calls `sync_weights`.
        self.lock = threading.RLock()
        self.generation = 0
        self.in_flight = 0  # tokens; counted by the server pool
        self.max_rows = sys.maxsize  # sequences that it computes at once
        self._check = check  # raises if it cannot be used
        self._try_out = try_out  # raises if it does not apply adapters
        self._report, self._failures = report, deque[str](maxlen=3)  # the last few
        self._verified: dict[str, int] = {}  # label -> version
        self._current_version = -1
        self._invalidations = 0  # how often its weights became unknown
        self._given_up: EngineError | None = None  # the error of a permanent failure
        self._closed = False
        self._connected: list[str] | None = None  # the workers whose transfer is initialized

    def sync_weights(self, target: TargetWeights, mode: str, *, restart: bool = False) -> None:
        """Send the weights and verify them, with retries.

        Raises WeightSyncError if it holds other weights than were sent, EngineError if it cannot be
        restored.
        """
        with self.lock:
            for attempt in range(self._retries + 1):
                self._check_open()
                try:
                    if restart or attempt:
                        # The first retry keeps a server that answers; later ones start another.
                        self._restart_server(force=attempt > 1)
                    self._sync_once(target, mode)
                    self._given_up = None
                    return
                except RequestFailed as error:
                    self._invalidate_weights()
                    self.report_failure(str(error))
                    sleep_backoff(attempt)
            raise self.give_up_error(f"weights of version {target.version} could not be synced")

    def _sync_once(self, target: TargetWeights, mode: str) -> None:
        workers = self.backend.read_workers()
        if workers.names != self._connected:
            self._invalidate_weights()
            self._sender.connect(self.backend)
            if self._try_out is not None:
                self._try_out(self.backend)
            workers = self.backend.read_workers()
        self._connected, self.max_rows = workers.names, workers.rows
        update = file = target.file
        if update is None:
            if target.build_update is None:
                raise self.give_up_error(
                    "its weights are gone, and only files can be sent again: try "
                    f"{self._name_setting('transport', 'files')}"
                )
            update = target.build_update(self._sender)
        try:
            self.backend.load_weights(update, mode, self._invalidate_weights, workers.names)
            target.probe_reference = self._probe.check_weights(
                self.backend, update, target.logps, target.probe_reference
            )
        except BaseException as error:
            self._invalidate_weights()
            if self._sender.breaks_on_failure:
                self._sender.close()
                self._connected = None
            if isinstance(error, WeightSyncError) and target.send_complete(file):
                raise RequestFailed(str(error)) from error  # to be tried again
            if isinstance(error, RequestFailed):
                target.send_complete(file)
            raise
        finally:
            if file is None:
                update.close()
        self._verified[target.label] = self._current_version = target.version
        self.generation += 1

    def _invalidate_weights(self) -> None:
        """Mark all weights as unverified.

        The order matters: a reader of the count that then finds labels must see the count change.
        """
        self._verified.clear()
        self._invalidations += 1

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"{self.backend.name} was closed.")

    def _restart_server(self, *, force: bool) -> None:
        if self._server is None:
            self.backend.check_health()
            return
        if self._server.is_alive() and not force:
            try:
                return self.backend.check_health()
            except RequestFailed:
                pass
        self._check_open()
        self._invalidate_weights()
        self.backend.close()
        with report_phase(f"{self.backend.name} does not answer; starting another"):
            try:
                self.backend = self._server.start()
            except EngineError as error:
                raise RequestFailed(str(error)) from error
        # close() may have run while the server started.
        if self._closed:
            self.backend.close()
            self._server.stop()
            self._check_open()

    def recover(self, generation: int, target: TargetWeights) -> None:
        """Restore the target weights after a failure in `generation`.

        If another thread already failed to, raises its EngineError without trying again.
        """
        with self.lock:
            self._check_open()
            if self._given_up is not None:
                raise self._given_up
            if self.generation != generation and self._verified:
                return  # another thread has recovered it
            if target.label in self._verified:
                try:
                    self.backend.check_health()
                    workers = self.backend.read_workers()
                    is_same_process = workers.names == self._connected
                    if is_same_process and set(workers.labels) == {target.label}:
                        return  # the failure was temporary
                    self.report_failure(f"{self.backend.name} reconnected with other weights")
                except RequestFailed as error:
                    self.report_failure(str(error))
            self._invalidate_weights()
            try:
                self.sync_weights(target, "abort", restart=True)
            except EngineError as error:
                self._given_up = error
                raise

    def reconnect(self, target: TargetWeights) -> None:
        """Try once to reconnect. Raises RequestFailed, EngineError or ConfigError."""
        with self.lock:
            self._check_open()
            self._restart_server(force=False)
            self._check(self.backend)
            self._invalidate_weights()
            self._sync_once(target, "abort")
            self._given_up = None

    def _verified_state(self, target: TargetWeights) -> int:
        """Return the number of invalidations at a time when the weights are verified."""
        while True:
            generation, count = self.generation, self._invalidations
            if self._verified:
                return count
            self.recover(generation, target)

    def _check_unchanged(self, invalidations: int) -> None:
        if self._invalidations != invalidations:
            raise RequestFailed(f"{self.backend.name} changed its weights during the request")

    def generate_rollouts(
        self, request: PromptRequest, sampling: Sampling, seed: int, target: TargetWeights
    ) -> list[Rollout]:
        """Return the request's rollouts, all of verified weights. Raises RequestFailed.

        Of a turn of an episode, tokens and log-probs are those of the turn, and the experts those
        of all tokens that the server read.
        """
        invalidations = self._verified_state(target)
        oldest, backend = self._current_version, self.backend
        completions = sample_completions(backend, request, sampling, seed, self._cfg)
        is_truncated = sampling.temperature > 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0)
        rollouts = [
            self._build_rollout(
                request,
                completion,
                self._check_versions(completion, oldest),
                backend if is_truncated else None,
            )
            for completion in completions
        ]
        self._check_unchanged(invalidations)
        return rollouts

    def score_tokens(self, tokens: list[int], target: TargetWeights) -> np.ndarray:
        """Return log-probs of given tokens under the current weights. Raises RequestFailed."""
        invalidations, oldest = self._verified_state(target), self._current_version
        logp, label = self.backend.score_tokens(tokens, self._cfg)
        self._check_versions(Completion(tokens[:1], [0.0], "length", [label], None), oldest)
        self._check_unchanged(invalidations)
        return logp

    def _check_versions(self, completion: Completion, oldest: int) -> np.ndarray:
        labels = set(completion.labels)
        if not labels <= self._verified.keys():
            with self.lock:  # a verification may be running
                unknown = sorted(labels - self._verified.keys())
                if unknown:
                    raise RequestFailed(
                        f"{self.backend.name} sampled from weights {format_value(unknown)}, "
                        "which it was not verified to hold"
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

    def _build_rollout(
        self,
        request: PromptRequest,
        completion: Completion,
        versions: np.ndarray,
        scorer: Backend | None,
    ) -> Rollout:
        tokens = np.asarray(completion.tokens, np.int32)
        logp = np.asarray(completion.logp, np.float32)
        log_mass = None
        if scorer is not None:
            prompt = request.tokens
            # Log-probs of a prompt are those before truncation, and differ from those of the
            # sampled tokens by the log of the retained mass.
            full_logp, label = scorer.score_tokens(prompt + completion.tokens, self._cfg)
            if set(completion.labels) != {label}:
                raise RequestFailed(
                    "weights changed between a response and its log-probs before truncation"
                )
            # Rounding may make the mass slightly larger than 1.
            log_mass = np.minimum(full_logp[len(prompt) :] - logp, 0.0)
        stop = StopReason.STOP_TOKEN if completion.finish == "stop" else StopReason.MAX_TOKENS
        return Rollout(
            request.prompt,
            tokens,
            logp,
            stop,
            versions,
            log_mass,
            None if completion.experts is None else completion.experts.copy(),
        )

    def report_failure(self, message: str) -> None:
        """Store and report a failure, with the name of the server."""
        name = self.backend.name
        self._failures.append(message if name in message else f"{name}: {message}")
        self._report(self._failures[-1])

    def give_up_error(self, reason: str) -> EngineError:
        """Return the error of a replica that could not be restored."""
        # A copy, because other threads append to it.
        recent_failures = "".join(f"\n  - {line}" for line in list(self._failures))
        option = self._name_setting("retries", 2 * self._retries + 2)
        hint = f" If it only needs more time: {option}."
        log = hint if self._server is None else f" Its log: {self._server.log}."
        return EngineError(
            f"{self.backend.name}: {reason}, tried {self._retries + 1} times.{log} "
            f"Last failures:{recent_failures}"
        )

    def close(self) -> None:
        self._closed = True
        self._invalidate_weights()
        self._sender.close()
        self.backend.close()
        if self._server is not None:
            self._server.stop()
