# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine: prompts are spread over one or several replicas, each answered exactly once.

A failed request is sent again, to whoever is here, while the replica that failed is brought back
with the current weights; `retries` bounds both. Prompts go out longest first, each to the replica
with the fewest tokens in flight. load() may run in another thread than
generate(): requests in flight are kept, finished or aborted and continued, and every token carries
the version of the weights that sampled it.

    engine.generate -> Fleet.take -> Replica.generate -> request.sample -> Backend.generate
    engine.load     -> Fleet.sync -> Replica.sync_weights -> sync.transfer_weights, Probe.check

top-k and top-p: vLLM tells log-probs after the cut. The mass kept follows from scoring the response
once more, which vLLM does at temperature 1 only; at another one they are refused.
Next: jaxmoe/vllm/fleet.py; shared.py is the engine of several processes.
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

from jaxmoe.config import ConfigError, EngineError, ModelConfig, VllmConfig
from jaxmoe.model import Ops, forward, sequence_logprobs
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.shapes import Params
from jaxmoe.vllm.adapter import ServedAdapter
from jaxmoe.vllm.backend import Backend, RequestFailed
from jaxmoe.vllm.fleet import Fleet
from jaxmoe.vllm.opening import context_of, open_backends, those_here
from jaxmoe.vllm.replica import Replica, TargetWeights, backoff
from jaxmoe.vllm.request import PromptRequest
from jaxmoe.vllm.sync import Probe, ProbeReference, workers
from jaxmoe.vllm.transport import Transport
from jaxmoe.weight_sync.adapter import adapters_in, write_adapter
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
        max_new_tokens: int, max_rows: int, run: str = "", adapter: ServedAdapter | None = None,
    ) -> None:  # fmt: skip
        self._adapter = adapter
        self._cfg, self._vllm = cfg, vllm
        self._longest, self._max_new, self._rows = max_prompt_tokens, max_new_tokens, max_rows
        self._dtype = vllm.dtype or cfg.dtype
        self._run = run or new_run()
        self.incidents: list[str] = []
        self._logp = partial(LOGPS, cfg=cfg, ops=ops)
        self._closed = Event()
        self._reusable_file: WeightFile | None = None
        self._weights_dir: WeightsDirectory | None = None
        in_process = not vllm.url and vllm.launch == 0
        self._transport = "in_process" if in_process else vllm.transport
        context = max_prompt_tokens + max_new_tokens
        self._fleet = Fleet([], [], self.incidents.append)
        if (
            self._transport == "files" or adapter is not None
        ):  # an unusable folder fails before minutes of starting
            self._weights_dir = WeightsDirectory(vllm.weights_dir, self._run)
        try:
            opened = open_backends(cfg, vllm, work, context, max_rows, adapter)
        except BaseException:
            self.close()
            raise
        try:
            needed = context + 1
            context, away = those_here(opened, needed)
            for backend in [backend for backend, _ in opened if backend not in away]:
                with suppress(RequestFailed):  # it is asked again with the first weights
                    workers(backend)
            worst = "bfloat16" if "bfloat16" in (self._dtype, cfg.dtype) else "float32"
            self.probe = Probe(cfg, bound=vllm.probe_abs_diff or BOUND[worst], context=context)
        except BaseException:
            for backend, server in opened:
                backend.close()
                if server is not None:
                    server.stop()
            self.close()
            raise
        replicas = [
            Replica(
                backend, server, transport=self._transport, cfg=cfg, probe=self.probe,
                retries=vllm.retries, report=self.incidents.append,
                check=partial(context_of, needed=needed), try_out=self._try_out,
            )
            for backend, server in opened
        ]  # fmt: skip
        self._fleet = Fleet(replicas, away, self.incidents.append)

    @property
    def backends(self) -> list[Backend]:
        return [replica.backend for replica in self._fleet.replicas]

    def load(self, params: Params, version: int) -> None:
        """Sync the weights of every replica and verify them; Engine.load.

        Those that are away get them when they come back.
        Raises EngineError where one holds other weights, or none is left.
        """
        named: dict[str, Any] = dict(dtype=self._dtype, run=self._run, version=version)
        file, summing = None, Lock()
        if self._adapter is not None:
            file = write_adapter(
                adapters_in(params), self._cfg, self._adapter.lora, self._vllm.weights_dir,
                run=self._run, version=version,
            )  # fmt: skip
        elif self._transport == "files":
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

        label = f"{self._run}:{version}"
        before = self._hold(TargetWeights(label, version, file, make, logps))
        if self._adapter is None:
            self._reusable_file = before
        elif before is not None:
            before.close()

    def _try_out(self, backend: Backend) -> None:
        """Whether it applies adapters, where it is to."""
        if self._adapter is not None:
            self._adapter.check(
                backend, self._cfg, self.probe.given, self._vllm.weights_dir, self._run
            )

    def hold(self, file: WeightFile, reference: ProbeReference) -> None:
        """`load` of a file that somebody else wrote, with the trainer's log-probs of a probe."""
        version = file.manifest["version"]
        before = self._hold(TargetWeights(file.label, version, file, None, None, reference))
        if before is not None:
            before.close()

    def _hold(self, target: TargetWeights) -> WeightFile | None:
        """Give it to all. Returns the file before, where nobody reads it any more."""
        before = self._fleet.target
        try:
            idle = self._fleet.sync(target, self._vllm.on_weight_sync)
        except KeyboardInterrupt:
            self.close()  # a sync that waits for a replica ends
            raise
        if before is None or before.file is None or before.version == target.version:
            return None
        if idle:
            return before.file
        before.file.close()  # who still reads it has it open
        return None

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int = 1
    ) -> list[Rollout]:
        """Engine.generate; raises ConfigError for what these vLLMs cannot do."""
        self._check_request(prompts, sampling)
        # an aborted sample is continued alone, beside the others of its prompt; and a server
        # refuses a request of more samples than it computes at once
        most = min(self._rows, self._fleet.max_rows)
        each = 1 if self._vllm.on_weight_sync == "abort" else min(samples, most)
        requests = [
            PromptRequest(index, prompt, first, min(each, samples - first))
            for index, prompt in enumerate(prompts) for first in range(0, samples, each)
        ]  # fmt: skip
        done = self._map(
            lambda request, replica, target: replica.generate(request, sampling, seed, target),
            requests, each,
            lambda request: len(request.prompt.tokens) + request.count * sampling.max_new_tokens,
        )  # fmt: skip
        return [rollout for made in done for rollout in made]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """float32 [T] for each sequence of token ids: the engine's log-prob of each of them.

        At temperature 1, whatever is sampled at; 0 for the first, which nothing predicts.
        """
        self._current_target()
        return self._map(
            lambda tokens, replica, target: replica.score([int(t) for t in tokens], target),
            list(sequences), 1, len,
        )  # fmt: skip

    def close(self) -> None:
        """Stop what was started, remove the weight files; may be called twice."""
        self._closed.set()
        with ExitStack() as closing:  # all of them, whatever one of them says
            if self._weights_dir is not None:
                closing.callback(self._weights_dir.close)
            for replica in self._fleet.replicas:
                closing.callback(replica.close)
            closing.callback(self._fleet.close)
        self._reusable_file = None  # what is mapped stays in memory as long as somebody has it
        if self._fleet.target is not None:
            self._fleet.target.file = None

    def _map(
        self, fn: Callable[..., T], things: list, rows: int, tokens: Callable[[Any], int]
    ) -> list[T]:
        """fn of each thing, each on one replica at a time; one result for each, in order.

        Those of the most `tokens` are begun first: what is begun last is waited for.
        """
        width = max(1, self._rows // rows) * len(self._fleet.replicas)
        cancelled = Event()
        pool = ThreadPoolExecutor(max(1, min(width, len(things), THREADS)), "jaxmoe-vllm")
        try:
            sizes = [tokens(thing) for thing in things]
            jobs = {
                i: pool.submit(self._with_retries, partial(fn, things[i]), sizes[i], cancelled)
                for i in sorted(range(len(things)), key=lambda i: -sizes[i])
            }
            return [jobs[i].result() for i in range(len(things))]
        finally:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _with_retries(
        self, fn: Callable[[Replica, TargetWeights], T], tokens: int, cancelled: Event
    ) -> T:
        why, failures = list[str](), Counter[Replica]()
        for attempt in range(self._vllm.retries + 1):
            if cancelled.is_set() or self._closed.is_set():
                raise EngineError("the engine was closed, or another request failed for good")
            target, replica = self._current_target(), self._fleet.take(tokens, failures)
            seen = replica.generation
            try:
                return fn(replica, target)
            except RequestFailed as error:
                why.append(str(error))
                replica.report_failure(str(error))
            except EngineError as error:  # it was given up while this request waited for it
                why.append(str(error))
            finally:
                self._fleet.give_back(replica, tokens)
            failures[replica] += 1
            if self._closed.is_set():
                continue
            self._fleet.failed(replica, seen, self._current_target())
            backoff(attempt)
        raise replica.gave_up(f"a request was not answered: {why[-1]}")

    def _current_target(self) -> TargetWeights:
        if self._fleet.target is None:
            raise ValueError("the engine must have weights before it samples: call load() first.")
        return self._fleet.target

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
