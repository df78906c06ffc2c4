# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine: prompts are spread over one or several replicas, each answered exactly once.

A failed request is sent again, to the least busy replica, after the one that failed was brought
back with the current weights; `retries` bounds both. load() may run in another thread than
generate(): requests in flight are kept, finished or aborted and continued, and every token carries
the version of the weights that sampled it.

    engine.generate -> Replica.generate -> request.sample -> Backend.generate; responses.py checks
    engine.load     -> Replica.sync_weights -> sync.transfer_weights, Probe.check

top-k and top-p: vLLM tells log-probs after the cut. The mass kept follows from scoring the response
once more, which vLLM does at temperature 1 only; at another one they are refused.
Next: jaxmoe/vllm/replica.py.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.config import ConfigError, EngineError, ModelConfig, VllmConfig
from jaxmoe.model import Ops, forward, sequence_logprobs
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.shapes import Params
from jaxmoe.vllm.backend import Backend, RequestFailed
from jaxmoe.vllm.http_backend import HttpBackend, check_guarded, key_of_running_servers
from jaxmoe.vllm.placement import (
    Placement,
    gpus_each,
    placements,
    trainer_share,
    visible_gpus,
)
from jaxmoe.vllm.replica import Replica, TargetWeights, backoff
from jaxmoe.vllm.request import PromptRequest
from jaxmoe.vllm.server import Server, inspect_python
from jaxmoe.vllm.sync import Probe, workers
from jaxmoe.vllm.transport import Transport
from jaxmoe.weight_sync.directory import WeightsDirectory
from jaxmoe.weight_sync.files import WeightFile, write_files
from jaxmoe.weight_sync.update import ManifestDict, WeightUpdate, digested, new_run

T = TypeVar("T")
BOUND = {"float32": 1e-4, "bfloat16": 0.1}  # mean |Δlogp| of a probe, nats
THREADS = 512  # requests in flight at once, at most


def trainer_logps(params: Params, tokens_BT: Array, *, cfg: ModelConfig, ops: Ops) -> Array:
    """Log-probs as the trainer computes them, temperature 1; column 0 is 0."""
    hidden_BTD = forward(params, tokens_BT, cfg, ops)[0]
    return sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops)[0]


LOGPS = jax.jit(trainer_logps, static_argnames=("cfg", "ops"))  # one program for all engines


class VllmEngine:
    """`backends` are the vLLMs it samples from."""

    def __init__(
        self, cfg: ModelConfig, ops: Ops, vllm: VllmConfig, *, work: Path, max_prompt_tokens: int,
        max_new_tokens: int, max_rows: int,
    ) -> None:  # fmt: skip
        self._cfg, self._vllm = cfg, vllm
        self._longest, self._max_new, self._rows = max_prompt_tokens, max_new_tokens, max_rows
        self._dtype = vllm.dtype or cfg.dtype
        self._run = new_run()
        self.incidents: list[str] = []
        self._logp = partial(LOGPS, cfg=cfg, ops=ops)
        self._lock, self._closed = Lock(), Event()
        self._target: TargetWeights | None = None
        self._reusable_file: WeightFile | None = None
        self._weights_dir: WeightsDirectory | None = None
        in_process = not vllm.url and vllm.launch == 0
        self._transport = "in_process" if in_process else vllm.transport
        context = max_prompt_tokens + max_new_tokens
        self._replicas: list[Replica] = []
        if self._transport == "files":  # an unusable folder fails before minutes of starting
            self._weights_dir = WeightsDirectory(vllm.weights_dir, self._run)
        try:
            opened = _open(cfg, vllm, work, context, max_rows)
        except BaseException:
            self.close()
            raise
        try:
            context = min(_context(backend, context + 1) for backend, _ in opened)
            for backend, _ in opened:
                with suppress(RequestFailed):  # it is asked again with the first weights
                    workers(backend)
            worst = "bfloat16" if "bfloat16" in (self._dtype, cfg.dtype) else "float32"
            probe = Probe(cfg, bound=vllm.probe_abs_diff or BOUND[worst], context=context)
        except BaseException:
            for backend, server in opened:
                backend.close()
                if server is not None:
                    server.stop()
            self.close()
            raise
        self._replicas = [
            Replica(
                backend, server, transport=self._transport, cfg=cfg, probe=probe,
                retries=vllm.retries, report=self.incidents.append,
            )
            for backend, server in opened
        ]  # fmt: skip

    @property
    def backends(self) -> list[Backend]:
        return [replica.backend for replica in self._replicas]

    def load(self, params: Params, version: int) -> None:
        """Sync the weights of every replica and verify them; Engine.load.

        Raises EngineError where one of them does not hold these weights afterwards.
        """
        named: dict[str, Any] = dict(dtype=self._dtype, run=self._run, version=version)
        file, summing = None, Lock()
        if self._transport == "files":
            reuse, self._reusable_file = self._reusable_file, None
            file = write_files(params, self._cfg, self._vllm.weights_dir, **named, reuse=reuse)

        def logps(tokens: list[int]) -> np.ndarray:
            return np.asarray(self._logp(params, jnp.asarray([tokens], jnp.int32))[0])

        @cache
        def manifest() -> ManifestDict:
            return digested(params, self._cfg, **named)

        def make(transport: Transport) -> WeightUpdate:
            with summing:  # the first replica that asks; the others wait for it
                told = manifest()
            return transport.make(params, self._cfg, told, **named)

        with self._lock:
            before = self._target
            target = TargetWeights(f"{self._run}:{version}", version, file, make, logps)
            self._target = target
        pool, on_sync = ThreadPoolExecutor(len(self._replicas)), self._vllm.on_weight_sync
        try:
            list(pool.map(lambda r: r.sync_weights(target, on_sync), self._replicas))
        except KeyboardInterrupt:
            self.close()  # a sync that waits for a replica ends
            raise
        finally:
            pool.shutdown()
        target.logps = target.make = None  # the trainer may give the weights away now
        for replica in self._replicas:
            with replica.lock:  # nobody reads them any more
                pass
        if before is not None and before.file is not None and before.version != version:
            self._reusable_file = before.file  # nobody reads it now

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int = 1
    ) -> list[Rollout]:
        """Engine.generate; raises ConfigError for what these vLLMs cannot do."""
        self._check_request(prompts, sampling)
        # an aborted sample is continued alone, beside the others of its prompt; and a server
        # refuses a request of more samples than it computes at once
        most = min(self._rows, *(replica.max_rows for replica in self._replicas))
        each = 1 if self._vllm.on_weight_sync == "abort" else min(samples, most)
        requests = [
            PromptRequest(index, prompt, first, min(each, samples - first))
            for index, prompt in enumerate(prompts) for first in range(0, samples, each)
        ]  # fmt: skip
        done = self._map(
            lambda request, replica, target: replica.generate(request, sampling, seed, target),
            requests,
            each,
        )
        return [rollout for made in done for rollout in made]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """float32 [T] for each sequence of token ids: the engine's log-prob of each of them.

        At temperature 1, whatever is sampled at; 0 for the first, which nothing predicts.
        """
        self._current_target()
        return self._map(
            lambda tokens, replica, target: replica.score([int(t) for t in tokens], target),
            list(sequences), 1,
        )  # fmt: skip

    def close(self) -> None:
        """Stop what was started, remove the weight files; may be called twice."""
        self._closed.set()
        with ExitStack() as closing:  # all of them, whatever one of them says
            if self._weights_dir is not None:
                closing.callback(self._weights_dir.close)
            for replica in self._replicas:
                closing.callback(replica.close)
        with self._lock:  # what is mapped stays in memory as long as somebody has it
            self._reusable_file = None
            if self._target is not None:
                self._target.file = None

    def _map(self, fn: Callable[..., T], things: list, rows: int) -> list[T]:
        """fn of each thing, each on one replica at a time; one result for each, in order."""
        width = max(1, self._rows // rows) * len(self._replicas)
        cancelled = Event()
        pool = ThreadPoolExecutor(max(1, min(width, len(things), THREADS)), "jaxmoe-vllm")
        try:
            jobs = [
                pool.submit(self._with_retries, partial(fn, thing), cancelled) for thing in things
            ]
            return [job.result() for job in jobs]
        finally:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _with_retries(self, fn: Callable[[Replica, TargetWeights], T], cancelled: Event) -> T:
        why: list[str] = []
        for attempt in range(self._vllm.retries + 1):
            if cancelled.is_set() or self._closed.is_set():
                raise EngineError("the engine was closed, or another request failed for good")
            target, replica = self._current_target(), self._least_busy()
            seen = replica.generation
            try:
                return fn(replica, target)
            except RequestFailed as error:
                why.append(str(error))
                replica.report_failure(str(error))
            finally:
                with self._lock:
                    replica.in_flight -= 1
            if self._closed.is_set():
                continue
            replica.recover(seen, self._current_target())
            backoff(attempt)
        raise replica.gave_up(f"a request was not answered: {why[-1]}")

    def _least_busy(self) -> Replica:
        with self._lock:
            replica = min(self._replicas, key=lambda r: r.in_flight)
            replica.in_flight += 1
            return replica

    def _current_target(self) -> TargetWeights:
        if self._target is None:
            raise ValueError("the engine must have weights before it samples: call load() first.")
        return self._target

    def _check_request(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self._current_target()
        if sampling.max_new_tokens > self._max_new:
            raise ConfigError(
                f"sampling.max_new_tokens ({sampling.max_new_tokens}) must be at most the "
                f"engine's ({self._max_new}). Try --set rollout.max_new_tokens="
                f"{sampling.max_new_tokens}."
            )
        longest = max((len(p.tokens) for p in prompts), default=0)
        if longest > self._longest:
            raise ConfigError(
                f"prompts must have at most data.max_prompt_tokens tokens, got one of {longest}. "
                f"Try --set data.max_prompt_tokens={longest}."
            )
        cut = sampling.top_k > 0 or sampling.top_p < 1.0
        if cut and sampling.temperature not in (0.0, 1.0):
            raise ConfigError(
                f"rollout.temperature must be 1 where top_k ({sampling.top_k}) or top_p "
                f"({sampling.top_p}) cut and rollout.engine is vllm, got {sampling.temperature}: "
                "vLLM does not tell what a cut left over at another temperature. Try --set "
                "rollout.temperature=1.0, or --set rollout.top_k=0 --set rollout.top_p=1.0."
            )


def _open(
    cfg: ModelConfig, vllm: VllmConfig, work: Path, context: int, rows: int
) -> list[tuple[Backend, Server | None]]:
    """The running servers named, or servers started, or one vLLM in this process."""
    if vllm.urls:
        named: dict[str, Any] = dict(timeout_s=vllm.request_timeout_s, connections=rows)
        key = key_of_running_servers()
        return [(HttpBackend(url, key=key, **named), None) for url in vllm.urls]
    if vllm.launch == 0:
        from jaxmoe.vllm.in_process import InProcessBackend

        return [(InProcessBackend(cfg, vllm, work=work, context=context, rows=rows), None)]
    places = [Placement()] * vllm.launch
    if not inspect_python(vllm.python or sys.executable)["cpu"]:
        trainer = trainer_share(jax.default_backend() == "gpu")
        places = placements(visible_gpus(), vllm.launch, gpus_each(vllm.args), trainer)
    servers = [
        Server(vllm, cfg, work=work, number=n, context=context, rows=rows, place=place)
        for n, place in enumerate(places)
    ]
    # one that measures a GPU's free memory must be the only one that takes of it meanwhile
    pool = ThreadPoolExecutor(len(servers) if all(p.alone for p in places) else 1)
    try:
        jobs = [pool.submit(server.start) for server in servers]
        return [(job.result(), server) for job, server in zip(jobs, servers, strict=True)]
    except BaseException:
        for server in servers:
            server.stop()
        raise
    finally:
        pool.shutdown()


def _context(backend: Backend, needed: int) -> int:
    """What a vLLM can hold; says where it takes commands from anybody.

    Raises ConfigError where it holds too little, nobody is there, or it is open and elsewhere.
    """
    try:
        has = backend.context()
        if isinstance(backend, HttpBackend):
            check_guarded(backend)
    except RequestFailed as error:
        raise ConfigError(
            f"rollout.vllm.url must name running vLLM servers; {error}. Try --set "
            "rollout.vllm.url= to start one here."
        ) from error
    if has < needed:
        raise ConfigError(
            f"{backend.name} must take data.max_prompt_tokens + rollout.max_new_tokens + 1 "
            f"({needed}) tokens, its --max-model-len is {has}. Start it with --max-model-len "
            f"{needed}, or make both smaller, --set data.max_prompt_tokens={max(1, has // 2)} "
            f"--set rollout.max_new_tokens={max(1, has - has // 2 - 1)}."
        )
    return has
