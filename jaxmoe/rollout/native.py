# SPDX-License-Identifier: Apache-2.0
"""The native engine: jitted prefill and decode over the trainer's own forward.

A prompt is prefilled once and its cache rows repeated for its samples. Decode is one
`while_loop` on the device; it returns to the host when a quarter of the rows is still alive, and
goes on with a batch of that size, so finished rows stop costing. Each row draws from its own
random stream, so its tokens do not depend on what else is in the batch.
Next: jaxmoe/model/forward.py.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.model import KVCache, Ops, forward, init_cache, next_token_logits
from jaxmoe.model.cache import write_slots
from jaxmoe.model.params import as_read
from jaxmoe.observe.profiling import compilations
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.processes import on_hosts
from jaxmoe.parallel.sharding import SAMPLING, param_shardings, place, shards_of
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason, expert_dtype
from jaxmoe.rollout.sampling import draw, keep_top, log_kept_mass
from jaxmoe.shapes import Leaf, Params

SHRINK = 4  # rows are dropped from the batch when at most 1/SHRINK of them are alive
SMALLEST = 8  # no batch is made smaller than this
SHORTEST = 32  # prompts are padded to the next power of two from here


@struct.dataclass
class DecodeState:
    """The sequences being decoded; B rows, T = max_new_tokens columns."""

    cache: Leaf  # KVCache
    hidden_BD: Leaf  # of the last token: the next one is drawn from it
    position_B: Leaf  # of the next token
    alive_B: Leaf
    stream_B2: Leaf  # uint32 key data, one random stream a row
    tokens_BT: Leaf
    logp_BT: Leaf
    column: Leaf  # int32 []: the next column to fill, alike in all rows
    log_kept_BT: Leaf = None  # only where top-k or top-p cut something off
    experts_BTLA: Leaf = None  # of each token drawn, where they are kept; the last column is empty


def prefill(
    params: Params, tokens_BT: Array, lengths_B: Array, *, cfg: ModelConfig, ops: Ops, slots: int,
    keep_experts: bool,
) -> tuple[KVCache, Array, Array | None]:  # fmt: skip
    """The cache of right-padded prompts, the hidden state of each one's last token, experts."""
    segments_BT = (jnp.arange(tokens_BT.shape[1])[None] < lengths_B[:, None]).astype(jnp.int32)
    cache = init_cache(cfg, tokens_BT.shape[0], slots)
    hidden_BTD, cache, experts_LBTA = forward(
        params, tokens_BT, cfg, ops, segment_ids_BT=segments_BT, cache=cache
    )
    last_B11 = (lengths_B - 1)[:, None, None]
    assert cache is not None
    experts_BTLA = batch_first(experts_LBTA, cfg) if keep_experts else None
    return cache, jnp.take_along_axis(hidden_BTD, last_B11, axis=1)[:, 0], experts_BTLA


def batch_first(experts_LBTA: Array, cfg: ModelConfig) -> Array:
    """What a forward recorded, as rollouts carry it."""
    return jnp.moveaxis(experts_LBTA, 0, 2).astype(expert_dtype(cfg.n_experts))


def repeat_rows(cache: KVCache, samples: int) -> KVCache:
    """The cache with `samples` of each row, side by side."""

    def kind(k):
        return replace(
            k, k=jnp.repeat(k.k, samples, axis=1), v=jnp.repeat(k.v, samples, axis=1),
            positions_BC=jnp.repeat(k.positions_BC, samples, axis=0),
            segments_BC=jnp.repeat(k.segments_BC, samples, axis=0),
        )  # fmt: skip

    return replace(cache, sliding=kind(cache.sliding), full=kind(cache.full))


def take_rows(cache: KVCache, rows: Array) -> KVCache:
    """The cache of these rows, repeated or dropped."""

    def kind(k):
        return replace(
            k, k=k.k[:, rows], v=k.v[:, rows],
            positions_BC=k.positions_BC[rows], segments_BC=k.segments_BC[rows],
        )  # fmt: skip

    return replace(cache, sliding=kind(cache.sliding), full=kind(cache.full))


def compact(rows: DecodeState, keep: Array) -> DecodeState:
    """These rows alone."""
    return replace(
        rows, cache=take_rows(rows.cache, keep), hidden_BD=rows.hidden_BD[keep],
        position_B=rows.position_B[keep], alive_B=rows.alive_B[keep],
        stream_B2=rows.stream_B2[keep], tokens_BT=rows.tokens_BT[keep], logp_BT=rows.logp_BT[keep],
        log_kept_BT=None if rows.log_kept_BT is None else rows.log_kept_BT[keep],
        experts_BTLA=None if rows.experts_BTLA is None else rows.experts_BTLA[keep],
    )  # fmt: skip


def decode(
    params: Params,
    rows: DecodeState,
    stop_ids: Array,
    temperature: Array,
    *,
    cfg: ModelConfig,
    ops: Ops,
    top_k: int,
    top_p: float,
    enough: int,
) -> DecodeState:
    """Draw tokens until the columns are full or at most `enough` rows are alive."""

    def pick(rows: DecodeState) -> tuple[DecodeState, Array]:
        greedy = temperature <= 0.0
        all_BV = next_token_logits(
            params, rows.hidden_BD, cfg, ops, jnp.where(greedy, 1.0, temperature)
        )
        keys = jax.random.wrap_key_data(rows.stream_B2)
        uniform_B = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, rows.column)))(keys)
        logits_BV = keep_top(all_BV, top_k=top_k, top_p=top_p)
        token_B, logp_B = draw(logits_BV, uniform_B, greedy=greedy)
        token_B = jnp.where(rows.alive_B, token_B, 0)
        stopped_B = jnp.any(token_B[:, None] == stop_ids[None], axis=1)
        zero = jnp.zeros((), jnp.int32)
        at = (zero, rows.column)
        log_kept_BT = rows.log_kept_BT
        if log_kept_BT is not None:
            log_kept_B1 = log_kept_mass(logits_BV, all_BV)[:, None]
            log_kept_BT = lax.dynamic_update_slice(log_kept_BT, log_kept_B1, at)
        return replace(
            rows,
            tokens_BT=lax.dynamic_update_slice(rows.tokens_BT, token_B[:, None], at),
            logp_BT=lax.dynamic_update_slice(rows.logp_BT, logp_B[:, None], at),
            log_kept_BT=log_kept_BT,
            alive_B=rows.alive_B & ~stopped_B,
            column=rows.column + 1,
        ), token_B

    def body(rows: DecodeState) -> DecodeState:
        rows, token_B = pick(rows)
        hidden_BTD, cache, experts_LBTA = forward(
            params,
            token_B[:, None],
            cfg,
            ops,
            positions_BT=rows.position_B[:, None],
            segment_ids_BT=rows.alive_B[:, None].astype(jnp.int32),
            cache=rows.cache,
        )
        experts_BTLA = rows.experts_BTLA
        if experts_BTLA is not None:  # of the token in the column that was just filled
            experts_BTLA = write_slots(
                experts_BTLA, batch_first(experts_LBTA, cfg), rows.column - 1
            )
        return replace(
            rows, cache=cache, hidden_BD=hidden_BTD[:, 0], position_B=rows.position_B + 1,
            experts_BTLA=experts_BTLA,
        )  # fmt: skip

    last = rows.tokens_BT.shape[1] - 1

    def goes_on(rows: DecodeState) -> Array:
        return (rows.column < last) & (jnp.sum(rows.alive_B.astype(jnp.int32)) > enough)

    def finish(rows: DecodeState) -> DecodeState:
        return replace(pick(rows)[0], cache=None, hidden_BD=None)

    rows = lax.while_loop(goes_on, body, rows)
    # the last column needs no forward after it; the cache stays out of `cond`, which would copy it
    light = replace(rows, cache=None, hidden_BD=None)
    final = lax.cond(rows.column == last, lambda: finish(rows), lambda: light)
    return replace(final, cache=rows.cache, hidden_BD=rows.hidden_BD)


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
        self._mesh, self._shards = mesh, shards_of(mesh, SAMPLING.rows)
        ops = sharded_ops(ops, mesh, cfg, SAMPLING)
        self._keep_experts = keep_experts
        self._longest = _bucket(max_prompt_tokens, SHORTEST)
        slots = self._longest + max_new_tokens
        self._prefill = jax.jit(
            partial(prefill, cfg=cfg, ops=ops, slots=slots, keep_experts=keep_experts)
        )
        self._decode = jax.jit(
            partial(decode, cfg=cfg, ops=ops), static_argnames=("top_k", "top_p", "enough"),
            donate_argnums=1,
        )  # fmt: skip
        # a partial of its own, or engines would share one cache and count each other's programs
        self._repeat = jax.jit(partial(repeat_rows), static_argnames="samples")
        self._compact = jax.jit(partial(compact))
        self._read = partial(as_read, cfg=cfg)
        if mesh is not None:
            to = param_shardings(cfg, mesh, SAMPLING)
            self._read = jax.jit(self._read, out_shardings=to)
        self._loaded: tuple[Params, int] | None = None  # one thing, so that a thread reads both
        self._closed = False

    def load(self, params: Params, version: int) -> None:
        """A copy of these weights as the trainer's forward reads them: it donates its own.

        A generate() that runs in another thread goes on with the weights it began with.
        """
        self._loaded = self._read(params), version

    def close(self) -> None:
        """Ends a generate() that runs in another thread, when it next returns from the device."""
        self._closed = True

    def compilations(self) -> int:
        """Programs compiled so far; a run needs a handful, whatever its length."""
        jitted = (self._prefill, self._decode, self._repeat, self._compact)
        return sum(compilations(f) for f in jitted)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int, samples: int = 1
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt, side by side; the same seed gives the same tokens.

        Raises ConfigError for a prompt or a budget longer than the engine was built for.
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
        loaded = self._loaded  # of all its tokens, whatever is loaded meanwhile
        n = self._shards
        per_wave = max(n, self._max_rows // samples // n * n)
        done: list[Rollout] = []
        for start in range(0, len(prompts), per_wave):
            wave = prompts[start : start + per_wave]
            done += self._wave(loaded, wave, sampling, seed, samples, per_wave, start)
        return done

    def _wave(
        self, loaded: tuple[Params, int], prompts: Sequence[Prompt], sampling: Sampling, seed: int,
        samples: int, width: int, first: int,
    ) -> list[Rollout]:  # fmt: skip
        params, version = loaded
        rows, budget, read = self._start(params, prompts, sampling, seed, samples, width, first)
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
            smaller = max(SMALLEST, -(-size // SHRINK)) if self._mesh is None else size
            enough = smaller if smaller < size else 0
            rows = self._decode(
                params, rows, stop_ids, jnp.float32(sampling.temperature),
                top_k=sampling.top_k, top_p=sampling.top_p, enough=enough,
            )  # fmt: skip
            real = original < n
            tokens[original[real]] = on_hosts(rows.tokens_BT)[real]
            logp[original[real]] = on_hosts(rows.logp_BT)[real]
            if log_kept is not None:
                log_kept[original[real]] = on_hosts(rows.log_kept_BT)[real]
            if experts is not None:
                experts[original[real]] = on_hosts(rows.experts_BTLA)[real]
            alive = np.flatnonzero(on_hosts(rows.alive_B))
            if int(rows.column) == budget or alive.size == 0:
                break
            keep = np.concatenate([alive, np.setdiff1d(np.arange(size), alive)])[:smaller]
            rows = self._compact(rows, jnp.asarray(keep, jnp.int32))
            original = original[keep]
        return [
            self._rollout(
                prompts[i // samples], tokens[i], logp[i],
                None if log_kept is None else log_kept[i], sampling, version,
                None if experts is None else (read[i // samples], experts[i]),
            )
            for i in range(n)
        ]  # fmt: skip

    def _start(
        self, params: Params, prompts: Sequence[Prompt], sampling: Sampling, seed: int,
        samples: int, width: int, first: int,
    ) -> tuple[DecodeState, int, np.ndarray]:  # fmt: skip
        """The rows before the first token, its budget, and the experts of each prompt's tokens."""
        longest = max(len(p.tokens) for p in prompts)
        if longest > self._longest:
            raise ConfigError(
                f"prompts must have at most data.max_prompt_tokens tokens, got one of {longest}. "
                f"Try --set data.max_prompt_tokens={longest}."
            )
        time = _bucket(longest, SHORTEST)
        tokens = np.zeros((width, time), np.int32)
        lengths = np.ones(width, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.tokens)] = prompt.tokens
            lengths[row] = len(prompt.tokens)
        placed = place((jnp.asarray(tokens), jnp.asarray(lengths)), self._mesh, SAMPLING)
        cache, hidden, read = self._prefill(params, *placed)
        repeat = np.repeat(np.arange(width), samples)
        if samples > 1:
            cache = self._repeat(cache, samples=samples)
        ids = np.arange(width * samples, dtype=np.uint32) + np.uint32(first * samples)
        streams = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.asarray(ids))
        shape = width * samples, sampling.max_new_tokens
        cuts = sampling.top_k > 0 or sampling.top_p < 1.0
        state = DecodeState(
            cache=None,
            hidden_BD=hidden[repeat],
            position_B=jnp.asarray(lengths[repeat]),
            alive_B=jnp.asarray(repeat < len(prompts)),
            stream_B2=jax.random.key_data(streams),
            tokens_BT=jnp.zeros(shape, jnp.int32),
            logp_BT=jnp.zeros(shape, jnp.float32),
            column=jnp.zeros((), jnp.int32),
            log_kept_BT=jnp.zeros(shape, jnp.float32) if cuts else None,
            experts_BTLA=None if read is None else jnp.zeros(shape + read.shape[2:], read.dtype),
        )
        state = replace(place(state, self._mesh, SAMPLING), cache=cache)
        return state, shape[1], on_hosts(read)

    def _rollout(
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


def _bucket(length: int, smallest: int) -> int:
    size = smallest
    while size < length:
        size *= 2
    return size
