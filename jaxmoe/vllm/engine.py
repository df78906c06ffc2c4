# SPDX-License-Identifier: Apache-2.0
"""The vLLM engine: prompts are spread over one or several vLLMs, and every slot is filled once.

A failed request is asked again, at the next free vLLM, after the one that failed was brought back
with the current weights; `retries` bounds both. load() may run in another thread than generate():
what is then under way is kept, finished or continued, and carries the version of every token.

    engine.generate -> Replica.ask -> request.sample -> Backend.generate     responses.py checks
    engine.load     -> Replica.bring -> sync.hand_over, Probe.check

top-k and top-p: vLLM tells log-probs after the cut. What was kept follows from scoring the answer
once more, which vLLM does at temperature 1 only; at another one they are refused.
Next: jaxmoe/vllm/replica.py.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
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
from jaxmoe.vllm.backend import Backend, Unanswered
from jaxmoe.vllm.http_backend import HttpBackend
from jaxmoe.vllm.replica import Replica, TargetWeights, backoff
from jaxmoe.vllm.request import Unit
from jaxmoe.vllm.server import Server
from jaxmoe.vllm.sync import Probe, workers
from jaxmoe.vllm.transport import Channel
from jaxmoe.weight_sync.directory import WeightsDirectory
from jaxmoe.weight_sync.files import PublishedFile, files
from jaxmoe.weight_sync.update import WeightUpdate, new_run

T = TypeVar("T")
BOUND = {"float32": 1e-4, "bfloat16": 0.1}  # mean |Δlogp| of a probe, nats
THREADS = 512  # requests under way at once, at most


def trainer_logps(params: Params, tokens_BT: Array, *, cfg: ModelConfig, ops: Ops) -> Array:
    """Log-probs as the trainer computes them, temperature 1; column 0 is 0."""
    hidden_BTD = forward(params, tokens_BT, cfg, ops)[0]
    return sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops)[0]


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
        self._logp = jax.jit(partial(trainer_logps, cfg=cfg, ops=ops))
        self._lock, self._closed = Lock(), Event()
        self._wanted: TargetWeights | None = None
        self._spare: PublishedFile | None = None
        self._home: WeightsDirectory | None = None
        # in one process weights are handed over as they are
        self._way = "shared" if not vllm.url and vllm.launch == 0 else vllm.way
        context = max_prompt_tokens + max_new_tokens
        self._places: list[Replica] = []
        if self._way == "files":  # a folder that cannot be is told before minutes of starting
            self._home = WeightsDirectory(vllm.weights_dir, self._run)
        try:
            opened = _open(cfg, vllm, work, context, max_rows)
        except BaseException:
            self.close()
            raise
        try:
            context = min(_context(backend, context + 1) for backend, _ in opened)
            for backend, _ in opened:
                with suppress(Unanswered):  # it is asked again with the first weights
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
        self._places = [
            Replica(
                backend, server, way=self._way, cfg=cfg, probe=probe, retries=vllm.retries,
                report=self.incidents.append,
            )
            for backend, server in opened
        ]  # fmt: skip

    @property
    def backends(self) -> list[Backend]:
        return [place.backend for place in self._places]

    def load(self, params: Params, version: int) -> None:
        """Publish to every vLLM and verify; Engine.load.

        Raises EngineError where one of them does not hold these weights afterwards.
        """
        named: dict[str, Any] = dict(dtype=self._dtype, run=self._run, version=version)
        made = None
        if self._way == "files":
            over, self._spare = self._spare, None
            made = files(params, self._cfg, self._vllm.weights_dir, **named, over=over)

        def logps(tokens: list[int]) -> np.ndarray:
            return np.asarray(self._logp(params, jnp.asarray([tokens], jnp.int32))[0])

        def make(channel: Channel) -> WeightUpdate:
            return channel.make(params, self._cfg, **named)

        with self._lock:
            before = self._wanted
            wanted = TargetWeights(f"{self._run}:{version}", version, made, make, logps)
            self._wanted = wanted
        pool = ThreadPoolExecutor(len(self._places))
        try:
            list(pool.map(lambda place: place.bring(wanted, self._vllm.swap), self._places))
        except KeyboardInterrupt:
            self.close()  # who brings weights stops waiting
            raise
        finally:
            pool.shutdown()
        wanted.logps = wanted.make = None  # the trainer may give the weights away now
        for place in self._places:
            with place.lock:  # who still reads them has ended
                pass
        if before is not None and before.files is not None and before.version != version:
            self._spare = before.files  # nobody reads it now: the next version is written over it

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int = 1
    ) -> list[Rollout]:
        """Engine.generate; raises ConfigError for what these vLLMs cannot do."""
        self._check(prompts, sampling)
        # an aborted sample is continued alone, beside the others of its prompt; and a server
        # refuses a request of more samples than it computes at once
        most = min(self._rows, *(place.rows for place in self._places))
        each = 1 if self._vllm.swap == "abort" else min(samples, most)
        units = [
            Unit(index, prompt, first, min(each, samples - first))
            for index, prompt in enumerate(prompts) for first in range(0, samples, each)
        ]  # fmt: skip
        done = self._each(
            lambda unit, place, wanted: place.ask(unit, sampling, seed, wanted), units, each
        )
        return [rollout for made in done for rollout in made]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """float32 [T] for each sequence of token ids: the engine's log-prob of each of them.

        At temperature 1, whatever is sampled at; 0 for the first, which nothing predicts.
        """
        self._loaded()
        return self._each(
            lambda tokens, place, wanted: place.score([int(t) for t in tokens], wanted),
            list(sequences), 1,
        )  # fmt: skip

    def close(self) -> None:
        """Stop what was started, remove what was published; may be called twice."""
        self._closed.set()
        with ExitStack() as closing:  # all of them, whatever one of them says
            if self._home is not None:
                closing.callback(self._home.close)
            for place in self._places:
                closing.callback(place.close)
        with self._lock:  # what is mapped stays in memory as long as somebody has it
            self._spare = None
            if self._wanted is not None:
                self._wanted.files = None

    def _each(self, fn: Callable[..., T], things: list, rows: int) -> list[T]:
        """fn of each thing, each at one vLLM at a time, in order; one result for each."""
        width = max(1, self._rows // rows) * len(self._places)
        given_up = Event()
        pool = ThreadPoolExecutor(max(1, min(width, len(things), THREADS)), "jaxmoe-vllm")
        try:
            jobs = [pool.submit(self._persist, partial(fn, thing), given_up) for thing in things]
            return [job.result() for job in jobs]
        finally:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _persist(self, fn: Callable[[Replica, TargetWeights], T], given_up: Event) -> T:
        why: list[str] = []
        for attempt in range(self._vllm.retries + 1):
            if given_up.is_set() or self._closed.is_set():
                raise EngineError("the engine was closed, or another request was given up")
            wanted, place = self._loaded(), self._pick()
            seen = place.generation
            try:
                return fn(place, wanted)
            except Unanswered as error:
                why.append(str(error))
                place.note(str(error))
            finally:
                with self._lock:
                    place.asked -= 1
            if self._closed.is_set():
                continue
            place.recover(seen, self._loaded())
            backoff(attempt)
        raise place.lost(f"a request was not answered: {why[-1]}")

    def _pick(self) -> Replica:
        with self._lock:
            place = min(self._places, key=lambda p: p.asked)
            place.asked += 1
            return place

    def _loaded(self) -> TargetWeights:
        if self._wanted is None:
            raise ValueError("the engine must have weights before it samples: call load() first.")
        return self._wanted

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        self._loaded()
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
        return [
            (HttpBackend(url, timeout_s=vllm.request_timeout_s, connections=rows), None)
            for url in vllm.urls
        ]
    if vllm.launch == 0:
        from jaxmoe.vllm.in_process import InProcess

        return [(InProcess(cfg, vllm, work=work, context=context, rows=rows), None)]
    servers = [
        Server(vllm, cfg, work=work, number=n, context=context, rows=rows)
        for n in range(vllm.launch)
    ]
    pool = ThreadPoolExecutor(len(servers))
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
    """What a vLLM can hold. Raises ConfigError where it is too little, or nobody is there."""
    try:
        has = backend.context()
    except Unanswered as error:
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
