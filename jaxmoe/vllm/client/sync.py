# SPDX-License-Identifier: Apache-2.0
"""A verified weight sync: weights are transferred, then vLLM must prove that it holds them.

    transfer   pause, update, label, empty the prefix cache, resume, over vLLM's own routes
    digests    of every tensor as the engine received it; none stale in the live model

Next: jaxmoe/http_engine/probe.py, log-probs against the trainer's own.
"""

import sys
import time
from collections.abc import Callable

from jaxmoe.config import ConfigError
from jaxmoe.http_engine.backend import RequestFailed, Workers
from jaxmoe.http_engine.probe import WeightSyncError
from jaxmoe.http_engine.send_thread import run_concurrently
from jaxmoe.vllm.client.routes import VllmRoutes
from jaxmoe.vllm.plugin.names import vllm_parameter_name
from jaxmoe.weight_sync.update import WeightUpdate

MAX_CACHE_RESETS = 5  # attempts, while blocks of it are still in use
MAX_NAMES_SHOWN = 4  # in a message
LOGPROBS_MODE = "processed_logprobs"  # after temperature and truncation


def read_workers(backend: VllmRoutes) -> Workers:
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
    for drafts in {worker.get("drafts") for worker in loaded} - {None}:
        raise ConfigError(
            f"{backend.name} must sample without speculative decoding, it has {drafts!r:.60}: a "
            "sync would leave the drafts' weights stale, and nothing verifies its log-probs. Start "
            "it without --speculative-config."
        )
    return Workers(
        list_worker_names(loaded),
        [worker.get("label") or "" for worker in loaded],
        min(int(worker.get("rows", sys.maxsize)) for worker in loaded),
    )


def list_worker_names(loaded: list[dict]) -> list[str]:
    return [str(worker.get("instance")) for worker in loaded]


def transfer_weights(
    backend: VllmRoutes,
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


def _start_update(backend: VllmRoutes) -> None:
    """Start an update; if a trainer that ended left one open, finish that one first."""
    try:
        backend.start_update()
    except RequestFailed as error:
        if "already active" not in " ".join(str(error).split()):
            raise
        backend.finish_update("abandoned")
        backend.start_update()


def _empty_prefix_cache(backend: VllmRoutes) -> None:
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
