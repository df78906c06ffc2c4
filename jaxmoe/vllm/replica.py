# SPDX-License-Identifier: Apache-2.0
"""One vLLM and what is known about it: which weights it was seen to hold, and how to get it back.

No answer leaves here but with labels that this very process was verified for, none older than the
version that was current when it was asked. Next: jaxmoe/vllm/sync.py.
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
from jaxmoe.vllm.backend import Backend, Unanswered
from jaxmoe.vllm.request import Unit, sample, score
from jaxmoe.vllm.responses import Piece
from jaxmoe.vllm.server import Server
from jaxmoe.vllm.sync import Logps, Probe, Shown, hand_over, names, workers
from jaxmoe.vllm.transport import Channel
from jaxmoe.weight_sync.files import PublishedFile
from jaxmoe.weight_sync.update import WeightUpdate

LONGEST_S = 10.0  # between two attempts


@dataclass
class TargetWeights:
    """The version that every vLLM must hold."""

    label: str
    version: int
    files: PublishedFile | None  # for every vLLM, or
    make: Callable[[Channel], WeightUpdate] | None  # for one, while the weights are at hand
    logps: Logps | None  # likewise
    shown: Shown | None = None  # afterwards


def backoff(attempt: int) -> None:
    """0.1 s, doubled each time, times 0.5 to 1.5 so that threads do not come back at once."""
    time.sleep(min(LONGEST_S, 0.1 * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.5))


class Replica:
    """Its lock is held while weights change; `generation` counts how often they came anew."""

    def __init__(
        self, backend: Backend, server: Server | None, *, way: str, cfg: ModelConfig,
        probe: Probe, retries: int, report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.backend, self._server, self._channel = backend, server, Channel(way)
        self._cfg, self._probe, self._retries = cfg, probe, retries
        self.lock = threading.RLock()
        self.generation = 0
        self.asked = 0  # units under way; the engine's to count
        self.rows = sys.maxsize  # sequences that it computes at once
        self._report, self._last = report, deque[str](maxlen=3)
        self._verified: dict[str, int] = {}  # label -> version
        self._current = -1
        self._doubts = 0  # times that its weights stopped being known
        self._gone: EngineError | None = None  # why it was given up
        self._closed = False
        self._opened: list[str] | None = None  # the workers whose transfer was set up

    def bring(self, wanted: TargetWeights, mode: str, *, revive: bool = False) -> None:
        """Publish, verify, trust; whatever breaks on the way is tried again.

        Raises Refused where it holds other weights than it was given, EngineError where it does
        not come back.
        """
        with self.lock:
            for attempt in range(self._retries + 1):
                self._still_open()
                try:
                    if revive or attempt:
                        self._revive(always=attempt > 1)
                    self._publish(wanted, mode)
                    self._gone = None
                    return
                except Unanswered as error:
                    self._distrust()
                    self.note(str(error))
                    backoff(attempt)
            raise self.lost(f"weights of version {wanted.version} could not be published")

    def _publish(self, wanted: TargetWeights, mode: str) -> None:
        found = workers(self.backend)
        if found.names != self._opened:
            self._distrust()
            self._channel.open(self.backend)
            found = workers(self.backend)
        self._opened, self.rows = found.names, found.rows
        published = wanted.files
        if published is None:
            if wanted.make is None:
                raise self.lost(
                    "its weights are gone, and only files can be published again: try --set "
                    "rollout.vllm.way=files"
                )
            published = wanted.make(self._channel)
        try:
            hand_over(self.backend, published, mode, self._distrust, found.names)
            wanted.shown = self._probe.check(self.backend, published, wanted.logps, wanted.shown)
        except BaseException:
            self._distrust()
            if self._channel.way == "nccl":  # a broadcast may be under way still: meet anew
                self._channel.close()
                self._opened = None
            raise
        finally:
            if wanted.files is None:
                published.close()
        self._verified[wanted.label] = self._current = wanted.version
        self.generation += 1

    def _distrust(self) -> None:
        """In this order: who reads the count and then finds labels will see it change."""
        self._verified.clear()
        self._doubts += 1

    def _still_open(self) -> None:
        if self._closed:
            raise EngineError(f"{self.backend.name} was closed.")

    def _revive(self, *, always: bool) -> None:
        if self._server is None:
            self.backend.health()
            return
        if self._server.alive() and not always:
            try:
                return self.backend.health()
            except Unanswered:
                pass
        self._still_open()
        self._distrust()
        self.backend.close()
        with phase(f"{self.backend.name} does not answer; starting another"):
            try:
                self.backend = self._server.start()
            except EngineError as error:
                raise Unanswered(str(error)) from error
        if self._closed:
            self.backend.close()
            self._server.stop()
            self._still_open()

    def recover(self, seen: int, wanted: TargetWeights) -> None:
        """After a failure of generation `seen`: back to holding what is wanted, if it is not.

        Tried in vain once, it is not tried again by everybody who waits: raises EngineError.
        """
        with self.lock:
            self._still_open()
            if self._gone is not None:
                raise self._gone
            if self.generation != seen and self._verified:
                return  # another thread was here first
            if wanted.label in self._verified:
                try:
                    self.backend.health()
                    held = self.backend.held()
                    same = names(held) == self._opened
                    if same and all(w.get("label") == wanted.label for w in held):
                        return  # it was a hiccup
                    self.note(f"{self.backend.name} came back with other weights")
                except Unanswered as error:
                    self.note(str(error))
            self._distrust()
            try:
                self.bring(wanted, "abort", revive=True)
            except EngineError as error:
                self._gone = error
                raise

    def _trusted(self, wanted: TargetWeights) -> int:
        """The count of doubts, read while the weights are known."""
        while True:
            seen, doubts = self.generation, self._doubts
            if self._verified:
                return doubts
            self.recover(seen, wanted)

    def _still(self, doubts: int) -> None:
        if self._doubts != doubts:
            raise Unanswered(f"{self.backend.name} changed its weights in an unknown way meanwhile")

    def ask(
        self, unit: Unit, sampling: Sampling, seed: int, wanted: TargetWeights
    ) -> list[Rollout]:
        """The unit's rollouts, each of verified weights. Raises Unanswered."""
        doubts = self._trusted(wanted)
        floor, backend = self._current, self.backend
        made = sample(backend, unit, sampling, seed, self._cfg)
        cuts = sampling.temperature > 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0)
        rollouts = [
            self._rollout(unit, p, self._versions(p, floor), backend if cuts else None)
            for p in made
        ]
        self._still(doubts)
        return rollouts

    def score(self, tokens: list[int], wanted: TargetWeights) -> np.ndarray:
        """Log-probs of given tokens under the current weights. Raises Unanswered."""
        doubts, floor = self._trusted(wanted), self._current
        theirs, label = score(self.backend, tokens, self._cfg)
        self._versions(Piece(tokens[:1], [0.0], "length", [label], None), floor)
        self._still(doubts)
        return theirs

    def _versions(self, piece: Piece, floor: int) -> np.ndarray:
        labels = set(piece.labels)
        if not labels <= self._verified.keys():
            with self.lock:  # its verdict may be under way
                unknown = sorted(labels - self._verified.keys())
                if unknown:
                    raise Unanswered(
                        f"{self.backend.name} sampled from weights {unknown[:3]}, which it was "
                        "not verified to hold"
                    )
        try:
            versions = np.asarray([self._verified[name] for name in piece.labels], np.int32)
        except KeyError as error:
            raise Unanswered(f"{self.backend.name} lost {error} meanwhile") from error
        if versions.size and versions.min() < floor:
            raise Unanswered(
                f"{self.backend.name} sampled from version {versions.min()} when {floor} was "
                "current"
            )
        return versions

    def _rollout(
        self, unit: Unit, piece: Piece, versions: np.ndarray, cut_by: Backend | None
    ) -> Rollout:
        tokens, logp = np.asarray(piece.tokens, np.int32), np.asarray(piece.logp, np.float32)
        log_kept = None
        if cut_by is not None:
            prompt = list(unit.prompt.tokens)
            whole, label = score(cut_by, prompt + piece.tokens, self._cfg)
            if set(piece.labels) != {label}:
                raise Unanswered("weights changed between an answer and its log-probs uncut")
            log_kept = np.minimum(whole[len(prompt) :] - logp, 0.0)
        stop = StopReason.STOP_TOKEN if piece.finish == "stop" else StopReason.MAX_TOKENS
        return Rollout(
            unit.prompt, tokens, logp, stop, versions, log_kept,
            None if piece.experts is None else piece.experts.copy(),
        )  # fmt: skip

    def note(self, what: str) -> None:
        """It failed: where, for who reads of several."""
        name = self.backend.name
        self._last.append(what if name in what else f"{name}: {what}")
        self._report(self._last[-1])

    def lost(self, why: str) -> EngineError:
        """What to say where it does not come back."""
        last = "".join(f"\n  - {line}" for line in list(self._last))  # others write to it
        more = f"--set rollout.vllm.retries={2 * self._retries + 2}"
        hint = f" Where it only needs longer to come back: {more}."
        log = hint if self._server is None else f" Its log: {self._server.log}."
        return EngineError(
            f"vLLM ({self.backend.name}): {why}, tried {self._retries + 1} times.{log} "
            f"What happened last:{last}"
        )

    def close(self) -> None:
        self._closed = True
        self._distrust()
        self._channel.close()
        self.backend.close()
        if self._server is not None:
            self._server.stop()
