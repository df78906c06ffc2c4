# SPDX-License-Identifier: Apache-2.0
"""A verified weight sync: weights are transferred, then vLLM must show that it holds them.

    transfer   pause, update, label, empty the prefix cache, resume, over vLLM's own routes
    digests    of every tensor as the engine received it; none stale in the live model
    probe      log-probs of fixed tokens and of a fresh response, against the trainer's own

The probe's prompt is the same each time and longer than one block of the engine's cache: a response
computed from older weights' cache shows there, and only there. Next: replica.py.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.records import Prompt, Sampling
from jaxmoe.vllm.backend import Backend, RequestFailed
from jaxmoe.vllm.request import PromptRequest, sample, score
from jaxmoe.vllm.transport import concurrently
from jaxmoe.vllm_plugin.names import parameter_of
from jaxmoe.weight_sync.update import WeightUpdate

RESETS = 5  # of the prefix cache, while blocks of it are still in use
SHOWN = 4  # names in a message
BLOCK = 128  # tokens in a block of vLLM's cache on a CPU, the largest by default
NEW = 8  # tokens of the probe's response
PROCESSED = "processed_logprobs"  # after the temperature and the cuts

Logps = Callable[[list[int]], np.ndarray]  # tokens -> float32 [T], the trainer's log-probs


class WeightSyncError(EngineError):
    """vLLM does not hold the weights it was sent; a retry will not help."""


@dataclass(frozen=True)
class Workers:
    """Of one vLLM: `names` of the processes, others after a restart; `rows` computed at once."""

    names: list[str]
    rows: int


def workers(backend: Backend) -> Workers:
    """Raises ConfigError where what they report could not be trained on."""
    loaded = backend.loaded_state()
    for mode in {str(worker.get("logprobs_mode", PROCESSED)) for worker in loaded} - {PROCESSED}:
        raise ConfigError(
            f"{backend.name} must be started with --logprobs-mode {PROCESSED}, it has {mode}: its "
            "log-probs would be of temperature 1, at whatever temperature it samples."
        )
    if any(worker.get("replicas", 1) != 1 for worker in loaded):
        raise ConfigError(
            f"{backend.name} must not be data parallel within itself: it shows one of its replicas "
            "and hides the others. Start as many servers, and name them all in rollout.vllm.url."
        )
    return Workers(names(loaded), min(int(worker.get("rows", sys.maxsize)) for worker in loaded))


def names(loaded: list[dict]) -> list[str]:
    return [str(worker.get("instance")) for worker in loaded]


def transfer_weights(
    backend: Backend, update: WeightUpdate, mode: str, invalidate: Callable[[], None],
    worker_names: list[str],
) -> None:  # fmt: skip
    """Send the weights and compare digests; returns with the engine running on them.

    `worker_names` are those of its workers, which must be the same afterwards.
    Raises WeightSyncError where it holds something else, RequestFailed where it broke meanwhile.
    Its weights may then be any mixture, whatever it calls them: `invalidate` is called before it
    samples again.
    """
    try:
        backend.pause(mode)
        _start_update(backend)
        adapter = update.update_info.get("adapter")
        if adapter is None:
            with concurrently(update.send):
                backend.update(update.update_info)
        backend.finish_update(update.label)
        if adapter is not None:  # vLLM drops every adapter when an update ends
            backend.load_adapter(adapter)
        _empty_prefix_cache(backend)
        loaded = backend.loaded_state()
        if names(loaded) != worker_names:
            raise RequestFailed(f"{backend.name} was restarted during a weight sync")
        stale = _stale_tensors(loaded)
        for worker in loaded:
            _compare(worker, stale, update, backend.name)
    except BaseException:
        invalidate()
        raise
    finally:
        backend.resume()


def _start_update(backend: Backend) -> None:
    """One that a trainer began and did not live to finish is ended first."""
    try:
        backend.start_update()
    except RequestFailed as error:
        if "already active" not in " ".join(str(error).split()):
            raise
        backend.finish_update("abandoned")
        backend.start_update()


def _empty_prefix_cache(backend: Backend) -> None:
    for attempt in range(RESETS):
        if backend.reset_prefix_cache():
            return
        time.sleep(0.05 * 2**attempt)
    raise WeightSyncError(
        f"{backend.name} did not empty its prefix cache, asked {RESETS} times: it would go on from "
        "what older weights computed. Try --set rollout.vllm.on_weight_sync=abort."
    )


def _stale_tensors(loaded: list[dict]) -> list[str]:
    """Tensors that no worker took which has a part of them: a part may be what it was before."""

    def not_taken(name: str, worker: dict) -> bool:
        stale, unreadable = worker.get("stale") or [], worker.get("unreadable") or []
        return name in stale or parameter_of(name) in unreadable

    named = {name for worker in loaded for name in worker.get("stale") or []}
    return sorted(n for n in named if all(not_taken(n, worker) for worker in loaded))


def _compare(worker: dict, stale: list[str], update: WeightUpdate, name: str) -> None:
    if worker.get("label") != update.label:
        raise WeightSyncError(f"{name} must hold {update.label}, says {worker.get('label')!r}")
    received, sent = worker.get("received") or {}, update.digests
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
        raise WeightSyncError(
            f"{name}: of {len(sent)} tensors of {update.label}, {'; '.join(found)}. Nothing is "
            "sampled from them. Is the plugin in vLLM's environment of this version of jaxmoe?"
        )


@dataclass(frozen=True)
class ProbeReference:
    """The trainer's log-probs under some weights, for when these are sent again without them."""

    tokens: list[int]
    logp: np.ndarray


class Probe:
    """Two requests after each weight sync; bound: the largest mean |Δlogp|, nats."""

    def __init__(self, cfg: ModelConfig, *, bound: float, context: int) -> None:
        self._cfg, self._bound = cfg, bound
        self._new = max(1, min(NEW, context - 2))
        length = max(1, min(BLOCK + 16, context - self._new - 1))
        tokens = np.random.default_rng(20).integers(0, cfg.vocab_size, length)
        self._prompt = Prompt(-1, "", tuple(int(t) for t in tokens), None)
        self.length = length + self._new  # of what `logps` is asked about
        # as long, for those who must know the trainer's log-probs before there is a response
        rest = np.random.default_rng(21).integers(0, cfg.vocab_size, self._new)
        self.given = [*self._prompt.tokens, *map(int, rest)]

    def check(
        self,
        backend: Backend,
        update: WeightUpdate,
        logps: Logps | None,
        reference: ProbeReference | None,
    ) -> ProbeReference:
        """Compare with the trainer; or, where its weights are gone, with the reference.

        Raises WeightSyncError beyond the bound.
        """
        label, name = update.label, backend.name
        seed = update.manifest["version"]
        sampling = Sampling(self._new, ())
        (response,) = sample(
            backend, PromptRequest(0, self._prompt, 0, 1), sampling, seed, self._cfg
        )
        if set(response.labels) != {label}:
            raise WeightSyncError(
                f"{name} must sample from {label}, says {sorted(set(response.labels))}"
            )
        tokens = [*self._prompt.tokens, *response.tokens]
        if logps is not None:
            reference = ProbeReference(tokens, logps(tokens))
        assert reference is not None, "weights are checked first while the trainer has them"
        theirs = self._score(backend, reference.tokens, label)
        self._within(name, label, "given tokens", theirs[1:], reference.logp[1:])
        alike = reference.tokens == tokens
        expected = reference.logp if alike else self._score(backend, tokens, label)
        own = np.asarray(response.logp, np.float32)
        self._within(name, label, "its own response", own, expected[-len(own) :])
        return reference

    def _score(self, backend: Backend, tokens: list[int], label: str) -> np.ndarray:
        theirs, scored = score(backend, tokens, self._cfg)
        if scored != label:
            raise WeightSyncError(f"{backend.name} must score with {label}, says {scored!r}")
        return theirs

    def _within(
        self, name: str, label: str, what: str, theirs: np.ndarray, ours: np.ndarray
    ) -> None:
        gap = float(np.mean(np.abs(theirs.astype(np.float64) - ours)))
        if not gap <= self._bound:
            raise WeightSyncError(
                f"{name} must agree with the trainer on a probe of {label}: mean |Δlogp| of {what} "
                f"is {gap:.3g}, more than {self._bound:g} nats. It holds other weights, another "
                "dtype or another model, or it goes on from a cache of older weights; "
                "python -m jaxmoe.doctor finds out. Where the dtypes account for it: "
                f"--set rollout.vllm.probe_abs_diff={2 * gap:.2g}."
            )
