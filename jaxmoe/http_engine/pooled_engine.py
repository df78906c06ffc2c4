# SPDX-License-Identifier: Apache-2.0
"""An engine over a pool of servers: prompts are distributed, and each is answered exactly once.

A failed request is sent again, to an available replica, while the failed replica is restored with
the current weights; `retries` limits both. The longest prompts are sent first, each to the replica
with the fewest tokens in flight. load() and generate() may run in different threads: requests in
flight are kept, finished, or aborted and continued, and every token carries the version of the
weights that sampled it. With an environment, each turn of an episode is a request of its own.

    engine.generate -> ServerPool.acquire_replica -> Replica.generate_rollouts
                    -> request.sample_completions -> Backend.sample
    engine.load     -> ServerPool.sync_weights -> Replica.sync_weights
                    -> Backend.load_weights, Probe.check_weights

If a server returns log-probs after top-k and top-p, the truncated distribution's mass follows from
scoring the response again, at temperature 1 only; other temperatures are rejected then. Next:
server_pool.py; episodes.py samples episodes; jaxmoe/vllm/engine/vllm_engine.py is this over vLLMs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from threading import Event
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.config import EngineError, ModelConfig
from jaxmoe.http_engine.backend import Backend, RequestFailed
from jaxmoe.http_engine.check_request import RequestLimits, check_request
from jaxmoe.http_engine.episodes import sample_episodes
from jaxmoe.http_engine.probe import ProbeReference
from jaxmoe.http_engine.replica import Replica, sleep_backoff
from jaxmoe.http_engine.request import PromptRequest
from jaxmoe.http_engine.server_pool import ServerPool
from jaxmoe.http_engine.target_weights import TargetWeights
from jaxmoe.model import Ops, forward, sequence_logprobs
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rollout.replies import TokenEnvironment
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.directory import WeightsDirectory
from jaxmoe.weight_sync.files import WeightFile, write_files
from jaxmoe.weight_sync.update import WeightUpdate, create_run_id

T = TypeVar("T")
MAX_THREADS = 512  # one for each request in flight


def trainer_logps(params: Params, tokens_BT: Array, *, cfg: ModelConfig, ops: Ops) -> Array:
    """Return log-probs as the trainer computes them, at temperature 1; column 0 is 0."""
    hidden_BTD = forward(params, tokens_BT, cfg, ops)[0]
    return sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops)[0]


# One program for all engines.
TRAINER_LOGPS = jax.jit(trainer_logps, static_argnames=("cfg", "ops"))


class PooledEngine:
    """An Engine over one or several servers, its `backends`."""

    def __init__(
        self,
        cfg: ModelConfig,
        ops: Ops,
        *,
        limits: RequestLimits,
        max_rows: int,
        retries: int,
        on_weight_sync: str = "keep",
        weights_dir: str = "",
        dtype: str = "",
        run: str = "",
    ) -> None:
        """The engine without servers: `serve` adds them.

        max_rows: sequences that a server gets at once.
        on_weight_sync: what becomes of requests in flight: keep, wait or abort.
        weights_dir: the folder of weight files, which the servers must see.
        """
        self._cfg, self._limits, self._max_rows = cfg, limits, max_rows
        self._retries, self._on_weight_sync = retries, on_weight_sync
        self._weights_path, self._dtype = weights_dir, dtype or cfg.dtype
        self._run = run or create_run_id()
        self.incidents: list[str] = []
        self.sent_frac: float | None = None
        self._logp = partial(TRAINER_LOGPS, cfg=cfg, ops=ops)
        self._closed = Event()
        self._reusable_file: WeightFile | None = None
        self._weights_dir: WeightsDirectory | None = None
        self._pool = ServerPool([], [], self.incidents.append)

    def open_weights_directory(self) -> None:
        """Reserve the folder of weight files, which close() or the end of the process removes."""
        if self._weights_dir is None:
            self._weights_dir = WeightsDirectory(self._weights_path, self._run)

    def serve(self, replicas: Sequence[Replica], unavailable: Sequence[Backend] = ()) -> None:
        """Sample from these from now on; `unavailable` are waited for."""
        self._pool = ServerPool(replicas, unavailable, self.incidents.append)

    @property
    def backends(self) -> list[Backend]:
        return [replica.backend for replica in self._pool.replicas]

    def load(self, params: Params, version: int) -> None:
        """Sync the weights to every replica in files, and verify them; see Engine.load.

        Unavailable replicas get them when they reconnect. Raises EngineError if a replica holds
        other weights, or if none is left.
        """
        self.open_weights_directory()
        reuse, self._reusable_file = self._reusable_file, None
        named: dict[str, Any] = dict(dtype=self._dtype, run=self._run, version=version)
        file = write_files(params, self._cfg, self._weights_path, **named, reuse=reuse)
        self._reusable_file = self.sync_weights(params, version, file)

    def sync_weights(
        self,
        params: Params,
        version: int,
        file: WeightFile | None,
        build_update: Callable[[Any], WeightUpdate] | None = None,
        write_complete: Callable[[], WeightFile | None] | None = None,
    ) -> WeightFile | None:
        """Sync a version, by one file for all or an update for each replica.

        `write_complete` is for a file with changes, see TargetWeights. Returns the previous
        version's file if nobody reads it any more.
        """

        def logps(tokens: list[int]) -> np.ndarray:
            return np.asarray(self._logp(params, jnp.asarray([tokens], jnp.int32))[0])

        label = f"{self._run}:{version}"
        target = TargetWeights(
            label, version, file, build_update, logps, write_complete=write_complete
        )
        return self._sync_target(target)

    def load_file(
        self,
        file: WeightFile,
        reference: ProbeReference,
        write_complete: Callable[[], WeightFile | None] | None = None,
    ) -> None:
        """Load a file that several processes wrote, with the trainer's log-probs of the probe."""
        version = file.manifest["version"]
        previous_file = self._sync_target(
            TargetWeights(file.label, version, file, None, None, reference, write_complete)
        )
        if previous_file is not None:
            previous_file.close()

    def _sync_target(self, target: TargetWeights) -> WeightFile | None:
        """Sync all replicas. Returns the previous weight file if nobody reads it any more."""
        previous = self._pool.target
        try:
            idle = self._pool.sync_weights(target, self._on_weight_sync)
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
        """Engine.generate; raises ConfigError for requests that these servers cannot handle."""
        self._current_target()
        check_request(prompts, sampling, self._limits)
        if environment is not None:
            return self._generate_episodes(prompts, sampling, seed, samples, environment)
        # An aborted sample is continued by a request of its own, so with "abort" each sample is one
        # request. A server rejects a request of more samples than it computes at once.
        max_samples = min(self._max_rows, self._pool.max_rows)
        single = self._on_weight_sync == "abort"
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
        pool = ThreadPoolExecutor(max(1, width), "jaxmoe-sample")
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
        for attempt in range(self._retries + 1):
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
