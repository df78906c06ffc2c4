# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode: pure functions over the trainer's forward, which an engine jits.

A prompt is prefilled once, for all its samples (cache_rows.py). Decode is one `while_loop` on the
device. Each row has its own random stream, so its tokens do not depend on the
other rows of the batch. Next: jaxmoe/model/forward.py.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array

from jaxmoe.config import ModelConfig
from jaxmoe.model import KVCache, Ops, forward, init_cache, next_token_logits
from jaxmoe.model.cache import own_slots, write_slots
from jaxmoe.model.head import sampled_logprobs
from jaxmoe.records import Sampling, expert_dtype
from jaxmoe.rollout.cache_rows import empty_rows, put_rows, take_rows
from jaxmoe.rollout.sampling import apply_top_k_top_p, log_kept_mass, sample_tokens
from jaxmoe.shapes import Leaf, Params


@struct.dataclass
class DecodeState:
    """The sequences being decoded; B rows, T columns for one turn of each."""

    cache: Leaf  # KVCache
    hidden_BD: Leaf  # of the last token, from which the next one is sampled
    position_B: Leaf  # of the next token
    alive_B: Leaf
    stream_B2: Leaf  # uint32 key data, one random stream per row
    tokens_BT: Leaf
    logp_BT: Leaf
    column: Leaf  # int32 []: the next column to fill, the same in all rows
    n_sampled_B: Leaf  # int32: tokens that the row sampled in earlier turns
    limit_B: Leaf  # int32: maximum number of tokens of the row in this turn
    log_kept_BT: Leaf = None  # log of the mass that top-k and top-p kept, if they are on
    experts_BTLA: Leaf = None  # of each sampled token, if recorded; the last column is empty


def init_rows(
    hidden_BD: Array,
    lengths_B: Array,
    alive_B: Array,
    stream_B2: Array,
    limit_B: Array,
    experts_BTLA: Array | None,
    sampling: Sampling,
) -> DecodeState:
    """Return rows before their first token, without a cache.

    Only the last two axes and the dtype of `experts_BTLA` are used.
    """
    shape = lengths_B.shape[0], sampling.max_turn_tokens or sampling.max_new_tokens
    is_truncated, read = sampling.top_k > 0 or sampling.top_p < 1.0, experts_BTLA
    return DecodeState(
        cache=None,
        hidden_BD=hidden_BD,
        position_B=lengths_B,
        alive_B=alive_B,
        stream_B2=stream_B2,
        tokens_BT=jnp.zeros(shape, jnp.int32),
        logp_BT=jnp.zeros(shape, jnp.float32),
        column=jnp.zeros((), jnp.int32),
        n_sampled_B=jnp.zeros(shape[0], jnp.int32),
        limit_B=limit_B,
        log_kept_BT=jnp.zeros(shape, jnp.float32) if is_truncated else None,
        experts_BTLA=None if read is None else jnp.zeros(shape + read.shape[2:], read.dtype),
    )


def prefill_prompts(
    params: Params,
    tokens_BT: Array,
    lengths_B: Array,
    step: Array,
    exploration: Array,
    *,
    cfg: ModelConfig,
    ops: Ops,
    slots: int,
    keep_experts: bool,
    slots_per_row: bool = False,
    full_slots: int | None = None,
) -> tuple[KVCache, Array, Array | None]:
    """Return the cache of right-padded prompts, the last token's hidden states, and the experts.

    `step` is the number of RL steps behind the params, `exploration` the scale of the router's
    noise. With `slots_per_row` the next tokens of a row are written over its padding, as
    `append_tokens` needs it; else behind the padding of all rows. `full_slots` as in `init_cache`.
    """
    segments_BT = (jnp.arange(tokens_BT.shape[1])[None] < lengths_B[:, None]).astype(jnp.int32)
    cache = init_cache(cfg, tokens_BT.shape[0], slots, full_slots)
    hidden_BTD, cache, recorded = forward(
        params,
        tokens_BT,
        cfg,
        ops,
        segment_ids_BT=segments_BT,
        cache=cache,
        step=step,
        exploration=exploration,
    )
    # Prompts are padded on the right, so a row's last token is not in the last column.
    last_B11 = (lengths_B - 1)[:, None, None]
    assert cache is not None
    if slots_per_row:
        cache = own_slots(cache, lengths_B)
    experts_BTLA = experts_batch_first(recorded["experts_BTA"], cfg) if keep_experts else None
    return cache, jnp.take_along_axis(hidden_BTD, last_B11, axis=1)[:, 0], experts_BTLA


def experts_batch_first(experts_LBTA: Array, cfg: ModelConfig) -> Array:
    """Convert experts that a forward recorded to the layout and dtype of rollouts."""
    return jnp.moveaxis(experts_LBTA, 0, 2).astype(expert_dtype(cfg.n_experts))


def select_rows(rows: DecodeState, keep: Array) -> DecodeState:
    """Return the rows with these indices."""
    arrays = {name: x[keep] for name, x in _row_arrays(rows).items()}
    return replace(rows, cache=take_rows(rows.cache, keep), **arrays)


def restore_rows(rows: DecodeState, part: DecodeState, keep: Array) -> DecodeState:
    """Return the rows with those at these indices replaced by those of `part`, and its column."""
    old, new = _row_arrays(rows), _row_arrays(part)
    arrays = {name: x.at[keep].set(new[name]) for name, x in old.items()}
    return replace(rows, cache=put_rows(rows.cache, part.cache, keep), column=part.column, **arrays)


def place_rows(
    rows: DecodeState,
    cache: KVCache,
    hidden_BD: Array,
    lengths_B: Array,
    sources: Array,
    places: Array,
    alive: Array,
    streams: Array,
) -> DecodeState:
    """Return the rows with those at `places` replaced by the prefilled ones with these indices.

    The results of `prefill_prompts`, with slots per row; places behind the last row are dropped.
    """
    return replace(
        rows,
        cache=put_rows(rows.cache, take_rows(cache, sources), places),
        hidden_BD=rows.hidden_BD.at[places].set(hidden_BD[sources]),
        position_B=rows.position_B.at[places].set(lengths_B[sources]),
        alive_B=rows.alive_B.at[places].set(alive),
        stream_B2=rows.stream_B2.at[places].set(streams),
    )


def restart_rows(rows: DecodeState, restarts_B: Array) -> DecodeState:
    """Return the rows, some of them with nothing in their cache: they read a new context."""
    return replace(rows, cache=empty_rows(rows.cache, restarts_B))


def _row_arrays(rows: DecodeState) -> dict[str, Array]:
    """The arrays whose first axis are the rows, by name."""
    arrays = {name: x for name, x in vars(rows).items() if name not in ("cache", "column")}
    return {name: x for name, x in arrays.items() if x is not None}


def append_tokens(
    params: Params,
    rows: DecodeState,
    tokens_BT: Array,
    lengths_B: Array,
    positions_B: Array,
    step: Array,
    exploration: Array,
    *,
    cfg: ModelConfig,
    ops: Ops,
) -> tuple[DecodeState, Array | None]:
    """Have rows read tokens that follow what they have read, and sample again.

    Returns the rows and the experts [B, T, L, A] of the tokens, if the rows record experts.
    `tokens_BT` are right-padded to `lengths_B`; a row of length 0 does not change. `positions_B`
    are the positions of the first tokens: the first one is the last token that was sampled, which
    no forward has read. The cache must have slots per row.
    """
    offsets_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    hidden_BTD, cache, recorded = forward(
        params,
        tokens_BT,
        cfg,
        ops,
        positions_BT=positions_B[:, None] + offsets_1T,
        segment_ids_BT=(offsets_1T < lengths_B[:, None]).astype(jnp.int32),
        cache=rows.cache,
        step=step,
        exploration=exploration,
    )
    reads_B = lengths_B > 0
    last_B11 = jnp.maximum(lengths_B - 1, 0)[:, None, None]
    hidden_BD = jnp.take_along_axis(hidden_BTD, last_B11, axis=1)[:, 0]
    keeps_experts = rows.experts_BTLA is not None
    return replace(
        rows,
        cache=cache,
        hidden_BD=jnp.where(reads_B[:, None], hidden_BD, rows.hidden_BD),
        position_B=jnp.where(reads_B, positions_B + lengths_B, rows.position_B),
        alive_B=rows.alive_B | reads_B,
    ), experts_batch_first(recorded["experts_BTA"], cfg) if keeps_experts else None


def decode_tokens(
    params: Params,
    rows: DecodeState,
    stop_ids: Array,
    temperature: Array,
    step: Array,
    exploration: Array,
    *,
    cfg: ModelConfig,
    ops: Ops,
    top_k: int,
    top_p: float,
    enough: int,
) -> DecodeState:
    """Sample tokens until all columns are full or at most `enough` rows are alive."""

    def sample_column(rows: DecodeState) -> tuple[DecodeState, Array]:
        greedy = temperature <= 0.0
        # Greedy answers have the temperature 0, by which the logits cannot be divided.
        sharpness = jnp.where(greedy, 1.0, temperature)
        all_BV = next_token_logits(params, rows.hidden_BD, cfg, ops, sharpness)
        streams_B = jax.random.wrap_key_data(rows.stream_B2)
        # The key depends on the row and its own number of sampled tokens alone, so that a smaller
        # batch, or one in which other rows wait, continues with the same tokens.
        keys_B = jax.vmap(jax.random.fold_in)(streams_B, rows.n_sampled_B + rows.column)
        logits_BV = apply_top_k_top_p(all_BV, top_k=top_k, top_p=top_p)
        token_B, logp_B = sample_tokens(logits_BV, keys_B, greedy=greedy)
        log_kept_BT = rows.log_kept_BT
        log_kept_B = None if log_kept_BT is None else log_kept_mass(logits_BV, all_BV)
        logp_B, log_kept_B = sampled_logprobs(
            params, logp_B, log_kept_B, rows.hidden_BD, token_B, cfg, ops, sharpness
        )
        # Rows that have ended are computed with the others. What they sample is dropped on the
        # host.
        token_B = jnp.where(rows.alive_B, token_B, 0)
        stopped_B = jnp.any(token_B[:, None] == stop_ids[None], axis=1)
        # The start indices of a slice must have one dtype, and the column is int32.
        zero = jnp.zeros((), jnp.int32)
        start_indices = (zero, rows.column)
        if log_kept_BT is not None and log_kept_B is not None:
            log_kept_BT = lax.dynamic_update_slice(log_kept_BT, log_kept_B[:, None], start_indices)
        return replace(
            rows,
            tokens_BT=lax.dynamic_update_slice(rows.tokens_BT, token_B[:, None], start_indices),
            logp_BT=lax.dynamic_update_slice(rows.logp_BT, logp_B[:, None], start_indices),
            log_kept_BT=log_kept_BT,
            alive_B=rows.alive_B & ~stopped_B & (rows.column + 1 < rows.limit_B),
            column=rows.column + 1,
        ), token_B

    def body(rows: DecodeState) -> DecodeState:
        rows, token_B = sample_column(rows)
        hidden_BTD, cache, recorded = forward(
            params,
            token_B[:, None],
            cfg,
            ops,
            positions_BT=rows.position_B[:, None],
            # A row that has ended writes padding into its cache.
            segment_ids_BT=rows.alive_B[:, None].astype(jnp.int32),
            cache=rows.cache,
            step=step,
            exploration=exploration,
        )
        experts_BTLA = rows.experts_BTLA
        # This forward read the token of the column that was filled last.
        if experts_BTLA is not None:
            experts_BTLA = write_slots(
                experts_BTLA, experts_batch_first(recorded["experts_BTA"], cfg), rows.column - 1
            )
        return replace(
            rows,
            cache=cache,
            hidden_BD=hidden_BTD[:, 0],
            position_B=rows.position_B + 1,
            experts_BTLA=experts_BTLA,
        )

    last = rows.tokens_BT.shape[1] - 1

    def is_unfinished(rows: DecodeState) -> Array:
        return (rows.column < last) & (jnp.sum(rows.alive_B.astype(jnp.int32)) > enough)

    def fill_last_column(rows: DecodeState) -> DecodeState:
        return replace(sample_column(rows)[0], cache=None, hidden_BD=None)

    rows = lax.while_loop(is_unfinished, body, rows)
    # No forward follows the last column. The cache stays out of `cond`, which would copy it.
    light = replace(rows, cache=None, hidden_BD=None)
    final = lax.cond(rows.column == last, lambda: fill_last_column(rows), lambda: light)
    return replace(final, cache=rows.cache, hidden_BD=rows.hidden_BD)
