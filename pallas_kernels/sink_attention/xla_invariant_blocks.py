# SPDX-License-Identifier: Apache-2.0
"""Tables of the keys of a row in blocks of positions, and the blocks that each query needs.

They are computed once for all queries: the loop over blocks finds the keys of a block by one read
of a table. Next: xla_invariant.py, which contains that loop.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.masks import Layout

KEYS = 32  # positions of a block
SENTINEL = 2**30  # segment of padding keys and index of unneeded blocks: sorts after all others


class Ranges(NamedTuple):
    """The blocks that each query needs: those of shared keys, then those of its own segment.

    Both are a first block and one past the last. Without blocks they are SENTINEL and 0.
    """

    begin_BT: Array
    end_BT: Array
    shared_begin_BT: Array
    shared_end_BT: Array


class Blocks(NamedTuple):
    """The C blocks of each row in order: the spans of KEYS positions that contain a key."""

    slot_BCX: Array  # slot of the key at this position; if there is none, ~slot of another key
    segment_BC: Array
    block_BC: Array  # position // KEYS
    last_segment_BC: Array | None = None  # the last segment that sees the block; None: its own


def gather_in_bounds(x: Array, *indices: Array) -> Array:
    """x[where], for indices that are in bounds."""
    return x.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def blocks_by_sorting(layout: Layout, window: int) -> tuple[Blocks, Ranges]:
    """Blocks of keys in any order: sorted by segment and position, then split into blocks.

    Positions may have gaps, so a row of S keys may have S blocks: the table takes KEYS integers a
    key.

    Keys of other segments that a query sees form one range, from the first block of the lowest such
    segment to the last block of the highest. For a prompt and its answers it has no other blocks;
    in a deeper tree it may have some, which are masked.
    """
    segments = jnp.where(layout.k_segment_ids_BS > 0, layout.k_segment_ids_BS, SENTINEL)
    B, S = segments.shape
    slots = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    last = layout.k_last_segment_ids_BS
    segments_BS, positions_BS, slots_BS, *last_BS = lax.sort(
        (segments, layout.k_positions_BS, slots, *(() if last is None else (last,))),
        dimension=1,
        num_keys=2,
    )
    blocks_BS = positions_BS // KEYS
    same_block_BS = (jnp.diff(segments_BS) == 0) & (jnp.diff(blocks_BS) == 0)
    first_BS = jnp.concatenate([jnp.ones((B, 1), bool), ~same_block_BS], axis=1)
    # The index of a key's block in its row.
    block_index_BS = jnp.cumsum(first_BS.astype(jnp.int32), axis=1) - 1
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    heads_BS = row_B1, jnp.where(first_BS, block_index_BS, S)

    def scatter_to_blocks(x_BS: Array) -> Array:
        return jnp.zeros((B, S), jnp.int32).at[heads_BS].set(x_BS, mode="drop")

    filled = jnp.broadcast_to(~scatter_to_blocks(slots_BS)[:, :, None], (B, S, KEYS))
    table = filled.at[row_B1, block_index_BS, positions_BS % KEYS].set(slots_BS)
    blocks = Blocks(
        table,
        scatter_to_blocks(segments_BS),
        scatter_to_blocks(blocks_BS),
        *map(scatter_to_blocks, last_BS),
    )

    q_segments, q_positions = layout.q_segment_ids_BT, layout.q_positions_BT
    start = _first_visible_position(q_positions, window) // KEYS * KEYS
    ends = [(q_segments, q_segments)]
    if last is not None:
        ends.append(_shared_segments(layout))
    bounds = jnp.concatenate([start, q_positions + 1] * len(ends), axis=1)
    bounds_segments = jnp.concatenate([x for pair in ends for x in pair], axis=1)

    def bisect(i: Array, low: Array) -> Array:
        """One step of a binary search; at least `low` keys of the row come before the bound."""
        width = 1 << (S.bit_length() - 1 - i)
        key = row_B1, jnp.minimum(low + width, S) - 1
        key_segments, key_positions = (
            gather_in_bounds(segments_BS, *key),
            gather_in_bounds(positions_BS, *key),
        )
        is_before = (key_segments < bounds_segments) | (
            (key_segments == bounds_segments) & (key_positions < bounds)
        )
        return jnp.where(is_before & (low + width <= S), low + width, low)

    low = lax.fori_loop(0, S.bit_length(), bisect, jnp.zeros_like(bounds))

    def block_range(begin: Array, end: Array) -> tuple[Array, Array]:
        """The blocks of the sorted keys from `begin` to before `end`."""
        has_blocks = (q_segments > 0) & (begin < end)
        begin, last = (
            gather_in_bounds(block_index_BS, row_B1, jnp.clip(i, 0, S - 1))
            for i in (begin, end - 1)
        )
        return jnp.where(has_blocks, begin, SENTINEL), jnp.where(has_blocks, last + 1, 0)

    single, *shared = (
        block_range(*jnp.split(x, 2, axis=1)) for x in jnp.split(low, len(ends), axis=1)
    )
    return blocks, Ranges(*single, *(shared[0] if shared else _no_blocks(q_segments)))


def _shared_segments(layout: Layout) -> tuple[Array, Array]:
    """The lowest and the highest segment before its own whose keys each query sees.

    SENTINEL and 0 if there is none.
    """
    q_segments, k_segments, last = (
        layout.q_segment_ids_BT[:, :, None],
        layout.k_segment_ids_BS[:, None],
        layout.k_last_segment_ids_BS,
    )
    assert last is not None
    sees = (k_segments > 0) & (k_segments < q_segments) & (q_segments <= last[:, None])
    lowest = jnp.min(jnp.where(sees, k_segments, SENTINEL), axis=2)
    return lowest, jnp.max(jnp.where(sees, k_segments, 0), axis=2)


def _no_blocks(like_BT: Array) -> tuple[Array, Array]:
    return jnp.full_like(like_BT, SENTINEL), jnp.zeros_like(like_BT)


def blocks_by_position(layout: Layout, window: int) -> tuple[Blocks, Ranges]:
    """Blocks of the keys of the queries' segment, one a row, placed without sorting.

    Its keys must be less than S positions apart; keys of other segments are dropped.
    """
    segments_BS, positions_BS = layout.k_segment_ids_BS, layout.k_positions_BS
    B, S = positions_BS.shape
    C = -(-(S - 1 + KEYS) // KEYS)
    q_segments, q_positions = layout.q_segment_ids_BT, layout.q_positions_BT
    is_queried_BS = segments_BS == jnp.max(q_segments, axis=1, keepdims=True)
    segment_B1 = jnp.max(jnp.where(is_queried_BS, segments_BS, 0), axis=1, keepdims=True)
    valid_BS = is_queried_BS & (segments_BS > 0)
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    newest_B1 = jnp.max(jnp.where(valid_BS, positions_BS, 0), axis=1, keepdims=True)
    oldest_B1 = jnp.min(jnp.where(valid_BS, positions_BS, newest_B1), axis=1, keepdims=True)
    first_B1 = oldest_B1 // KEYS
    slots_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    column_BS = jnp.where(valid_BS, positions_BS - first_B1 * KEYS, C * KEYS)
    table = jnp.full((B, C * KEYS), -1).at[row_B1, column_BS].set(slots_BS, mode="drop")
    # A position without a key reads a real key, with weight 0. A free slot may contain NaN, which
    # times 0 is NaN.
    fallback_B1 = ~gather_in_bounds(table, row_B1, newest_B1 - first_B1 * KEYS)
    table = jnp.where(table < 0, fallback_B1, table).reshape(B, C, KEYS)
    block_BC = first_B1 + jnp.arange(C, dtype=jnp.int32)[None]
    blocks = Blocks(table, jnp.broadcast_to(segment_B1, (B, C)), block_BC)
    begin = jnp.maximum(_first_visible_position(q_positions, window) // KEYS - first_B1, 0)
    end = jnp.minimum(q_positions // KEYS - first_B1 + 1, C)
    has_blocks = (q_segments > 0) & (q_segments == segment_B1) & (begin < end)
    return blocks, Ranges(
        jnp.where(has_blocks, begin, SENTINEL),
        jnp.where(has_blocks, end, 0),
        *_no_blocks(q_segments),
    )


def _first_visible_position(positions_BT: Array, window: int) -> Array:
    """The earliest position that each query can see."""
    return jnp.maximum(positions_BT - window + 1, 0) if window else jnp.zeros_like(positions_BT)
