# SPDX-License-Identifier: Apache-2.0
"""The native engine: jitted prefill and decode over the trainer's own forward.

Decode returns to the host when a quarter of the rows is still alive, and goes on with a batch of
that size, so finished rows stop costing. Next: jaxmoe/rollout/decoding.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.model import Ops
from jaxmoe.model.params import cast_for_forward
from jaxmoe.observe.profiling import compilations
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.processes import gather_to_hosts
from jaxmoe.parallel.sharding import (
    batch_sharding,
    count_shards,
    param_shardings,
    sampling_rules,
    shard_batch,
)
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason
from jaxmoe.rollout.decoding import (
    DecodeState,
    decode_tokens,
    init_rows,
    prefill_prompts,
    repeat_rows,
    select_rows,
)
from jaxmoe.shapes import Leaf, Params

SHRINK_FACTOR = 4  # rows are dropped from the batch when at most 1/SHRINK of them are alive
MIN_BATCH_ROWS = 8  # no batch is made smaller than this
MIN_PROMPT_TOKENS = 32  # prompts are padded to the next power of two from here


class NativeEngine:
    """Samples with the trainer's own forward; `compilations()` counts what jit has built.

    With `keep_experts` a rollout carries the experts of its tokens. On a mesh each device has rows
    of its own, and keeps them until the last row of the wave has ended.
    """

    incidents: Sequence[str] = ()  # it fails for good or not at all

    def __init__(
        self, cfg: ModelConfig, ops: Ops, *, max_prompt_tokens: int, max_new_tokens: int,
        max_rows: int, keep_experts: bool = False, mesh: Mesh | None = None,
    ) -> None:  # fmt: skip
        self._cfg, self._max_rows, self._max_new = cfg, max_rows, max_new_tokens
        self._rules = rules = sampling_rules(cfg)
        self._mesh, self._shards = mesh, count_shards(mesh, rules.rows)
        ops = sharded_ops(ops, mesh, cfg, rules)
        self._keep_experts = keep_experts
        self._longest = _round_up_to_bucket(max_prompt_tokens, MIN_PROMPT_TOKENS)
        slots = self._longest + max_new_tokens
        self._prefill = jax.jit(
            partial(prefill_prompts, cfg=cfg, ops=ops, slots=slots, keep_experts=keep_experts)
        )
        self._decode = jax.jit(
            partial(decode_tokens, cfg=cfg, ops=ops), static_argnames=("top_k", "top_p", "enough"),
            donate_argnums=1,
        )  # fmt: skip
        # a partial of its own, or engines would share one cache and count each other's programs
        self._repeat = jax.jit(partial(repeat_rows), static_argnames="samples")
        self._compact = jax.jit(partial(select_rows))
        self._read = partial(cast_for_forward, cfg=cfg)
        if mesh is not None:
            to = param_shardings(cfg, mesh, rules)
            self._read = jax.jit(self._read, out_shardings=to)
        self._loaded: tuple[Params, int] | None = None  # one thing, so that a thread reads both
        self._closed = False

    def share_base(self, base: Params) -> None:
        """Weights that nobody changes or donates: loaded ones that are these arrays are not copied.

        They must be as the forward reads them.
        """
        self._read = partial(cast_for_forward, cfg=self._cfg, shared=base)

    def load(self, params: Params, version: int) -> None:
        """A copy of these weights as the trainer's forward reads them: it donates its own.

        A generate() that runs in another thread goes on with the weights it began with.
        """
        self._loaded = self._read(params), version

    def close(self) -> None:
        """Ends a generate() that runs in another thread, when it next returns from the device."""
        self._closed = True

    def count_compilations(self) -> int:
        """Programs compiled so far; a run needs a handful, whatever its length."""
        jitted = (self._prefill, self._decode, self._repeat, self._compact)
        return sum(compilations(f) for f in jitted)

    def prompts_per_batch(self, samples: int) -> int:
        """Prompts of a wave; each device has as many."""
        return prompts_per_batch(self._max_rows, samples, self._shards)

    def compile_programs(
        self, make: Callable[..., Any], sampling: Sampling, params: Params, *, samples: int
    ) -> tuple[Any, Any]:
        """Prefill and decode of a whole wave of the longest prompts, as `generate` runs them.

        `make(jitted, *shapes, **static)` compiles, for devices that need not be here; `params` are
        the shapes of the weights that the trainer hands on.
        """
        width, cfg, mesh = self.prompts_per_batch(samples), self._cfg, self._mesh

        def lie(tree: Leaf, at: Leaf) -> Leaf:
            return jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, at
            )

        def cut(tree: Leaf) -> Leaf:
            if (on := mesh) is None:
                return tree
            return lie(tree, jax.tree.map(lambda x: batch_sharding(on, x.ndim, self._rules), tree))

        def results(made: Any) -> Any:
            return lie(made.out_info, made.output_shardings)

        params = jax.eval_shape(partial(cast_for_forward, cfg=cfg), params)
        if mesh is not None:
            params = lie(params, param_shardings(cfg, mesh, self._rules))
        rows = width * samples
        shapes = [((width, self._longest), jnp.int32), ((width,), jnp.int32)]
        shapes += [((rows, cfg.d_model), jnp.dtype(cfg.dtype)), ((rows,), jnp.int32)]
        shapes += [((rows,), jnp.bool_), ((rows, 2), jnp.uint32)]
        shapes += [((len(sampling.stop_ids),), jnp.int32), ((), jnp.float32)]
        tokens, lengths, *fresh, stop_ids, temperature = (
            jax.ShapeDtypeStruct(*shape) for shape in shapes
        )
        first = make(self._prefill, params, *cut((tokens, lengths)))
        cache, _, read = results(first)
        if samples > 1:
            cache = results(make(self._repeat, cache, samples=samples))
        state = cut(jax.eval_shape(partial(init_rows, sampling=sampling), *fresh, read))
        each = make(
            self._decode, params, replace(state, cache=cache), stop_ids, temperature,
            top_k=sampling.top_k, top_p=sampling.top_p, enough=0,
        )  # fmt: skip
        return first, each

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int = 1
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt, side by side; the same seed gives the same tokens.

        Raises ConfigError for a prompt or a budget longer than the engine was built for, an empty
        prompt, or token ids that the model does not have.
        """
        if self._loaded is None:
            raise ValueError("the engine must have weights before it samples: call load() first.")
        if sampling.max_new_tokens > self._max_new:
            raise ConfigError(
                f"sampling.max_new_tokens ({sampling.max_new_tokens}) must be at most the "
                f"engine's ({self._max_new}). Try --set rollout.max_new_tokens="
                f"{sampling.max_new_tokens}."
            )
        if sampling.temperature <= 0.0:  # the most likely token is never cut off
            sampling = replace(sampling, top_k=0, top_p=1.0)
        params, version = self._loaded  # of all its tokens, whatever is loaded meanwhile
        # an embedding that waits on the host is on the device for these rollouts
        loaded = jax.tree.map(jnp.asarray, params), version
        per_wave = self.prompts_per_batch(samples)
        done: list[Rollout] = []
        for start in range(0, len(prompts), per_wave):
            wave = prompts[start : start + per_wave]
            done += self._generate_batch(loaded, wave, sampling, seed, samples, per_wave, start)
        return done

    def _generate_batch(
        self, loaded: tuple[Params, int], prompts: Sequence[Prompt], sampling: Sampling, seed: int,
        samples: int, width: int, first: int,
    ) -> list[Rollout]:  # fmt: skip
        params, version = loaded
        rows, budget, read = self._prefill_batch(
            params, prompts, sampling, seed, samples, width, first
        )
        n = len(prompts) * samples
        tokens = np.zeros((n, budget), np.int32)
        logp = np.zeros((n, budget), np.float32)
        log_kept = None if rows.log_kept_BT is None else np.zeros((n, budget), np.float32)
        experts = None
        if rows.experts_BTLA is not None:
            experts = np.zeros((n, *rows.experts_BTLA.shape[1:]), rows.experts_BTLA.dtype)
        original = np.arange(width * samples)  # of each row still in the batch
        stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)
        while True:
            if self._closed:
                raise EngineError("the engine was closed while it sampled.")
            size = len(original)
            # rows of another device are no closer than new ones: a mesh keeps them as they are
            smaller = max(MIN_BATCH_ROWS, -(-size // SHRINK_FACTOR)) if self._mesh is None else size
            enough = smaller if smaller < size else 0
            rows = self._decode(
                params, rows, stop_ids, jnp.float32(sampling.temperature),
                top_k=sampling.top_k, top_p=sampling.top_p, enough=enough,
            )  # fmt: skip
            real = original < n
            tokens[original[real]] = gather_to_hosts(rows.tokens_BT)[real]
            logp[original[real]] = gather_to_hosts(rows.logp_BT)[real]
            if log_kept is not None:
                log_kept[original[real]] = gather_to_hosts(rows.log_kept_BT)[real]
            if experts is not None:
                experts[original[real]] = gather_to_hosts(rows.experts_BTLA)[real]
            alive = np.flatnonzero(gather_to_hosts(rows.alive_B))
            if int(rows.column) == budget or alive.size == 0:
                break
            keep = np.concatenate([alive, np.setdiff1d(np.arange(size), alive)])[:smaller]
            rows = self._compact(rows, jnp.asarray(keep, jnp.int32))
            original = original[keep]
        return [
            self._make_rollout(
                prompts[i // samples], tokens[i], logp[i],
                None if log_kept is None else log_kept[i], sampling, version,
                None if experts is None else (read[i // samples], experts[i]),
            )
            for i in range(n)
        ]  # fmt: skip

    def _prefill_batch(
        self, params: Params, prompts: Sequence[Prompt], sampling: Sampling, seed: int,
        samples: int, width: int, first: int,
    ) -> tuple[DecodeState, int, np.ndarray]:  # fmt: skip
        """The rows before the first token, its budget, and the experts of each prompt's tokens."""
        for prompt in prompts:
            _check_prompt(prompt, self._cfg.vocab_size)
        longest = max(len(p.tokens) for p in prompts)
        if longest > self._longest:
            raise ConfigError(
                f"prompts must have at most data.max_prompt_tokens tokens, got one of {longest}. "
                f"Try --set data.max_prompt_tokens={longest}."
            )
        time = _round_up_to_bucket(longest, MIN_PROMPT_TOKENS)
        tokens = np.zeros((width, time), np.int32)
        lengths = np.ones(width, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.tokens)] = prompt.tokens
            lengths[row] = len(prompt.tokens)
        placed = shard_batch((jnp.asarray(tokens), jnp.asarray(lengths)), self._mesh, self._rules)
        cache, hidden, read = self._prefill(params, *placed)
        repeat = np.repeat(np.arange(width), samples)
        if samples > 1:
            cache = self._repeat(cache, samples=samples)
        ids = np.arange(width * samples, dtype=np.uint32) + np.uint32(first * samples)
        streams = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.asarray(ids))
        state = init_rows(
            hidden[repeat], jnp.asarray(lengths[repeat]), jnp.asarray(repeat < len(prompts)),
            jax.random.key_data(streams), read, sampling,
        )  # fmt: skip
        state = replace(shard_batch(state, self._mesh, self._rules), cache=cache)
        return state, sampling.max_new_tokens, gather_to_hosts(read)

    def _make_rollout(
        self, prompt: Prompt, tokens: np.ndarray, logp: np.ndarray,
        log_kept: np.ndarray | None, sampling: Sampling, version: int,
        experts: tuple[np.ndarray, np.ndarray] | None,
    ) -> Rollout:  # fmt: skip
        stops = np.flatnonzero(np.isin(tokens, sampling.stop_ids))
        end = stops[0] + 1 if stops.size else len(tokens)
        reason = StopReason.STOP_TOKEN if stops.size else StopReason.MAX_TOKENS
        return Rollout(
            prompt, tokens[:end].copy(), logp[:end].copy(), reason,
            np.full(end, version, np.int32),
            None if log_kept is None else log_kept[:end].copy(),
            None if experts is None
            else np.concatenate([experts[0][: len(prompt.tokens)], experts[1][: end - 1]]),
        )  # fmt: skip


def prompts_per_batch(max_rows: int, samples: int, shards: int) -> int:
    """Of a wave, as many on each of the devices with rows of their own, and at least one."""
    return max(shards, max_rows // samples // shards * shards)


def _check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """Raises ConfigError for what a forward would read as something else, without an error."""
    if not len(prompt.tokens):
        raise ConfigError(
            f"prompt {prompt.id} must have at least one token, got none: the first answer token "
            "would have nothing before it to be predicted from. Begin it with a start token."
        )
    bad = [token for token in prompt.tokens if not 0 <= token < vocab_size]
    if bad:
        raise ConfigError(
            f"prompt {prompt.id}: token ids must be from 0 to {vocab_size - 1} "
            f"(model.vocab_size), got {bad[0]}. Use the model's tokenizer."
        )


def _round_up_to_bucket(length: int, smallest: int) -> int:
    size = smallest
    while size < length:
        size *= 2
    return size
