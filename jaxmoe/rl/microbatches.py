# SPDX-License-Identifier: Apache-2.0
"""Microbatches: a function over parts of a batch, its results merged as if it had seen it whole.

Rows are cut evenly, or packed by tokens: several sequences side by side in one row of the model's
context, told apart by segment ids. Packing changes what the model reads, never the [B, T] arrays
that the losses see, where a row is one sequence. Next: jaxmoe/rl/step.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array

from jaxmoe.records import UNKNOWN_EXPERT
from jaxmoe.rl.batch import Batch, Scored
from jaxmoe.shapes import Leaf

SUM, MAX, MIN, ROWS = "sum", "max", "min", "rows"  # how microbatches' results are merged


@struct.dataclass
class LossAux:
    """What a loss tells beside its value: dicts by name, by how microbatches are merged."""

    sums: Leaf = field(default_factory=dict)  # scalars; a mean divides by the batch's `total`
    maxima: Leaf = field(default_factory=dict)  # scalars
    minima: Leaf = field(default_factory=dict)  # scalars
    rows: Leaf = field(default_factory=dict)  # arrays whose first axis is the batch's


# of jax.value_and_grad(loss_fn, has_aux=True): ((loss, aux), gradient)
GRADIENTS = ((SUM, LossAux(SUM, MAX, MIN, ROWS)), SUM)


@struct.dataclass
class Packing:
    """Which microbatch each sequence is in, and where."""

    microbatch_B: Leaf  # int32
    start_B: Leaf  # int32: its first token in the microbatch's flattened rows
    count: Leaf  # int32 []: microbatches in use; an array, so that it compiles nothing new
    rows: int = struct.field(pytree_node=False, default=1)  # of a microbatch


@struct.dataclass
class PackedRows:
    """What the model reads of a packed microbatch, and where each [B, T] token stands in it."""

    tokens_BT: Leaf
    positions_BT: Leaf
    segment_ids_BT: Leaf
    routed_experts_BTLA: Leaf
    token_index_BT: Leaf  # int32 into the flattened rows; only this microbatch's true tokens count


def pack_sequences(lengths_B: Sequence[int] | np.ndarray, *, length: int, rows: int) -> Packing:
    """First-fit decreasing into rows of `length` tokens, `rows` of them a microbatch.

    Raises ValueError for a sequence that is longer than a row.
    """
    lengths = np.asarray(lengths_B, np.int64)
    if lengths.size and lengths.max() > length:
        raise ValueError(f"a row holds {length} tokens, sequence {lengths.argmax()} has "
                         f"{lengths.max()}.")  # fmt: skip
    room: list[int] = []
    number, start = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    for i in np.argsort(-lengths, kind="stable"):
        row = next((r for r, free in enumerate(room) if free >= lengths[i]), len(room))
        if row == len(room):
            room.append(length)
        number[i], start[i] = row // rows, (row % rows) * length + length - room[row]
        room[row] -= int(lengths[i])
    count = -(-len(room) // rows)
    return Packing(number, start, np.int32(count), rows=rows)


def map_microbatches(
    fn: Callable[[Batch, Scored | None], Any],
    batch: Batch,
    scored: Scored | None,
    microbatches: int,
    merge: Any,
) -> Any:
    """What fn(batch, scored) gives, from microbatches of both.

    `merge` is a prefix of the result's tree whose ends are SUM (held in float32), MAX, MIN or
    ROWS, which are put back in the batch's order. With `batch.packing` the microbatches are its
    own, otherwise `microbatches` equal cuts.
    """
    if batch.packing is not None:
        return _map_packed(fn, batch, scored, merge)
    if microbatches == 1:
        return fn(batch, scored)
    cut = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), (batch, scored))

    def add(so_far: Any, part: Any) -> Any:
        found = fn(*part)
        return _merge_results(merge, so_far, found), _select_rows(merge, found, rows=True)

    first = jax.tree.map(lambda x: x[0], cut)
    start = _select_rows(merge, _init_merged(merge, jax.eval_shape(fn, *first)), rows=False)
    reduced, rows = lax.scan(add, start, cut)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    return jax.tree.map(lambda how, a, b: b if how == ROWS else a, merge, reduced, rows)


def _map_packed(fn: Any, batch: Batch, scored: Scored | None, merge: Any) -> Any:
    packing = batch.packing

    def add(i: Array, so_far: Any) -> Any:
        part, mine_B = _pack_microbatch(batch, i)
        found = fn(part, scored)

        def put(old: Array, new: Array) -> Array:
            here = mine_B.reshape(-1, *[1] * (new.ndim - 1))
            return jnp.where(here, new.astype(old.dtype), old)

        reduced = _merge_results(merge, so_far, found)
        return jax.tree.map(
            lambda how, a, old, new: jax.tree.map(put, old, new) if how == ROWS else a,
            merge, reduced, so_far, found,
        )  # fmt: skip

    found = jax.eval_shape(fn, _pack_microbatch(batch, jnp.int32(0))[0], scored)
    return lax.fori_loop(0, packing.count, add, _init_merged(merge, found))


def _pack_microbatch(batch: Batch, i: Array) -> tuple[Batch, Array]:
    """The batch with the masks of microbatch i, and what the model reads of it."""
    packing, length = batch.packing, batch.tokens_BT.shape[1]
    mine_B = jnp.asarray(packing.microbatch_B) == i
    segments_BT = jnp.asarray(batch.segment_ids_BT)
    here_BT = mine_B[:, None] & (segments_BT > 0)
    token_index_BT = (
        jnp.asarray(packing.start_B)[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    )
    size = packing.rows * length
    where_M = jnp.where(here_BT, token_index_BT, size).reshape(-1)

    def laid(x: Array, empty: int = 0) -> Array:
        flat = jnp.full((size, *x.shape[2:]), empty, x.dtype)
        flat = flat.at[where_M].set(x.reshape(-1, *x.shape[2:]), mode="drop")
        return flat.reshape(packing.rows, length, *x.shape[2:])

    # a number of its own for each sequence, so that neighbours in a row do not see each other
    number_BT = jnp.broadcast_to(
        jnp.arange(1, len(mine_B) + 1, dtype=jnp.int32)[:, None], segments_BT.shape
    )
    routed = batch.routed_experts_BTLA
    packed = PackedRows(
        laid(jnp.asarray(batch.tokens_BT)), laid(jnp.asarray(batch.positions_BT)),
        laid(number_BT),
        None if routed is None else laid(jnp.asarray(routed), UNKNOWN_EXPERT),
        jnp.where(here_BT, token_index_BT, 0),
    )  # fmt: skip
    mask_BT = jnp.asarray(batch.loss_mask_BT) & mine_B[:, None]
    return replace(batch, loss_mask_BT=mask_BT, packed=packed, packing=None), mine_B


def _init_merged(merge: Any, found: Any) -> Any:
    """What nothing merges to."""
    empty = {SUM: 0.0, MAX: -jnp.inf, MIN: jnp.inf}

    def start(how: str, tree: Any) -> Any:
        if how == ROWS:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)
        return jax.tree.map(lambda s: jnp.full(s.shape, empty[how], jnp.float32), tree)

    return jax.tree.map(start, merge, found)


def _merge_results(merge: Any, so_far: Any, found: Any) -> Any:
    """So far and this one; None where there are rows."""
    together = {SUM: jnp.add, MAX: jnp.maximum, MIN: jnp.minimum}

    def add(how: str, old: Any, new: Any) -> Any:
        if how == ROWS:
            return None
        return jax.tree.map(lambda a, b: together[how](a, b.astype(a.dtype)), old, new)

    return jax.tree.map(add, merge, so_far, found)


def _select_rows(merge: Any, tree: Any, *, rows: bool) -> Any:
    """The tree without its rows, or its rows alone; None for the rest."""
    return jax.tree.map(lambda how, x: x if (how == ROWS) == rows else None, merge, tree)
