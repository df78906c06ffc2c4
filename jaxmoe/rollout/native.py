# SPDX-License-Identifier: Apache-2.0
"""The native engine: jitted prefill and decode over the trainer's forward.

Next: jaxmoe/rollout/native_turns.py samples a batch; jaxmoe/rollout/decoding.py has the programs.
"""

import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.distributed.processes import gather_to_hosts
from jaxmoe.model import Ops
from jaxmoe.model.params import cast_for_forward
from jaxmoe.model.prompt_keys import merges_parts
from jaxmoe.observe.profiling import count_compilations
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import (
    count_shards,
    param_shardings,
    sampling_rules,
    shard_batch,
)
from jaxmoe.records import Prompt, Rollout, Sampling
from jaxmoe.rollout.cache_rows import repeat_rows, share_prompt_keys
from jaxmoe.rollout.decoding import (
    DecodeState,
    append_tokens,
    decode_tokens,
    init_rows,
    place_rows,
    prefill_prompts,
    restart_rows,
    restore_rows,
    select_rows,
)
from jaxmoe.rollout.engine import Engine
from jaxmoe.rollout.native_compile import compile_full_batch
from jaxmoe.rollout.native_prompts import (
    MIN_PROMPT_TOKENS,
    check_prompt,
    pad_tokens,
    prompt_slots,
    prompts_per_batch,
    round_up_to_bucket,
    shares_prompt_keys,
)
from jaxmoe.rollout.native_turns import NativeBatch, NativePrograms
from jaxmoe.rollout.replies import TokenEnvironment
from jaxmoe.rollout.turns import Episode, check_room
from jaxmoe.shapes import Params

MAX_APPEND_TOKENS = 128  # that one call reads of a reply; longer replies take several calls


class NativeEngine:
    """Samples with the trainer's forward.

    With `keep_experts` a rollout has the experts of its tokens. On a mesh each device has its own
    rows, and keeps them until the last row of the batch has ended. `max_context` is the limit of an
    episode of several turns in tokens; with 0 there are single answers only. `max_reply_tokens` of
    an environment, if known, saves padding; a longer reply takes several calls.
    """

    incidents: Sequence[str] = ()  # it never recovers from a fault

    def __init__(
        self,
        cfg: ModelConfig,
        ops: Ops,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        max_rows: int,
        keep_experts: bool = False,
        mesh: Mesh | None = None,
        max_context: int = 0,
        max_reply_tokens: int = 0,
    ) -> None:
        self._cfg, self._max_rows, self._max_new = cfg, max_rows, max_new_tokens
        self._max_context = max_context
        self._rules = rules = sampling_rules(cfg)
        self._mesh, self._shards = mesh, count_shards(mesh, rules.rows)
        self._merges_parts = merges_parts(ops.decode)
        ops = sharded_ops(ops, mesh, cfg, rules)
        # All caches have one size, so that decode is compiled for one number of slots.
        self._longest = prompt_slots(max_prompt_tokens)
        self.slots = max_context or self._longest + max_new_tokens
        prefill = partial(
            prefill_prompts, cfg=cfg, ops=ops, slots=self.slots, keep_experts=keep_experts
        )
        self._prefill = jax.jit(
            partial(prefill, slots_per_row=max_context > 0), static_argnames="full_slots"
        )
        # For rows that are refilled one by one (native_flow.py); compiled where they are.
        self.prefill_rows = jax.jit(partial(prefill, slots_per_row=True))
        self.place_rows = jax.jit(partial(place_rows), donate_argnums=0)
        decode = jax.jit(
            partial(decode_tokens, cfg=cfg, ops=ops),
            static_argnames=("top_k", "top_p", "enough"),
            # The state has the cache, which should not exist twice.
            donate_argnums=1,
        )
        # New partials, because engines would otherwise share jit's cache and count the programs of
        # each other.
        self._repeat = jax.jit(partial(repeat_rows), static_argnames="samples")
        self._share = jax.jit(
            partial(share_prompt_keys, cfg=cfg, slots=max_new_tokens, mesh=mesh, rules=rules),
            static_argnames="samples",
        )
        self._programs = NativePrograms(
            decode,
            jax.jit(partial(select_rows)),
            jax.jit(partial(restore_rows), donate_argnums=0),
            jax.jit(partial(append_tokens, cfg=cfg, ops=ops), donate_argnums=1),
            jax.jit(partial(restart_rows), donate_argnums=0),
        )
        # One length, so that the appends of a run are one program for each size of the batch.
        self._append_tokens = (
            round_up_to_bucket(min(max_reply_tokens + 1, MAX_APPEND_TOKENS), MIN_PROMPT_TOKENS)
            if max_reply_tokens
            else MAX_APPEND_TOKENS
        )
        self._read = partial(cast_for_forward, cfg=cfg)
        if mesh is not None:
            shardings = param_shardings(cfg, mesh, rules)
            self._read = jax.jit(self._read, out_shardings=shardings)
        # One tuple, so that a thread reads a consistent pair.
        self._loaded: tuple[Params, int] | None = None
        self._closed = Event()

    def share_base(self, base: Params) -> None:
        """Declare weights that are never changed or donated, so that load() does not copy them.

        They must be in the dtypes that the forward reads.
        """
        self._read = partial(cast_for_forward, cfg=self._cfg, shared=base)

    def load(self, params: Params, version: int) -> None:
        """Copy these weights in the dtypes of the forward, since the trainer donates its own.

        A generate() in another thread continues with the weights that it started with.
        """
        self._loaded = self._read(params), version

    def pin(self) -> Engine:
        """Return this engine with its present weights, to sample one prompt at a time.

        Both have the same programs, and end together.
        """
        pinned = copy(self)
        pinned._max_rows = 0  # a batch then has one prompt for each device
        return pinned

    def close(self) -> None:
        """End a generate() in another thread when it next returns from the device."""
        self._closed.set()

    def is_closed(self) -> bool:
        return self._closed.is_set()

    def count_compilations(self) -> int:
        """Number of programs compiled so far; it does not grow with the length of a run."""
        jitted = (
            self._prefill,
            self.prefill_rows,
            self.place_rows,
            self._repeat,
            self._share,
            *vars(self._programs).values(),
        )
        return sum(count_compilations(f) for f in jitted)

    def prompts_per_batch(self, samples: int) -> int:
        """Number of prompts of a batch, divided evenly among the devices."""
        return prompts_per_batch(self._max_rows, samples, self._shards)

    def _shares_prompts(self, samples: int) -> bool:
        return self._merges_parts and shares_prompt_keys(
            self._cfg, self._longest, self._max_new, samples, is_episode=self._max_context > 0
        )

    def compile_programs(
        self, make: Callable[..., Any], sampling: Sampling, params: Params, *, samples: int
    ) -> tuple[Any, Any]:
        """Compile prefill and decode of a full batch; see `compile_full_batch`."""
        shares = self._shares_prompts(samples)
        return compile_full_batch(
            make,
            sampling,
            params,
            prefill=self._prefill,
            repeat=self._share if shares else self._repeat,
            decode=self._programs.decode,
            cfg=self._cfg,
            mesh=self._mesh,
            rules=self._rules,
            prompts=self.prompts_per_batch(samples),
            samples=samples,
            longest=self._longest,
            full_slots=self._longest if shares else self.slots,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        samples: int = 1,
        environment: TokenEnvironment | None = None,
    ) -> list[Rollout]:
        """Return `samples` rollouts of each prompt, as neighbours; equal seeds give equal tokens.

        Raises ConfigError for a prompt or an answer length above the engine's limits, an empty
        prompt, or token ids outside the vocabulary.
        """
        sampling = self.check_sampling(sampling, environment)
        # Read once and used for all tokens, even if another thread calls load() in between.
        loaded = to_device(self.read_loaded())
        per_batch = self.prompts_per_batch(samples)
        rollouts: list[Rollout] = []
        for start in range(0, len(prompts), per_batch):
            batch = self._open_batch(
                loaded,
                prompts[start : start + per_batch],
                sampling,
                seed,
                samples,
                per_batch,
                start,
            )
            rollouts += (
                batch.sample_answers()
                if environment is None
                else batch.sample_episodes(environment, start * samples)
            )
        return rollouts

    def read_loaded(self) -> tuple[Params, int]:
        """Return the newest weights and their version."""
        if self._loaded is None:
            raise ValueError("the engine must have weights before it samples: call load() first.")
        return self._loaded

    def check_sampling(self, sampling: Sampling, environment: TokenEnvironment | None) -> Sampling:
        """Return the sampling as the programs take it; raise ConfigError above the limits."""
        if sampling.max_new_tokens > self._max_new:
            raise ConfigError(
                f"sampling.max_new_tokens ({sampling.max_new_tokens}) must be at most the "
                f"engine's ({self._max_new}). Try --set rollout.max_new_tokens="
                f"{sampling.max_new_tokens}."
            )
        if environment is not None and not self._max_context:
            raise ConfigError(
                "episodes with an environment need an engine with a limit for all their tokens. "
                "Try --set rollout.max_context=4096."
            )
        # Keys beyond the last slot would be dropped without an error.
        if 0 < self._max_context < sampling.max_context:
            raise ConfigError(
                f"sampling.max_context ({sampling.max_context}) must be at most the engine's "
                f"({self._max_context}). Try --set rollout.max_context={sampling.max_context}."
            )
        # Greedy answers take the most likely token, which top-k and top-p never exclude.
        if sampling.temperature <= 0.0:
            sampling = replace(sampling, top_k=0, top_p=1.0)
        return sampling

    def open_episodes(
        self, prompts: Sequence[Prompt], sampling: Sampling, samples: int
    ) -> list[Episode]:
        """Return `samples` episodes of each prompt; raise ConfigError for one that does not fit."""
        for prompt in prompts:
            check_prompt(prompt, self._cfg.vocab_size)
        longest = max(len(p.tokens) for p in prompts)
        if longest > self._longest:
            raise ConfigError(
                f"prompts must have at most data.max_prompt_tokens tokens, got one of {longest}. "
                f"Try --set data.max_prompt_tokens={longest}."
            )
        limit = sampling.max_context or self._max_context or sys.maxsize
        episodes = [Episode(prompt, sampling, limit) for prompt in prompts for _ in range(samples)]
        check_room(episodes)
        return episodes

    def open_rows(
        self,
        loaded: tuple[Params, int],
        sampling: Sampling,
        rows: DecodeState,
        episodes: dict[int, Episode],
    ) -> NativeBatch:
        """Return a batch of these rows, for which the engine has the programs."""
        return NativeBatch(
            self._programs,
            *loaded,
            sampling,
            rows,
            episodes,
            self._append_tokens,
            self._mesh,
            self._rules,
            self.is_closed,
        )

    def _open_batch(
        self,
        loaded: tuple[Params, int],
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        samples: int,
        width: int,
        first: int,
    ) -> NativeBatch:
        """Prefill the prompts; `first` is the index of the first one among all prompts."""
        episodes = self.open_episodes(prompts, sampling, samples)
        limits = np.zeros(width * samples, np.int32)
        limits[: len(episodes)] = [episode.turn_limit for episode in episodes]
        rows, prompt_experts = self._prefill_batch(
            loaded, prompts, sampling, seed, samples, width, first, limits
        )
        if rows.experts_BTLA is not None:
            for i, episode in enumerate(episodes):
                n = len(episode.prompt.tokens)
                episode.add_experts(prompt_experts[i // samples][:n])
        return self.open_rows(loaded, sampling, rows, dict(enumerate(episodes)))

    def _prefill_batch(
        self,
        loaded: tuple[Params, int],
        prompts: Sequence[Prompt],
        sampling: Sampling,
        seed: int,
        samples: int,
        width: int,
        first: int,
        limit_B: np.ndarray,
    ) -> tuple[DecodeState, np.ndarray]:
        """Return rows before their first token, and the prompts' experts."""
        tokens, lengths = pad_tokens(
            [p.tokens for p in prompts], width, min(self._longest, self.slots)
        )
        placed = shard_batch((jnp.asarray(tokens), jnp.asarray(lengths)), self._mesh, self._rules)
        params, version = loaded
        shares = self._shares_prompts(samples)
        cache, hidden, prompt_experts = self._prefill(
            params,
            *placed,
            jnp.int32(version),
            jnp.float32(sampling.explores),
            full_slots=self._longest if shares else self.slots,
        )
        repeat = np.repeat(np.arange(width), samples)
        if samples > 1:
            cache = (self._share if shares else self._repeat)(cache, samples=samples)
        # A random stream belongs to the number of an answer among all answers, and not to its
        # batch, so that max_parallel_sequences does not change the tokens.
        streams_B2 = random_streams(seed, first * samples, width * samples)
        state = init_rows(
            hidden[repeat],
            jnp.asarray(lengths[repeat]),
            jnp.asarray(repeat < len(prompts)),
            streams_B2,
            jnp.asarray(limit_B),
            prompt_experts,
            sampling,
        )
        state = replace(shard_batch(state, self._mesh, self._rules), cache=cache)
        return state, gather_to_hosts(prompt_experts)


def to_device(loaded: tuple[Params, int]) -> tuple[Params, int]:
    """Return the weights without an embedding in host memory, which is copied to the device."""
    params, version = loaded
    return jax.tree.map(jnp.asarray, params), version


def random_streams(seed: int, first: int, count: int) -> jax.Array:
    """Return uint32 [B, 2]: the random streams of the answers from number `first` on."""
    ids = np.arange(count, dtype=np.uint32) + np.uint32(first)
    streams = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.asarray(ids))
    return jax.random.key_data(streams)
