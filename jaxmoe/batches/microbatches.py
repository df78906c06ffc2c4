# SPDX-License-Identifier: Apache-2.0
"""Microbatches: apply a function to parts of a batch, and merge the results.

A batch is split into equal parts, or packed by tokens: several sequences share one row of the
model's context, separated by segment ids. Samples of one prompt may share its tokens too
(jaxmoe/batches/shared_prompts.py). Packing changes only what the model reads. The losses always see
[B, T] arrays in which a row is one sequence: what a shared token has, all its samples get, and
their gradients of it add up. Next: jaxmoe/rl/loss.py.
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

from jaxmoe.batches.batch import Batch, map_rows
from jaxmoe.losses.aggregation import token_total
from jaxmoe.losses.distillation import NO_WORD
from jaxmoe.records import UNKNOWN_EXPERT
from jaxmoe.shapes import Leaf, Metrics

SUM, MAX, MIN, ROWS = "sum", "max", "min", "rows"  # how results of microbatches are merged


@struct.dataclass
class LossAux:
    """Results of a loss in addition to its value, by name, grouped by how they are merged."""

    sums: Leaf = field(default_factory=dict)  # scalars; a mean divides by shared["total"]
    totals: Leaf = field(default_factory=dict)  # scalars, to be divided by shared["total"]
    maxima: Leaf = field(default_factory=dict)  # scalars
    minima: Leaf = field(default_factory=dict)  # scalars
    rows: Leaf = field(default_factory=dict)  # arrays whose first axis is the row


# How the result of jax.value_and_grad(loss_fn, has_aux=True) is merged: ((loss, aux), gradient).
GRADIENTS = ((SUM, LossAux(SUM, SUM, MAX, MIN, ROWS)), SUM)


@struct.dataclass
class SharedTokens:
    """The first tokens of each sequence that it shares with others of its row.

    Segments are numbered in preorder: that of the shared tokens, then those of the sequences.
    """

    length_B: Leaf  # int32: how many
    start_B: Leaf  # int32: index of the first one in the microbatch's flattened rows
    is_stored_B: Leaf  # bool: of the sequences that share them, one stores them
    segment_B: Leaf  # int32: their segment
    last_segment_B: Leaf  # int32: the last segment that sees them
    branch_segment_B: Leaf  # int32: the segment of the sequence's other tokens
    unshared: Leaf  # int32 []: tokens that the same pass computes if none are shared
    refused: Leaf  # int32 []: prompts that are stored again since an engine gave other experts
    # Of rows with several contexts, int32: the index of each token among the shared ones, −1 for
    # one that is not shared, and the segment of each of these. A context that does not begin with
    # the shared tokens is in no segment that sees them.
    offset_BT: Leaf = None
    unshared_segment_BT: Leaf = None
    unit: int = struct.field(pytree_node=False, default=1)  # shared tokens are a multiple of it


@struct.dataclass
class Packing:
    """The microbatch of each sequence, and the position in it."""

    microbatch_B: Leaf  # int32
    start_B: Leaf  # int32: index of the first unshared token in the microbatch's flattened rows
    count: Leaf  # int32 []: number of microbatches; an array, so that a change compiles nothing
    rows: int = struct.field(pytree_node=False, default=1)  # rows of a microbatch
    length: int = struct.field(pytree_node=False, default=0)  # tokens of a row; 0: as the batch's
    shared: Leaf = None  # SharedTokens


@struct.dataclass
class PackedRows:
    """The rows of a packed microbatch that the model reads, and the index of each [B, T] token."""

    tokens_BT: Leaf
    positions_BT: Leaf
    segment_ids_BT: Leaf
    routed_experts_BTLA: Leaf
    old_experts_BTLA: Leaf
    token_index_BT: Leaf  # int32 into the flattened rows; valid for this microbatch's tokens
    last_segment_ids_BT: Leaf = None  # the last segment that sees each token; None: its own
    teacher_top_ids_BTK: Leaf = None
    teacher_top_logp_BTK: Leaf = None


def pack_sequences(lengths_B: Sequence[int] | np.ndarray, *, length: int, rows: int) -> Packing:
    """Pack sequences into rows of `length` tokens, first-fit decreasing; `rows` per microbatch.

    Raises ValueError for a sequence that is longer than a row.
    """
    lengths = np.asarray(lengths_B, np.int64)
    if lengths.size and lengths.max() > length:
        raise ValueError(
            f"a row holds {length} tokens, sequence {lengths.argmax()} has {lengths.max()}."
        )
    room: list[int] = []
    row_microbatch, start = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    # A stable sort makes the packing of equal lengths depend on the batch alone.
    for i in np.argsort(-lengths, kind="stable"):
        row = next((r for r, free in enumerate(room) if free >= lengths[i]), len(room))
        if row == len(room):
            room.append(length)
        row_microbatch[i], start[i] = row // rows, (row % rows) * length + length - room[row]
        room[row] -= int(lengths[i])
    count = -(-len(room) // rows)
    return Packing(row_microbatch, start, np.int32(count), rows=rows)


def map_microbatches(
    fn: Callable[[Batch], Any], batch: Batch, microbatches: int, merge: Any
) -> Any:
    """Return fn(batch), computed by microbatches, each of which has all shared arrays.

    `merge` is a tree prefix of the result. Its leaves are SUM (accumulated in float32), MAX, MIN,
    or ROWS (concatenated in the order of the batch). With `batch.packing` the microbatches are
    those of the packing, otherwise `microbatches` equal parts.
    """
    if batch.packing is not None:
        return _map_packed(fn, batch, merge)
    if microbatches == 1:
        return fn(batch)
    shared, unshared = batch.shared, replace(batch, shared={})
    parts = map_rows(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), unshared)

    def apply(part: Batch) -> Any:
        return fn(replace(part, shared=shared))

    def add(accumulated: Any, part: Batch) -> Any:
        result = apply(part)
        return _merge_results(merge, accumulated, result), _select_rows(merge, result, rows=True)

    # A scan's carry needs its final structure before the first iteration. eval_shape finds it
    # without running a forward.
    first = map_rows(lambda x: x[0], parts)
    start = _select_rows(merge, _init_merged(merge, jax.eval_shape(apply, first)), rows=False)
    reduced, rows = lax.scan(add, start, parts)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    return jax.tree.map(lambda merge_op, a, b: b if merge_op == ROWS else a, merge, reduced, rows)


def share_scalars(batch: Batch, step: Array) -> Batch:
    """Return the batch with the scalars that every microbatch of an update shares.

    `total` is the number of trained tokens and `n_tokens` that of all tokens, float32 and at least
    1. `step` is the number of steps before this one; a `step` in `batch.shared` has precedence.
    """
    scalars = {
        "total": token_total(jnp.asarray(batch.loss_mask_BT)),
        "n_tokens": token_total(jnp.asarray(batch.segment_ids_BT) > 0),
    }
    return replace(batch, shared={"step": step} | batch.shared | scalars)


def mean_metrics(aux: LossAux, batch: Batch) -> Metrics:
    """Metrics that are sums over microbatches, and means over the trained tokens of the update."""
    return aux.sums | {name: x / batch.shared["total"] for name, x in aux.totals.items()}


def _map_packed(fn: Any, batch: Batch, merge: Any) -> Any:
    packing = batch.packing

    def add(i: Array, accumulated: Any) -> Any:
        part, in_microbatch_B = _pack_microbatch(batch, i)
        result = fn(part)

        def put(old: Array, new: Array) -> Array:
            # The losses return all B rows for every microbatch, and only the rows that it contains
            # are right.
            selected = in_microbatch_B.reshape(-1, *[1] * (new.ndim - 1))
            return jnp.where(selected, new.astype(old.dtype), old)

        reduced = _merge_results(merge, accumulated, result)
        return jax.tree.map(
            lambda merge_op, a, old, new: jax.tree.map(put, old, new) if merge_op == ROWS else a,
            merge,
            reduced,
            accumulated,
            result,
        )

    result = jax.eval_shape(fn, _pack_microbatch(batch, jnp.int32(0))[0])
    # The number of microbatches differs from batch to batch. A loop over a traced count is compiled
    # once for all of them. It has no reverse mode and needs none, since gradients are taken inside.
    return lax.fori_loop(0, packing.count, add, _init_merged(merge, result))


def _pack_microbatch(batch: Batch, i: Array) -> tuple[Batch, Array]:
    """Return the batch with masks and packed rows of microbatch i, and which rows it contains."""
    packing, (_, length) = batch.packing, batch.tokens_BT.shape
    row_length, shared = packing.length or length, packing.shared
    in_microbatch_B = jnp.asarray(packing.microbatch_B) == i
    segments_BT = jnp.asarray(batch.segment_ids_BT)
    is_token_BT = in_microbatch_B[:, None] & (segments_BT > 0)
    column_1T = jnp.arange(length, dtype=jnp.int32)[None]
    token_index_BT = jnp.asarray(packing.start_B)[:, None] + column_1T
    # Each context has its own segment id, so that neighbours in a row do not attend to each other.
    B = len(in_microbatch_B)
    row_B1, context_BT = jnp.arange(1, B + 1, dtype=jnp.int32)[:, None], segments_BT - 1
    segment_BT = row_B1 + B * context_BT
    last_segment_BT, is_stored_BT = None, is_token_BT
    if shared is not None:
        length_B1, start_B1, stored_B1, segment_B1, last_B1, branch_B1 = (
            jnp.asarray(x)[:, None]
            for x in (
                shared.length_B,
                shared.start_B,
                shared.is_stored_B,
                shared.segment_B,
                shared.last_segment_B,
                shared.branch_segment_B,
            )
        )
        if shared.offset_BT is None:
            is_shared_BT, offset_BT, branch_BT = column_1T < length_B1, column_1T, branch_B1
            unshared_index_BT = token_index_BT - length_B1
        else:
            offset_BT = jnp.asarray(shared.offset_BT)
            is_shared_BT, branch_BT = offset_BT >= 0, jnp.asarray(shared.unshared_segment_BT)
            n_shared_BT = jnp.cumsum(is_shared_BT.astype(jnp.int32), axis=1)
            unshared_index_BT = token_index_BT - n_shared_BT
        token_index_BT = jnp.where(is_shared_BT, start_B1 + offset_BT, unshared_index_BT)
        segment_BT = jnp.where(is_shared_BT, segment_B1, branch_BT)
        last_segment_BT = jnp.where(is_shared_BT, last_B1, branch_BT)
        stores_BT = stored_B1 & (context_BT == 0)
        is_stored_BT = is_token_BT & (stores_BT | ~is_shared_BT)
    size = packing.rows * row_length
    # Tokens of other microbatches get an index past the end, which the scatter below drops.
    target_M = jnp.where(is_stored_BT, token_index_BT, size).reshape(-1)

    def pack_array(x: Array, empty: float = 0) -> Array:
        flat = jnp.full((size, *x.shape[2:]), empty, x.dtype)
        flat = flat.at[target_M].set(x.reshape(-1, *x.shape[2:]), mode="drop")
        return flat.reshape(packing.rows, row_length, *x.shape[2:])

    def pack_known(x: Leaf, empty: float) -> Array | None:
        return None if x is None else pack_array(x, empty)

    packed = PackedRows(
        pack_array(jnp.asarray(batch.tokens_BT)),
        pack_array(jnp.asarray(batch.positions_BT)),
        pack_array(jnp.broadcast_to(segment_BT, segments_BT.shape)),
        pack_known(batch.routed_experts_BTLA, UNKNOWN_EXPERT),
        pack_known(batch.old_experts_BTLA, UNKNOWN_EXPERT),
        # Other tokens read index 0. Any valid index would do, because the masks exclude them.
        jnp.where(is_token_BT, token_index_BT, 0),
        pack_known(last_segment_BT, 0),
        pack_known(batch.teacher_top_ids_BTK, -1),
        pack_known(batch.teacher_top_logp_BTK, NO_WORD),
    )
    mask_BT = jnp.asarray(batch.loss_mask_BT) & in_microbatch_B[:, None]
    part = replace(
        batch,
        loss_mask_BT=mask_BT,
        segment_ids_BT=jnp.where(is_token_BT, segments_BT, 0),
        packed=packed,
        packing=None,
    )
    return part, in_microbatch_B


def _init_merged(merge: Any, shapes: Any) -> Any:
    """Initial values of the merge."""
    empty = {SUM: 0.0, MAX: -jnp.inf, MIN: jnp.inf}

    def start(merge_op: str, tree: Any) -> Any:
        if merge_op == ROWS:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), tree)
        # In bfloat16 a sum stops growing when its summands are 256 times smaller.
        return jax.tree.map(lambda s: jnp.full(s.shape, empty[merge_op], jnp.float32), tree)

    return jax.tree.map(start, merge, shapes)


def _merge_results(merge: Any, accumulated: Any, result: Any) -> Any:
    """Merge one more result; None in place of rows."""
    combine = {SUM: jnp.add, MAX: jnp.maximum, MIN: jnp.minimum}

    def add(merge_op: str, old: Any, new: Any) -> Any:
        if merge_op == ROWS:
            return None
        return jax.tree.map(lambda a, b: combine[merge_op](a, b.astype(a.dtype)), old, new)

    return jax.tree.map(add, merge, accumulated, result)


def _select_rows(merge: Any, tree: Any, *, rows: bool) -> Any:
    """Return only the rows of the tree, or everything else; None in place of the other part."""
    return jax.tree.map(lambda merge_op, x: x if (merge_op == ROWS) == rows else None, merge, tree)
