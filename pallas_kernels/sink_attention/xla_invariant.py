# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant sink attention in plain XLA: key blocks begin at multiples of their size.

A query sums its keys in the same blocks, in arrays of the same shape, independent of the slots of
the keys, of other tokens in its row and of the number of queries. So its bits depend on its own
past alone: they are equal in a training forward, a prefill of any length and a decode step. A block
that it does not see adds exact zeros. xla.py is faster, but not batch-invariant: its blocks depend
on the shapes.

Next: xla_invariant_blocks.py, then pallas_kernels/tiles.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.arguments import matmul_precision
from pallas_kernels.masks import Layout, is_visible
from pallas_kernels.sink_attention import signature as sig
from pallas_kernels.sink_attention.gradients import attend_with_gradients
from pallas_kernels.sink_attention.reference import UNSEEN
from pallas_kernels.sink_attention.xla import sink_attention_backward_xla
from pallas_kernels.sink_attention.xla_invariant_blocks import (
    KEYS,
    SENTINEL,
    Blocks,
    blocks_by_position,
    blocks_by_sorting,
    gather_in_bounds,
)
from pallas_kernels.tiles import (
    bfloat16_to_bits,
    bits_to_bfloat16,
    opaque_count,
    put_tile,
    take_tile,
)

SCORES = 4  # rows of a product: queries times heads per key head, at least one query
PAIRS = 64  # pairs of a batch row and some of its queries in one product

# (rows [P], slots [P, X]) -> float32 keys or values [P, X, K, H]
Read = Callable[[Array, Array], Array]


def sink_attention_xla_invariant(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    sink_N: sig.Sinks,
    layout: Layout,
    window: int,
    scale: float,
    *,
    cache: bool = False,
) -> sig.Result:
    """Batch-invariant (o, lse): the bits of a query depend on its keys alone.

    A segment has each position at most once. Shared keys (`k_last_segment_ids_BS`) give the bits of
    unshared ones if the positions of every segment begin at a multiple of KEYS. With `cache` the
    queries of a row are of one segment, and the keys of that segment are less than S positions
    apart: their blocks are found without sorting.
    Numerics: float32, except inputs and outputs; the sink first, then keys in blocks of KEYS
        positions from 0 on. Gradients are those of xla.py for this (o, lse).
    """
    statics = dict(window=window, scale=scale)
    forward = partial(_attend_in_pairs, **statics, cache=cache)
    gradients = partial(sink_attention_backward_xla, **statics)
    return attend_with_gradients(forward, gradients, q_BTNH, k_BSKH, v_BSKH, sink_N, layout)


def sink_attention_xla_invariant_unsupported(q_BTNH: Any, k_BSKH: Any) -> str | None:
    """The reason why these shapes cannot run, or None."""
    return "there are no queries or no keys" if 0 in (*q_BTNH.shape, *k_BSKH.shape) else None


decode_attention_xla_invariant = partial(sink_attention_xla_invariant, cache=True)
decode_attention_xla_invariant_unsupported = sink_attention_xla_invariant_unsupported


def _attend_in_pairs(
    q: Array,
    k: Array,
    v: Array,
    sink: Array,
    layout: Layout,
    *,
    window: int,
    scale: float,
    cache: bool,
) -> sig.Result:
    """(o, lse), PAIRS of (batch row, queries) at a time."""
    (B, T, N, H), K = q.shape, k.shape[2]
    G = N // K
    rows = max(1, SCORES // G)  # queries of a pair
    n = -(-T // rows)
    blocks, ranges = (blocks_by_position if cache else blocks_by_sorting)(layout, window)
    n_iterations = -(-B * n // PAIRS)

    def split_pairs(x: Array, fill: int = 0) -> Array:
        """[B, T, …] to [pairs, rows, …], padded to a multiple of PAIRS pairs."""
        padding = ((0, 0), (0, n * rows - x.shape[1]), *((0, 0) for _ in x.shape[2:]))
        x = jnp.pad(x, padding, constant_values=fill).reshape(B * n, rows, *x.shape[2:])
        padding = ((0, n_iterations * PAIRS - B * n), *((0, 0) for _ in x.shape[1:]))
        return jnp.pad(x, padding, constant_values=fill)

    of_row = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], (B, T))
    begin_P, shared_begin_P = (
        jnp.min(split_pairs(x, SENTINEL), axis=1) for x in (ranges.begin_BT, ranges.shared_begin_BT)
    )
    end_P, shared_end_P = (
        jnp.max(split_pairs(x), axis=1) for x in (ranges.end_BT, ranges.shared_end_BT)
    )
    # One query's own blocks may be those that another one shares. Each is visited once: the first
    # range begins at the lower of both, and the second one after the first.
    shared_begin_P = jnp.minimum(shared_begin_P, begin_P)
    pairs_TP = _Pairs(
        split_pairs(q.astype(jnp.float32)),
        jnp.max(split_pairs(of_row), axis=1),
        jnp.maximum(begin_P, shared_end_P),
        end_P,
        shared_begin_P,
        jnp.maximum(shared_end_P - shared_begin_P, 0),
        split_pairs(layout.q_positions_BT),
        split_pairs(layout.q_segment_ids_BT),
    )
    # Sorted by the number of blocks, as an iteration lasts as long as its longest pair.
    order = jnp.argsort(pairs_TP.count_blocks()) if n_iterations > 1 else None
    if order is not None:
        pairs_TP = jax.tree.map(lambda x: gather_in_bounds(x, order), pairs_TP)
    pairs_TP = jax.tree.map(lambda x: x.reshape(n_iterations, PAIRS, *x.shape[1:]), pairs_TP)
    keys, values = _make_reader(k), _make_reader(v)
    sink_KR = jnp.tile(sink.astype(jnp.float32).reshape(K, G), (1, rows))

    def attend_iteration(i: Array, out: Array) -> Array:
        pairs = jax.tree.map(lambda x: take_tile(x, i), pairs_TP)
        return put_tile(out, _attend_pairs(pairs, keys, values, sink_KR, blocks, window, scale), i)

    empty = jnp.zeros((n_iterations, PAIRS, K, rows * G, H + 1), jnp.float32)
    results = lax.fori_loop(0, opaque_count(n_iterations), attend_iteration, empty)
    results = results.reshape(n_iterations * PAIRS, K, rows, G, H + 1)
    if order is not None:
        results = gather_in_bounds(
            results, jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
        )
    results = results[: B * n].transpose(0, 2, 1, 3, 4).reshape(B, n * rows, N, H + 1)[:, :T]
    return results[..., :H].astype(q.dtype), results[..., H]


class _Pairs(NamedTuple):
    """Pairs of a batch row and some of its queries."""

    q_PRNH: Array
    row_P: Array
    begin_P: Array  # first and one past the last block of its row that its queries need
    end_P: Array
    shared_begin_P: Array  # the first of the blocks that are visited before these
    shared_count_P: Array
    positions_PR: Array
    segments_PR: Array

    def count_blocks(self) -> Array:
        """The number of blocks that each pair visits."""
        return self.shared_count_P + self.end_P - jnp.minimum(self.begin_P, self.end_P)

    def block_at(self, i: Array) -> Array:
        """The index of each pair's visited block i, which is below `count_blocks`."""
        block_P = self.begin_P + i - self.shared_count_P
        return jnp.where(i < self.shared_count_P, self.shared_begin_P + i, block_P)


def _attend_pairs(
    pairs: _Pairs,
    keys: Read,
    values: Read,
    sink_KR: Array,
    blocks: Blocks,
    window: int,
    scale: float,
) -> Array:
    """Float32 o and lse of the pairs in one array [P, K, R, H + 1].

    R is queries times heads per key head.
    If they were two arrays and one unused, XLA would remove it and compile the other differently.
    """
    (P, rows, _, H), K = pairs.q_PRNH.shape, sink_KR.shape[0]
    q_PKRH = pairs.q_PRNH.reshape(P, rows, K, -1, H).transpose(0, 2, 1, 3, 4).reshape(P, K, -1, H)
    row_P, count_P = pairs.row_P, pairs.count_blocks()
    positions_PR1, segments_PR1 = (
        jnp.repeat(x, q_PKRH.shape[2] // rows, axis=1)[:, None, :, None]
        for x in (pairs.positions_PR, pairs.segments_PR)
    )

    def add_block(carry: Any) -> Any:
        i, top, total, acc = carry
        # All pairs run as many iterations as the longest one. A pair without further blocks reads
        # its last block again, completely masked, which adds exact zeros.
        last_P = jnp.maximum(count_P - 1, 0)
        # Without blocks `begin_P` is SENTINEL, and any block will do.
        block_P = jnp.where(count_P > 0, pairs.block_at(jnp.minimum(i, last_P)), 0)
        block_index = row_P, block_P
        slot_PX = gather_in_bounds(blocks.slot_BCX, *block_index)
        segment_P = jnp.where(i < count_P, gather_in_bounds(blocks.segment_BC, *block_index), 0)
        last_segment_P111 = (
            None
            if blocks.last_segment_BC is None
            else gather_in_bounds(blocks.last_segment_BC, *block_index)[:, None, None, None]
        )
        positions_PX = (
            gather_in_bounds(blocks.block_BC, *block_index)[:, None] * KEYS
            + jnp.arange(KEYS, dtype=jnp.int32)[None]
        )
        keys_PX = jnp.where(slot_PX >= 0, segment_P[:, None], 0)
        slot_PX = jnp.where(slot_PX >= 0, slot_PX, ~slot_PX)
        k_PXKH, v_PXKH = keys(row_P, slot_PX), values(row_P, slot_PX)
        visible = is_visible(
            positions_PR1,
            positions_PX[:, None, None, :],
            window,
            segments_PR1,
            keys_PX[:, None, None, :],
            last_segment_P111,
        )
        z = jnp.where(visible, _pairwise_dot(q_PKRH, k_PXKH, 3, 3) * scale, UNSEEN)
        new = jnp.maximum(top, jnp.max(z, axis=3, keepdims=True))
        p, shrink = jnp.exp(z - new), jnp.exp(top - new)
        total = total * shrink + jnp.sum(p, axis=3, keepdims=True)
        acc = acc * shrink + _pairwise_dot(p, v_PXKH, 3, 1)
        return i + 1, new, total, acc

    sink_1KR1 = sink_KR[None, :, :, None]
    top = jnp.broadcast_to(jnp.maximum(sink_1KR1, UNSEEN / 2), (*q_PKRH.shape[:3], 1))
    total = jnp.exp(sink_1KR1 - top)
    carry = (jnp.int32(0), top, total, jnp.zeros(q_PKRH.shape, jnp.float32))
    max_blocks = jnp.max(count_P)
    _, top, total, acc = lax.while_loop(lambda carry: carry[0] < max_blocks, add_block, carry)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
    # Pairs without keys have read arbitrary slots, which may contain NaN.
    acc = jnp.where((count_P > 0)[:, None, None, None], acc / safe, 0.0)
    return jnp.concatenate([acc, lse], axis=3)


def _make_reader(x_BSKH: Array) -> Read:
    S, K, H = x_BSKH.shape[1:]
    bits_MF = bfloat16_to_bits(x_BSKH.reshape(-1, K * H))

    def read_slots(row_P: Array, slot_PX: Array) -> Array:
        rows = gather_in_bounds(bits_MF, (row_P[:, None] * S + slot_PX).reshape(-1))
        return (
            bits_to_bfloat16(rows, x_BSKH.dtype).astype(jnp.float32).reshape(*slot_PX.shape, K, H)
        )

    return read_slots


def _pairwise_dot(a_PKRY: Array, b_PXKH: Array, contract_a: int, contract_b: int) -> Array:
    """Contract an axis of a with one of keys or values, for each pair and key head."""
    dims = (((contract_a,), (contract_b,)), ((0, 1), (0, 2)))
    return lax.dot_general(a_PKRY, b_PXKH, dims, precision=matmul_precision(a_PKRY.dtype))
