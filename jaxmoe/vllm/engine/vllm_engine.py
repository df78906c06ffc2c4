# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine: prompts are distributed over the replicas, and each is answered exactly once.

A failed request is sent again, to an available replica, while the failed replica is restored with
the current weights; `retries` limits both. The longest prompts are sent first, each to the replica
with the fewest tokens in flight. load() and generate() may run in different threads: requests in
flight are kept, finished, or aborted and continued, and every token carries the version of the
weights that sampled it. With an environment, each turn of an episode is a request of its own.

    engine.generate -> ServerPool.acquire_replica -> Replica.generate_rollouts
                    -> request.sample_completions -> Backend.generate
    engine.load     -> ServerPool.sync_weights -> Replica.sync_weights
                    -> sync.transfer_weights, Probe.check_weights

With top-k and top-p, vLLM returns log-probs after truncation. The truncated distribution's mass
follows from scoring the response again, which vLLM does at temperature 1 only; other temperatures
are rejected then. Next: jaxmoe/vllm/engine/server_pool.py; multi_process_engine.py is the engine of
several processes; episodes.py samples episodes.
"""

from collections import Counter
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

from jaxmoe.config import EngineError, ModelConfig, VllmConfig
from jaxmoe.model import Ops, forward, sequence_logprobs
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rollout.replies import TokenEnvironment
from jaxmoe.shapes import Params
from jaxmoe.vllm.client.backend import Backend, RequestFailed
from jaxmoe.vllm.client.request import PromptRequest, score_tokens
from jaxmoe.vllm.engine.check_request import RequestLimits, check_request
from jaxmoe.vllm.engine.episodes import sample_episodes
from jaxmoe.vllm.engine.expert_format import FullWeights, choose_sent_experts, pack_for_sync
from jaxmoe.vllm.engine.in_process_backend import InProcessBackend
from jaxmoe.vllm.engine.open_backends import check_available, check_context, open_backends
from jaxmoe.vllm.engine.replica import Replica, TargetWeights, sleep_backoff
from jaxmoe.vllm.engine.served_adapter import ServedAdapter
from jaxmoe.vllm.engine.server_pool import ServerPool
from jaxmoe.vllm.engine.sync import Probe, ProbeReference, read_workers
from jaxmoe.vllm.engine.transport import Transport
from jaxmoe.vllm.weight_sync.directory import WeightsDirectory
from jaxmoe.vllm.weight_sync.files import WeightFile, write_files
from jaxmoe.vllm.weight_sync.update import (
    ManifestDict,
    WeightUpdate,
    compute_manifest,
    create_run_id,
)

T = TypeVar("T")
MAX_PROBE_ABS_DIFF = {"float32": 1e-4, "bfloat16": 0.1}  # mean |Δlogp| of a probe, nats
DENSE = FullWeights()
MAX_THREADS = 512  # one for each request in flight


def trainer_logps(params: Params, tokens_BT: Array, *, cfg: ModelConfig, ops: Ops) -> Array:
    """Return log-probs as the trainer computes them, at temperature 1; column 0 is 0."""
    hidden_BTD = forward(params, tokens_BT, cfg, ops)[0]
    return sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops)[0]


# One program for all engines.
TRAINER_LOGPS = jax.jit(trainer_logps, static_argnames=("cfg", "ops"))


class VllmEngine:
    """An Engine over one or several vLLMs, its `backends`."""

    def __init__(
        self,
        cfg: ModelConfig,
        ops: Ops,
        vllm: VllmConfig,
        *,
        work: Path,
        max_prompt_tokens: int,
        max_new_tokens: int,
        max_rows: int,
        max_context: int = 0,
        run: str = "",
        sent: FullWeights | ServedAdapter = DENSE,
    ) -> None:
        """`max_context`: tokens of an episode; 0: max_prompt_tokens + max_new_tokens."""
        self._sent = sent
        self._cfg, self._vllm = cfg, vllm
        context = max_context or max_prompt_tokens + max_new_tokens
        self._limits = RequestLimits(max_prompt_tokens, max_new_tokens, context)
        self._max_rows = max_rows
        self._dtype = vllm.dtype or cfg.dtype
        self._run = run or create_run_id()
        self.incidents: list[str] = []
        self._logp = partial(TRAINER_LOGPS, cfg=cfg, ops=ops)
        self._closed = Event()
        self._reusable_file: WeightFile | None = None
        self._weights_dir: WeightsDirectory | None = None
        in_process = not vllm.url and vllm.launch == 0
        self._transport = "in_process" if in_process else vllm.transport
        self._pool = ServerPool([], [], self.incidents.append)
        # Fails on an unusable folder before servers start, which takes minutes.
        if self._transport == "files" or sent.are_adapters:
            self._weights_dir = WeightsDirectory(vllm.weights_dir, self._run)
        try:
            opened = open_backends(cfg, vllm, work, context, max_rows, sent)
        except BaseException:
            self.close()
            raise
        try:
            needed = context + 1
            context, unavailable = check_available(opened, needed)
            for backend in [backend for backend, _ in opened if backend not in unavailable]:
                with suppress(RequestFailed):  # checked again with the first weights
                    read_workers(backend)
            self.experts = choose_sent_experts(
                [backend for backend, _ in opened if backend not in unavailable], sent.four_bits
            )
            loosest = "bfloat16" if "bfloat16" in (self._dtype, cfg.dtype) else "float32"
            self.probe = Probe(
                cfg, bound=vllm.probe_abs_diff or MAX_PROBE_ABS_DIFF[loosest], context=context
            )
        except BaseException:
            for backend, server in opened:
                backend.close()
                if server is not None:
                    server.stop()
            self.close()
            raise
        replicas = [
            Replica(
                backend,
                server,
                transport=self._transport,
                cfg=cfg,
                probe=self.probe,
                retries=vllm.retries,
                report=self.incidents.append,
                check=partial(check_context, needed_tokens=needed),
                try_out=self._try_out,
            )
            for backend, server in opened
        ]
        self._pool = ServerPool(replicas, unavailable, self.incidents.append)

    @property
    def backends(self) -> list[Backend]:
        return [replica.backend for replica in self._pool.replicas]

    def load(self, params: Params, version: int) -> None:
        """Sync the weights to every replica and verify them; see Engine.load.

        Unavailable replicas get them when they reconnect. Raises EngineError if a replica holds
        other weights, or if none is left.
        """
        named: dict[str, Any] = dict(dtype=self._dtype, run=self._run, version=version)
        if self.experts == "packed":
            params = pack_for_sync(params)
        named["experts"] = self.experts
        folder, manifest_lock = self._vllm.weights_dir, Lock()
        file = self._sent.write_file(params, self._cfg, folder, run=self._run, version=version)
        if file is None and self._transport == "files":
            reuse, self._reusable_file = self._reusable_file, None
            file = write_files(params, self._cfg, folder, **named, reuse=reuse)

        def logps(tokens: list[int]) -> np.ndarray:
            return np.asarray(self._logp(params, jnp.asarray([tokens], jnp.int32))[0])

        @cache
        def manifest() -> ManifestDict:
            return compute_manifest(params, self._cfg, **named)

        def build_update(transport: Transport) -> WeightUpdate:
            with manifest_lock:  # only the first replica computes it
                manifest_dict = manifest()
            return transport.build_update(params, self._cfg, manifest_dict, **named)

        label = f"{self._run}:{version}"
        previous_file = self._sync_target(TargetWeights(label, version, file, build_update, logps))
        self._reusable_file = self._sent.keep_file(previous_file)

    def _try_out(self, backend: Backend) -> None:
        """Check that the backend applies what this run sends."""
        folder = self._vllm.weights_dir
        self._sent.check_applied(backend, self._cfg, self.probe.scored_tokens, folder, self._run)

    def load_file(self, file: WeightFile, reference: ProbeReference) -> None:
        """Load a file that another process wrote, with the trainer's log-probs of the probe."""
        version = file.manifest["version"]
        previous_file = self._sync_target(
            TargetWeights(file.label, version, file, None, None, reference)
        )
        if previous_file is not None:
            previous_file.close()

    def _sync_target(self, target: TargetWeights) -> WeightFile | None:
        """Sync all replicas. Returns the previous weight file if nobody reads it any more."""
        previous = self._pool.target
        try:
            idle = self._pool.sync_weights(target, self._vllm.on_weight_sync)
        except KeyboardInterrupt:
            self.close()  # ends a sync that waits for a replica
            raise
        if previous is None or previous.file is None or previous.version == target.version:
            return None
        if idle:
            return previous.file
        previous.file.close()  # a replica that still reads it has it open
        return None

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        samples: int = 1,
        environment: TokenEnvironment | None = None,
    ) -> list[Rollout]:
        """Engine.generate; raises ConfigError for requests that these vLLMs cannot handle."""
        self._current_target()
        check_request(prompts, sampling, self._limits)
        if environment is not None:
            return self._generate_episodes(prompts, sampling, seed, samples, environment)
        # An aborted sample is continued by a request of its own, so with "abort" each sample is one
        # request. A server rejects a request of more samples than it computes at once.
        max_samples = min(self._max_rows, self._pool.max_rows)
        single = self._vllm.on_weight_sync == "abort"
        samples_per_request = 1 if single else min(samples, max_samples)
        requests = [
            PromptRequest(index, prompt, first, min(samples_per_request, samples - first))
            for index, prompt in enumerate(prompts)
            for first in range(0, samples, samples_per_request)
        ]
        rollouts_by_request = self._map_replicas(
            lambda request, replica, target: replica.generate_rollouts(
                request, sampling, seed, target
            ),
            requests,
            samples_per_request,
            lambda request: len(request.prompt.tokens) + request.count * sampling.max_new_tokens,
        )
        return [rollout for rollouts in rollouts_by_request for rollout in rollouts]

    def _generate_episodes(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        samples: int,
        environment: TokenEnvironment,
    ) -> list[Rollout]:
        cancelled, replicas = Event(), dict[int, Replica]()

        def sample_turn(episode: int, request: PromptRequest, limited: Sampling) -> Rollout:
            def sample_on(replica: Replica, target: TargetWeights) -> Rollout:
                (turn,) = replica.generate_rollouts(request, limited, seed, target)
                replicas[episode] = replica
                return turn

            tokens = len(request.tokens) + limited.max_new_tokens
            # The replica of the last turn has the episode in its prefix cache.
            return self._with_retries(sample_on, tokens, cancelled, replicas.get(episode))

        try:
            return sample_episodes(
                prompts,
                sampling,
                samples,
                environment,
                sample_turn,
                cfg=self._cfg,
                max_context=sampling.max_context or self._limits.context,
                places=self._count_places(1),
                is_closed=self._closed.is_set,
            )
        finally:
            cancelled.set()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return float32 [T] for each sequence of token ids: the engine's log-prob of each token.

        Always at temperature 1; 0 for the first token, which has no context.
        """
        self._current_target()
        return self._map_replicas(
            lambda tokens, replica, target: replica.score_tokens([int(t) for t in tokens], target),
            list(sequences),
            1,
            len,
        )

    def loaded_states(self) -> list[dict[str, Any]]:
        """Return the state that each worker of each vLLM reports of its loaded weights."""
        return [worker for backend in self.backends for worker in backend.loaded_state()]

    def record_forward(self, tokens: list[int]) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Return the log-probs of a sequence, and the outputs of vLLM's modules by worker.

        Raises EngineError unless vLLM is in this process and its modules have the known names.
        """
        backend = self.backends[0]
        if not isinstance(backend, InProcessBackend):
            raise EngineError("it needs vLLM in this process, --set rollout.vllm.launch=0")
        try:
            (logp, _), workers = backend.record_forward(
                partial(score_tokens, backend, tokens, self._cfg)
            )
        except RequestFailed as error:
            raise EngineError(str(error)) from error
        return logp, workers

    def close(self) -> None:
        """Stop the servers that were started, remove the weight files; may be called twice."""
        self._closed.set()
        with ExitStack() as closing:  # closes all, even if one raises
            if self._weights_dir is not None:
                closing.callback(self._weights_dir.close)
            for replica in self._pool.replicas:
                closing.callback(replica.close)
            closing.callback(self._pool.close)
        self._reusable_file = None  # mapped pages stay in memory while referenced
        if self._pool.target is not None:
            self._pool.target.file = None

    def _map_replicas(
        self, fn: Callable[..., T], items: list, rows: int, tokens: Callable[[Any], int]
    ) -> list[T]:
        """Return fn(item, replica, target) of each item, in order; each call runs on one replica.

        Items with the most `tokens` start first, because the call waits for the one that ends last.
        """
        cancelled = Event()
        width = min(self._count_places(rows), len(items))
        pool = ThreadPoolExecutor(max(1, width), "jaxmoe-vllm")
        try:
            sizes = [tokens(item) for item in items]
            jobs = {
                i: pool.submit(self._with_retries, partial(fn, items[i]), sizes[i], cancelled)
                for i in sorted(range(len(items)), key=lambda i: -sizes[i])
            }
            return [jobs[i].result() for i in range(len(items))]
        finally:
            cancelled.set()
            # Requests of minutes may be running after another one failed permanently.
            pool.shutdown(wait=False, cancel_futures=True)

    def _count_places(self, rows: int) -> int:
        """Number of requests of `rows` sequences that are in flight at once."""
        return min(max(1, self._max_rows // rows) * len(self._pool.replicas), MAX_THREADS)

    def _with_retries(
        self,
        fn: Callable[[Replica, TargetWeights], T],
        tokens: int,
        cancelled: Event,
        preferred: Replica | None = None,
    ) -> T:
        errors, failures = list[str](), Counter[Replica]()
        for attempt in range(self._vllm.retries + 1):
            if cancelled.is_set() or self._closed.is_set():
                raise EngineError("the engine was closed, or another request failed permanently")
            target = self._current_target()
            replica = self._pool.acquire_replica(tokens, failures, preferred)
            generation = replica.generation
            try:
                return fn(replica, target)
            except RequestFailed as error:
                errors.append(str(error))
                replica.report_failure(str(error))
            except EngineError as error:  # the replica failed permanently meanwhile
                errors.append(str(error))
            finally:
                self._pool.release_replica(replica, tokens)
            failures[replica] += 1
            if self._closed.is_set():
                continue
            self._pool.handle_failure(replica, generation, self._current_target())
            sleep_backoff(attempt)
        raise replica.give_up_error(f"a request was not answered: {errors[-1]}")

    def _current_target(self) -> TargetWeights:
        if self._pool.target is None:
            raise ValueError("the engine must have weights before it samples: call load() first.")
        return self._pool.target
