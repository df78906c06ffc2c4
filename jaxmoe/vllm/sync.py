# SPDX-License-Identifier: Apache-2.0
"""Verified publication: weights are handed over, and then vLLM must show that it holds them.

    hand over  pause, update, label, empty the prefix cache, resume, over vLLM's own routes
    digests    of every tensor as the engine received it; none stale in the live model
    probe      log-probs of fixed tokens and of a fresh answer, against the trainer's own

The probe's prompt is the same each time and longer than one block of the engine's cache: an answer
computed from older weights' cache shows there, and only there. Next: replica.py.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.records import Prompt, Sampling
from jaxmoe.vllm.backend import Backend, Unanswered
from jaxmoe.vllm.request import Unit, sample, score
from jaxmoe.vllm.transport import beside
from jaxmoe.vllm_plugin.names import feeds
from jaxmoe.weight_sync.update import WeightUpdate

RESETS = 5  # of the prefix cache, while blocks of it are still in use
SHOWN = 4  # names in a message
BLOCK = 128  # tokens in a block of vLLM's cache on a CPU, the largest by default
NEW = 8  # tokens of the probe's answer
PROCESSED = "processed_logprobs"  # after the temperature and the cuts

Logps = Callable[[list[int]], np.ndarray]  # tokens -> float32 [T], the trainer's log-probs


class Refused(EngineError):
    """vLLM does not hold what was published; asking again will not help."""


@dataclass(frozen=True)
class Workers:
    """Of one vLLM: `names` of the processes, others after a restart; `rows` computed at once."""

    names: list[str]
    rows: int


def workers(backend: Backend) -> Workers:
    """Raises ConfigError where what they tell could not be trained on."""
    held = backend.held()
    for mode in {str(worker.get("logprobs_mode", PROCESSED)) for worker in held} - {PROCESSED}:
        raise ConfigError(
            f"{backend.name} must be started with --logprobs-mode {PROCESSED}, it has {mode}: its "
            "log-probs would be of temperature 1, at whatever temperature it samples."
        )
    if any(worker.get("replicas", 1) != 1 for worker in held):
        raise ConfigError(
            f"{backend.name} must not be data parallel within itself: it shows one of its replicas "
            "and hides the others. Start as many servers, and name them all in rollout.vllm.url."
        )
    return Workers(names(held), min(int(worker.get("rows", sys.maxsize)) for worker in held))


def names(held: list[dict]) -> list[str]:
    return [str(worker.get("instance")) for worker in held]


def hand_over(
    backend: Backend, published: WeightUpdate, mode: str, distrust: Callable[[], None],
    before: list[str],
) -> None:  # fmt: skip
    """Publish and compare digests; returns with the engine running on the new weights.

    `before` are the names of its workers, which must be the same afterwards.

    Raises Refused where it holds something else, Unanswered where it broke on the way. Its weights
    may then be any mixture, whatever it calls them: `distrust` is called before it samples again.
    """
    try:
        backend.pause(mode)
        _start_update(backend)
        with beside(published.send):
            backend.update(published.update_info)
        backend.finish_update(published.label)
        _empty_prefix_cache(backend)
        held = backend.held()
        if names(held) != before:
            raise Unanswered(f"{backend.name} was restarted while weights were published")
        stale = _stale(held)
        for worker in held:
            _compare(worker, stale, published, backend.name)
    except BaseException:
        distrust()
        raise
    finally:
        backend.resume()


def _start_update(backend: Backend) -> None:
    """One that a trainer began and did not live to finish is ended first."""
    try:
        backend.start_update()
    except Unanswered as error:
        if "already active" not in " ".join(str(error).split()):
            raise
        backend.finish_update("abandoned")
        backend.start_update()


def _empty_prefix_cache(backend: Backend) -> None:
    for attempt in range(RESETS):
        if backend.reset_prefix_cache():
            return
        time.sleep(0.05 * 2**attempt)
    raise Refused(
        f"{backend.name} did not empty its prefix cache, asked {RESETS} times: it would go on from "
        "what older weights computed. Try --set rollout.vllm.swap=abort."
    )


def _stale(held: list[dict]) -> list[str]:
    """Tensors that no worker took which has a part of them: a part may be what it was before."""
    named = {name for worker in held for name in worker.get("stale") or []}
    return sorted(
        name for name in named if all(
            name in (worker.get("stale") or []) or feeds(name) in (worker.get("unreadable") or [])
            for worker in held
        )
    )  # fmt: skip


def _compare(worker: dict, stale: list[str], published: WeightUpdate, name: str) -> None:
    if worker.get("label") != published.label:
        raise Refused(f"{name} must hold {published.label}, says {worker.get('label')!r}")
    received, sent = worker.get("received") or {}, published.digests
    missing, more = sorted(sent.keys() - received.keys()), sorted(received.keys() - sent.keys())
    other = sorted(n for n in sent.keys() & received.keys() if sent[n] != received[n])
    found = [
        f"{len(names)} {what} ({', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''})"
        for what, names in (
            ("missing", missing), ("unknown", more), ("other than sent", other),
            ("received but not in the live model", stale),
        ) if names
    ]  # fmt: skip
    if found:
        raise Refused(
            f"{name}: of {len(sent)} tensors of {published.label}, {'; '.join(found)}. Nothing is "
            "sampled from them. Is the plugin in vLLM's environment of this version of jaxmoe?"
        )


@dataclass(frozen=True)
class Shown:
    """What the trainer expects of a publication, for publishing it again after its weights."""

    tokens: list[int]
    logp: np.ndarray


class Probe:
    """Two requests after each publication; bound: the largest mean |Δlogp|, nats."""

    def __init__(self, cfg: ModelConfig, *, bound: float, context: int) -> None:
        self._cfg, self._bound = cfg, bound
        self._new = max(1, min(NEW, context - 2))
        length = max(1, min(BLOCK + 16, context - self._new - 1))
        tokens = np.random.default_rng(20).integers(0, cfg.vocab_size, length)
        self._prompt = Prompt(-1, "", tuple(int(t) for t in tokens), None)
        self.length = length + self._new  # of what `logps` is asked about

    def check(
        self, backend: Backend, published: WeightUpdate, logps: Logps | None, shown: Shown | None
    ) -> Shown:
        """Compare with the trainer; or, where its weights are gone, with what it said of them.

        Raises Refused beyond the bound.
        """
        label, name = published.label, backend.name
        seed = published.manifest["version"]
        sampling = Sampling(self._new, ())
        (answer,) = sample(backend, Unit(0, self._prompt, 0, 1), sampling, seed, self._cfg)
        if set(answer.labels) != {label}:
            raise Refused(f"{name} must sample from {label}, says {sorted(set(answer.labels))}")
        tokens = [*self._prompt.tokens, *answer.tokens]
        if logps is not None:
            shown = Shown(tokens, logps(tokens))
        assert shown is not None, "a publication is checked with its weights first"
        theirs = self._score(backend, shown.tokens, label)
        self._within(name, label, "given tokens", theirs[1:], shown.logp[1:])
        alike = shown.tokens == tokens
        expected = shown.logp if alike else self._score(backend, tokens, label)
        own = np.asarray(answer.logp, np.float32)
        self._within(name, label, "its own answer", own, expected[-len(own) :])
        return shown

    def _score(self, backend: Backend, tokens: list[int], label: str) -> np.ndarray:
        theirs, scored = score(backend, tokens, self._cfg)
        if scored != label:
            raise Refused(f"{backend.name} must score with {label}, says {scored!r}")
        return theirs

    def _within(
        self, name: str, label: str, what: str, theirs: np.ndarray, ours: np.ndarray
    ) -> None:
        gap = float(np.mean(np.abs(theirs.astype(np.float64) - ours)))
        if not gap <= self._bound:
            raise Refused(
                f"{name} must agree with the trainer on a probe of {label}: mean |Δlogp| of {what} "
                f"is {gap:.3g}, more than {self._bound:g} nats. It holds other weights, another "
                "dtype or another model, or it goes on from a cache of older weights; "
                "python -m jaxmoe.doctor finds out. Where the dtypes account for it: "
                f"--set rollout.vllm.probe_abs_diff={2 * gap:.2g}."
            )
