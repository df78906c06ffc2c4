# SPDX-License-Identifier: Apache-2.0
"""Where the keys of a row lie, by blocks of positions, and which blocks a query needs.

Made once for all queries: the loop over blocks then finds a block's keys by one read of a table.
Next: aligned.py, which is that loop.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.masks import Layout

KEYS = 32  # of a block
FAR = 2**30  # the segment of a key that is padding, and a block that nobody needs: behind all

Ranges = tuple[Array, Array]  # first and one past the last block that a query needs, [B, T]


class Blocks(NamedTuple):
    """The C blocks of each row in order, those of KEYS positions in which it has a key."""

    slot_BCX: Array  # of the key at this position; where there is none ~slot of one of the row
    segment_BC: Array
    block_BC: Array  # position // KEYS


def at(x: Array, *where: Array) -> Array:
    """x[where], which is inside x."""
    return x.at[where].get(mode="promise_in_bounds", wrap_negative_indices=False)


def sorted_blocks(layout: Layout, window: int) -> tuple[Blocks, Ranges]:
    """Of keys in any order: sorted by segment and position, then cut where a block begins.

    Positions may have gaps, so a row of S keys may have S blocks: KEYS integers of table a key.
    """
    segments = jnp.where(layout.k_segment_ids_BS > 0, layout.k_segment_ids_BS, FAR)
    B, S = segments.shape
    slots = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    segments_BS, positions_BS, slots_BS = lax.sort(
        (segments, layout.k_positions_BS, slots), dimension=1, num_keys=2
    )
    blocks_BS = positions_BS // KEYS
    same_BS = (jnp.diff(segments_BS) == 0) & (jnp.diff(blocks_BS) == 0)
    first_BS = jnp.concatenate([jnp.ones((B, 1), bool), ~same_BS], axis=1)
    at_BS = jnp.cumsum(first_BS.astype(jnp.int32), axis=1) - 1  # a block's place in its row
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    heads_BS = row_B1, jnp.where(first_BS, at_BS, S)

    def of_blocks(x_BS: Array) -> Array:
        return jnp.zeros((B, S), jnp.int32).at[heads_BS].set(x_BS, mode="drop")

    filled = jnp.broadcast_to(~of_blocks(slots_BS)[:, :, None], (B, S, KEYS))
    table = filled.at[row_B1, at_BS, positions_BS % KEYS].set(slots_BS)
    blocks = Blocks(table, of_blocks(segments_BS), of_blocks(blocks_BS))

    q_segments, q_positions = layout.q_segment_ids_BT, layout.q_positions_BT
    start = _first(q_positions, window) // KEYS * KEYS
    wanted = jnp.concatenate([start, q_positions + 1], axis=1)
    of_wanted = jnp.concatenate([q_segments, q_segments], axis=1)

    def halve(i: Array, low: Array) -> Array:
        """low: so many keys of the row are known to come before the one that is wanted."""
        width = 1 << (S.bit_length() - 1 - i)
        key = row_B1, jnp.minimum(low + width, S) - 1
        there, where = at(segments_BS, *key), at(positions_BS, *key)
        less = (there < of_wanted) | ((there == of_wanted) & (where < wanted))
        return jnp.where(less & (low + width <= S), low + width, low)

    low = lax.fori_loop(0, S.bit_length(), halve, jnp.zeros_like(wanted))
    begin, end = jnp.split(low, 2, axis=1)
    some = (q_segments > 0) & (begin < end)
    begin, last = (at(at_BS, row_B1, jnp.clip(i, 0, S - 1)) for i in (begin, end - 1))
    return blocks, (jnp.where(some, begin, FAR), jnp.where(some, last + 1, 0))


def ring_of_blocks(layout: Layout, window: int) -> tuple[Blocks, Ranges]:
    """Of keys of one segment a row, less than S positions apart: placed by their positions."""
    segments_BS, positions_BS = layout.k_segment_ids_BS, layout.k_positions_BS
    B, S = positions_BS.shape
    C = -(-(S - 1 + KEYS) // KEYS)
    there_BS = segments_BS > 0
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    newest_B1 = jnp.max(jnp.where(there_BS, positions_BS, 0), axis=1, keepdims=True)
    oldest_B1 = jnp.min(jnp.where(there_BS, positions_BS, newest_B1), axis=1, keepdims=True)
    first_B1 = oldest_B1 // KEYS
    slots_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    at_BS = jnp.where(there_BS, positions_BS - first_B1 * KEYS, C * KEYS)
    table = jnp.full((B, C * KEYS), -1).at[row_B1, at_BS].set(slots_BS, mode="drop")
    instead_B1 = ~at(table, row_B1, newest_B1 - first_B1 * KEYS)
    table = jnp.where(table < 0, instead_B1, table).reshape(B, C, KEYS)
    block_BC = first_B1 + jnp.arange(C, dtype=jnp.int32)[None]
    segment_B1 = jnp.max(segments_BS, axis=1, keepdims=True)
    blocks = Blocks(table, jnp.broadcast_to(segment_B1, (B, C)), block_BC)
    q_segments, q_positions = layout.q_segment_ids_BT, layout.q_positions_BT
    begin = jnp.maximum(_first(q_positions, window) // KEYS - first_B1, 0)
    end = jnp.minimum(q_positions // KEYS - first_B1 + 1, C)
    some = (q_segments > 0) & (q_segments == segment_B1) & (begin < end)
    return blocks, (jnp.where(some, begin, FAR), jnp.where(some, end, 0))


def _first(positions_BT: Array, window: int) -> Array:
    """The earliest position that these queries may see."""
    return jnp.maximum(positions_BT - window + 1, 0) if window else jnp.zeros_like(positions_BT)
