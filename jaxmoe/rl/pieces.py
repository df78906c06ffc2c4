# SPDX-License-Identifier: Apache-2.0
"""Microbatches: a function over pieces of a batch, its results merged as if it had seen it whole.

Rows are cut evenly, or packed by tokens: several sequences side by side in one row of the model's
context, told apart by segment ids. Packing changes what the model reads, never the [B, T] arrays
that the losses see, where a row is one sequence. Next: jaxmoe/rl/step.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array

from jaxmoe.rl.batch import Batch
from jaxmoe.shapes import Leaf

Pieces = Callable[[Batch], tuple[Any, Any, Any]]  # (sums, maxima, rows) of one piece


@struct.dataclass
class Packing:
    """Which microbatch each sequence is in, and where."""

    piece_B: Leaf  # int32: the microbatch
    start_B: Leaf  # int32: its first token in the microbatch's flattened rows
    count: Leaf  # int32 []: microbatches in use; an array, so that it compiles nothing new
    rows: int = struct.field(pytree_node=False, default=1)  # of a microbatch


@struct.dataclass
class Packed:
    """What the model reads of a packed microbatch, and where each [B, T] token stands in it."""

    tokens_BT: Leaf
    positions_BT: Leaf
    segment_ids_BT: Leaf
    place_BT: Leaf  # int32 into the flattened rows; only true tokens of this piece mean anything


def pack(lengths_B: Sequence[int] | np.ndarray, *, length: int, rows: int) -> Packing:
    """First-fit decreasing into rows of `length` tokens, `rows` of them a microbatch.

    Raises ValueError for a sequence that is longer than a row.
    """
    lengths = np.asarray(lengths_B, np.int64)
    if lengths.size and lengths.max() > length:
        raise ValueError(f"a row holds {length} tokens, sequence {lengths.argmax()} has "
                         f"{lengths.max()}.")  # fmt: skip
    room: list[int] = []
    piece, start = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    for i in np.argsort(-lengths, kind="stable"):
        row = next((r for r, free in enumerate(room) if free >= lengths[i]), len(room))
        if row == len(room):
            room.append(length)
        piece[i], start[i] = row // rows, (row % rows) * length + length - room[row]
        room[row] -= int(lengths[i])
    count = -(-len(room) // rows)
    return Packing(piece, start, np.int32(count), rows=rows)


def over_pieces(fn: Pieces, batch: Batch, microbatches: int) -> tuple[Any, Any, Any]:
    """fn's sums added, its maxima maximised, and its rows put back in the batch's order.

    Sums are held in float32. With `batch.packing` the pieces are its microbatches, otherwise
    `microbatches` equal cuts. Rows are arrays whose first axis is the piece's.
    """
    if batch.packing is not None:
        return _packed(fn, batch)
    if microbatches == 1:
        return fn(batch)
    pieces = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

    def add(carry, piece):
        sums, maxima, rows = fn(piece)
        return _merge(carry, sums, maxima), rows

    first = jax.tree.map(lambda x: x[0], pieces)
    (sums, maxima), rows = lax.scan(add, _zeros(fn, first)[:2], pieces)
    return sums, maxima, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)


def _packed(fn: Pieces, batch: Batch) -> tuple[Any, Any, Any]:
    packing = batch.packing

    def add(i, carry):
        piece, mine_B = _piece(batch, i)
        sums, maxima, rows = fn(piece)
        rows = jax.tree.map(
            lambda old, new: jnp.where(
                mine_B.reshape(-1, *[1] * (new.ndim - 1)), new.astype(old.dtype), old
            ),
            carry[1], rows,
        )  # fmt: skip
        return _merge(carry[0], sums, maxima), rows

    sums, maxima, rows = _zeros(fn, _piece(batch, jnp.int32(0))[0])
    (sums, maxima), rows = lax.fori_loop(0, packing.count, add, ((sums, maxima), rows))
    return sums, maxima, rows


def _piece(batch: Batch, i: Array) -> tuple[Batch, Array]:
    """The batch with the masks of microbatch i, and what the model reads of it."""
    packing, length = batch.packing, batch.tokens_BT.shape[1]
    mine_B = jnp.asarray(packing.piece_B) == i
    segments_BT = jnp.asarray(batch.segment_ids_BT)
    here_BT = mine_B[:, None] & (segments_BT > 0)
    place_BT = jnp.asarray(packing.start_B)[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    size = packing.rows * length
    where_M = jnp.where(here_BT, place_BT, size).reshape(-1)

    def laid(x_BT: Array) -> Array:
        flat = jnp.zeros(size, jnp.int32).at[where_M].set(x_BT.reshape(-1), mode="drop")
        return flat.reshape(packing.rows, length)

    # a number of its own for each sequence, so that neighbours in a row do not see each other
    number_BT = jnp.broadcast_to(
        jnp.arange(1, len(mine_B) + 1, dtype=jnp.int32)[:, None], segments_BT.shape
    )
    packed = Packed(
        laid(jnp.asarray(batch.tokens_BT)), laid(jnp.asarray(batch.positions_BT)),
        laid(number_BT), jnp.where(here_BT, place_BT, 0),
    )  # fmt: skip
    mask_BT = jnp.asarray(batch.loss_mask_BT) & mine_B[:, None]
    return replace(batch, loss_mask_BT=mask_BT, packed=packed, packing=None), mine_B


def _zeros(fn: Pieces, piece: Batch) -> tuple[Any, Any, Any]:
    sums, maxima, rows = jax.eval_shape(fn, piece)
    add = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), (sums, maxima))
    return *add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), rows)


def _merge(carry: Any, sums: Any, maxima: Any) -> Any:
    old_sums, old_maxima = carry
    return (
        jax.tree.map(lambda a, b: a + b.astype(a.dtype), old_sums, sums),
        jax.tree.map(lambda a, b: jnp.maximum(a, b.astype(a.dtype)), old_maxima, maxima),
    )
