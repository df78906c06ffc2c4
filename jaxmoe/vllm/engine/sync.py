# SPDX-License-Identifier: Apache-2.0
"""A verified weight sync: weights are transferred, then vLLM must prove that it holds them.

    transfer   pause, update, label, empty the prefix cache, resume, over vLLM's own routes
    digests    of every tensor as the engine received it; none stale in the live model
    probe      log-probs of fixed tokens and of a new response, against the trainer's own

The probe's prompt is the same each time and longer than one block of the engine's cache: only so
does a response computed from a cache of older weights show. Next: replica.py.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.records import Prompt, Sampling
from jaxmoe.vllm.client.backend import Backend, RequestFailed
from jaxmoe.vllm.client.request import PromptRequest, sample_completions, score_tokens
from jaxmoe.vllm.engine.transport import run_concurrently
from jaxmoe.vllm.plugin.names import vllm_parameter_name
from jaxmoe.vllm.weight_sync.update import WeightUpdate

MAX_CACHE_RESETS = 5  # attempts, while blocks of it are still in use
MAX_NAMES_SHOWN = 4  # in a message
CACHE_BLOCK_TOKENS = 128  # of vLLM's cache on a CPU, the largest default
MAX_PROBE_TOKENS = 8  # of the probe's response
LOGPROBS_MODE = "processed_logprobs"  # after temperature and truncation

Logps = Callable[[list[int]], np.ndarray]  # tokens -> float32 [T], the trainer's log-probs


class WeightSyncError(EngineError):
    """vLLM does not hold the weights that were sent; a retry will not help."""


@dataclass(frozen=True)
class Workers:
    """Workers of one vLLM: `names` change at a restart, `rows` are the sequences at once."""

    names: list[str]
    rows: int


def read_workers(backend: Backend) -> Workers:
    """Return the backend's workers. Raises ConfigError if their settings make training wrong."""
    loaded = backend.loaded_state()
    for mode in {str(worker.get("logprobs_mode", LOGPROBS_MODE)) for worker in loaded} - {
        LOGPROBS_MODE
    }:
        raise ConfigError(
            f"{backend.name} must be started with --logprobs-mode {LOGPROBS_MODE}, it has {mode}: "
            "its log-probs would be of temperature 1, whatever the sampling temperature."
        )
    if any(worker.get("replicas", 1) != 1 for worker in loaded):
        raise ConfigError(
            f"{backend.name} must not use data parallelism: it reports only one of its replicas. "
            "Start several servers instead, and name them all in rollout.vllm.url."
        )
    return Workers(
        list_worker_names(loaded), min(int(worker.get("rows", sys.maxsize)) for worker in loaded)
    )


def list_worker_names(loaded: list[dict]) -> list[str]:
    return [str(worker.get("instance")) for worker in loaded]


def transfer_weights(
    backend: Backend,
    update: WeightUpdate,
    mode: str,
    invalidate: Callable[[], None],
    worker_names: list[str],
) -> None:
    """Send the weights and compare digests; returns with the engine sampling from them.

    `worker_names` are those of its workers, which must be the same afterwards. Raises
    WeightSyncError if it holds other weights, RequestFailed if it failed meanwhile. The weights may
    then be any mixture, whatever their label: `invalidate` is called before it samples again.
    """
    try:
        backend.pause(mode)
        _start_update(backend)
        adapter = update.update_info.get("adapter")
        if adapter is None:
            with run_concurrently(update.send):
                backend.send_update(update.update_info)
        backend.finish_update(update.label)
        if adapter is not None:  # vLLM drops every adapter when an update ends
            backend.load_adapter(adapter)
        _empty_prefix_cache(backend)
        loaded = backend.loaded_state()
        if list_worker_names(loaded) != worker_names:
            raise RequestFailed(f"{backend.name} was restarted during a weight sync")
        stale = _stale_tensors(loaded)
        for worker in loaded:
            _check_received(worker, stale, update, backend.name)
    except BaseException:
        invalidate()
        raise
    finally:
        # After an error too: requests of other threads would wait forever. Without a verified label
        # their responses are refused.
        backend.resume()


def _start_update(backend: Backend) -> None:
    """Start an update; if a trainer that ended left one open, finish that one first."""
    try:
        backend.start_update()
    except RequestFailed as error:
        if "already active" not in " ".join(str(error).split()):
            raise
        backend.finish_update("abandoned")
        backend.start_update()


def _empty_prefix_cache(backend: Backend) -> None:
    for attempt in range(MAX_CACHE_RESETS):
        if backend.reset_prefix_cache():
            return
        time.sleep(0.05 * 2**attempt)
    raise WeightSyncError(
        f"{backend.name} did not empty its prefix cache in {MAX_CACHE_RESETS} attempts: it would "
        "continue from values of older weights. Try --set rollout.vllm.on_weight_sync=abort."
    )


def _stale_tensors(loaded: list[dict]) -> list[str]:
    """Return the tensors that no worker loaded; a worker may hold no part of a tensor."""

    def not_taken(name: str, worker: dict) -> bool:
        stale, unreadable = worker.get("stale") or [], worker.get("unreadable") or []
        return name in stale or vllm_parameter_name(name) in unreadable

    named = {name for worker in loaded for name in worker.get("stale") or []}
    return sorted(n for n in named if all(not_taken(n, worker) for worker in loaded))


def _check_received(worker: dict, stale: list[str], update: WeightUpdate, name: str) -> None:
    if worker.get("label") != update.label:
        raise WeightSyncError(f"{name} must hold {update.label}, reports {worker.get('label')!r}")
    received, sent = worker.get("received") or {}, update.digests
    missing, unknown = sorted(sent.keys() - received.keys()), sorted(received.keys() - sent.keys())
    different = sorted(n for n in sent.keys() & received.keys() if sent[n] != received[n])
    problems = [
        f"{len(names)} {kind} ({', '.join(names[:MAX_NAMES_SHOWN])}"
        f"{', …' if len(names) > MAX_NAMES_SHOWN else ''})"
        for kind, names in (
            ("missing", missing),
            ("unknown", unknown),
            ("other than sent", different),
            ("received but not in the live model", stale),
        )
        if names
    ]
    if problems:
        raise WeightSyncError(
            f"{name}: of {len(sent)} tensors of {update.label}, {'; '.join(problems)}. Nothing is "
            "sampled from them. Does vLLM's environment have this version of jaxmoe?"
        )


@dataclass(frozen=True)
class ProbeReference:
    """The trainer's log-probs under some weights, for later syncs without these weights."""

    tokens: list[int]
    logp: np.ndarray


class Probe:
    """Two requests after each weight sync. `bound`: the maximum mean |Δlogp|, nats."""

    def __init__(self, cfg: ModelConfig, *, bound: float, context: int) -> None:
        self._cfg, self._bound = cfg, bound
        self._max_new = max(1, min(MAX_PROBE_TOKENS, context - 2))
        length = max(1, min(CACHE_BLOCK_TOKENS + 16, context - self._max_new - 1))
        tokens = np.random.default_rng(20).integers(0, cfg.vocab_size, length)
        self._prompt = Prompt(-1, "", tuple(int(t) for t in tokens), None)
        self.length = length + self._max_new  # of the tokens that `logps` gets
        # Fixed tokens of the same length, for a trainer that needs log-probs before the response.
        response_tokens = np.random.default_rng(21).integers(0, cfg.vocab_size, self._max_new)
        self.scored_tokens = [*self._prompt.tokens, *map(int, response_tokens)]

    def check_weights(
        self,
        backend: Backend,
        update: WeightUpdate,
        logps: Logps | None,
        reference: ProbeReference | None,
    ) -> ProbeReference:
        """Compare with the trainer's log-probs or, if its weights are gone, with the reference.

        Raises WeightSyncError beyond the bound.
        """
        label, name = update.label, backend.name
        seed = update.manifest["version"]
        sampling = Sampling(self._max_new, ())
        (response,) = sample_completions(
            backend, PromptRequest(0, self._prompt, 0, 1), sampling, seed, self._cfg
        )
        if set(response.labels) != {label}:
            raise WeightSyncError(
                f"{name} must sample from {label}, reports {sorted(set(response.labels))}"
            )
        tokens = [*self._prompt.tokens, *response.tokens]
        if logps is not None:
            reference = ProbeReference(tokens, logps(tokens))
        assert reference is not None, "weights are checked first while the trainer has them"
        engine_logp = self._score_tokens(backend, reference.tokens, label)
        self._check_gap(name, label, "given tokens", engine_logp[1:], reference.logp[1:])
        same_tokens = reference.tokens == tokens
        expected = reference.logp if same_tokens else self._score_tokens(backend, tokens, label)
        response_logp = np.asarray(response.logp, np.float32)
        self._check_gap(
            name, label, "its own response", response_logp, expected[-len(response_logp) :]
        )
        return reference

    def _score_tokens(self, backend: Backend, tokens: list[int], label: str) -> np.ndarray:
        engine_logp, scored_label = score_tokens(backend, tokens, self._cfg)
        if scored_label != label:
            raise WeightSyncError(
                f"{backend.name} must score with {label}, reports {scored_label!r}"
            )
        return engine_logp

    def _check_gap(
        self, name: str, label: str, subject: str, engine_logp: np.ndarray, trainer_logp: np.ndarray
    ) -> None:
        gap = float(np.mean(np.abs(engine_logp.astype(np.float64) - trainer_logp)))
        # Written so that NaN fails.
        if not gap <= self._bound:
            raise WeightSyncError(
                f"{name} must agree with the trainer on a probe of {label}: mean |Δlogp| of "
                f"{subject} is {gap:.3g}, more than {self._bound:g} nats. It has other weights, "
                "another dtype or another model, or continues from a cache of older weights; "
                "python -m jaxmoe.doctor finds the cause. If the dtypes explain the gap: "
                f"--set rollout.vllm.probe_abs_diff={2 * gap:.2g}."
            )
