# SPDX-License-Identifier: Apache-2.0
"""Sink attention whose blocks of keys begin at multiples of their size from position 0.

Whatever slot a key lies in, whatever else is in its row and however many queries are asked, a query
sums its keys in the same blocks, in arrays of the same shape: its bits depend on its own past
alone, in a training forward, a prefill of any length and a decode step. A block that it does not
see adds exact zeros. `sink_attention` and `decode_attention` promise none of it: their blocks
follow the shapes, which is faster. Next: aligned_blocks.py, then pallas_kernels/tiles.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import floats, products, scale_of, window_size
from pallas_kernels.masks import Layout, visible
from pallas_kernels.sink_attention.aligned_blocks import (
    FAR,
    KEYS,
    Blocks,
    at,
    ring_of_blocks,
    sorted_blocks,
)
from pallas_kernels.sink_attention.api import sink_attention_backward
from pallas_kernels.sink_attention.common import (
    backward_sums,
    check,
    checked_layout,
    named,
    same_batch,
)
from pallas_kernels.sink_attention.reference import UNSEEN
from pallas_kernels.tiles import hidden, shown, turn_of, unknown, with_turn

SCORES = 4  # rows of a product: queries times heads per key head; a decode step fills one query's
PAIRS = 64  # of a batch row and some of its queries, in one product

# of rows and slots: float32 keys or values [P, X, K, H], whole rows of memory at a time
Read = Callable[[Array, Array], Array]


def aligned_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    sink_N: Float[Array, " N"],
    *,
    q_positions_BT: Int[Array, "B T"],
    k_positions_BS: Int[Array, "B S"],
    q_segment_ids_BT: Int[Array, "B T"],
    k_segment_ids_BS: Int[Array, "B S"],
    window: int | None = None,
    scale: float | None = None,
    ring: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`sink_attention`, whose (o, lse) of a query are the same bits in every layout and batch.

    z = scale·q·k over the keys a query sees;  lse = log(Σ e^z + e^sink);  o = Σ e^{z − lse}·v

    Args: see `sink_attention`. A position is in a segment once.
        ring: the keys of a row are of one segment, less than S positions apart, as in a cache:
            they are placed without sorting them.
    Numerics: float32 but for what is read and returned; keys in blocks of KEYS positions from 0
        on, the sink first. The gradients are those of `sink_attention_backward` from this (o, lse).
    Raises: ValueError for shapes that do not fit.
    """
    q, k, v, sink = (
        floats(name, x)
        for name, x in (("q", q_BTNH), ("k", k_BSKH), ("v", v_BSKH), ("sink", sink_N))
    )
    check(q, k, v, sink)
    same_batch(q, k)
    layout = checked_layout(
        Layout(q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS), q, k
    )
    where = window_size(window), scale_of(scale, q.shape[3]), ring
    return _aligned(q, k, v, sink, layout, *where)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _aligned(
    q: Array, k: Array, v: Array, sink: Array, layout: Layout, window: int, scale: float, ring: bool
) -> tuple[Array, Array]:
    return _forward(q, k, v, sink, layout, window, scale, ring)[0]


def _forward(
    q: Array, k: Array, v: Array, sink: Array, layout: Layout, window: int, scale: float, ring: bool
) -> Any:
    o, lse = named(*_in_blocks(q, k, v, sink, layout, window, scale, ring))
    return (o, lse), (q, k, v, sink, layout, o, lse)


def _backward(window: int, scale: float, ring: bool, saved: Any, cotangents: Any) -> Any:
    q, k, v, sink, layout, o, lse = saved
    do, dlse = cotangents
    lse, delta, dsink = backward_sums(o, lse, sink, do, dlse)
    dq, dk, dv = sink_attention_backward(
        q, k, v, do, lse, delta, q_positions_BT=layout.q_positions_BT,
        k_positions_BS=layout.k_positions_BS, q_segment_ids_BT=layout.q_segment_ids_BT,
        k_segment_ids_BS=layout.k_segment_ids_BS, window=window or None, scale=scale,
    )  # fmt: skip
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsink, None


_aligned.defvjp(_forward, _backward)


def _in_blocks(
    q: Array, k: Array, v: Array, sink: Array, layout: Layout, window: int, scale: float, ring: bool
) -> tuple[Array, Array]:
    """(o, lse), PAIRS of (batch row, queries) at a time."""
    (B, T, N, H), K = q.shape, k.shape[2]
    G = N // K
    rows = max(1, SCORES // G)  # queries of a pair
    n = -(-T // rows)
    blocks, ranges_BT = (ring_of_blocks if ring else sorted_blocks)(layout, window)
    turns = -(-B * n // PAIRS)

    def cut(x: Array, fill: int = 0) -> Array:
        """[B, T, …] to [pairs, rows, …], whole turns of them."""
        more = ((0, 0), (0, n * rows - x.shape[1]), *((0, 0) for _ in x.shape[2:]))
        x = jnp.pad(x, more, constant_values=fill).reshape(B * n, rows, *x.shape[2:])
        more = ((0, turns * PAIRS - B * n), *((0, 0) for _ in x.shape[1:]))
        return jnp.pad(x, more, constant_values=fill)

    of_row = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], (B, T))
    every = _Pairs(
        cut(q.astype(jnp.float32)), jnp.max(cut(of_row), axis=1),
        jnp.min(cut(ranges_BT[0], FAR), axis=1), jnp.max(cut(ranges_BT[1]), axis=1),
        cut(layout.q_positions_BT), cut(layout.q_segment_ids_BT),
    )  # fmt: skip
    # those of as many blocks together: a turn takes as long as its longest
    order = (
        jnp.argsort(every.end_P - jnp.minimum(every.begin_P, every.end_P)) if turns > 1 else None
    )
    if order is not None:
        every = jax.tree.map(lambda x: at(x, order), every)
    every = jax.tree.map(lambda x: x.reshape(turns, PAIRS, *x.shape[1:]), every)
    keys, values = _reader(k), _reader(v)
    sink_KR = jnp.tile(sink.astype(jnp.float32).reshape(K, G), (1, rows))

    def turn(i: Array, out: Array) -> Array:
        pairs = jax.tree.map(lambda x: turn_of(x, i), every)
        return with_turn(out, _attend(pairs, keys, values, sink_KR, blocks, window, scale), i)

    empty = jnp.zeros((turns, PAIRS, K, rows * G, H + 1), jnp.float32)
    made = lax.fori_loop(0, unknown(turns), turn, empty)
    made = made.reshape(turns * PAIRS, K, rows, G, H + 1)
    if order is not None:
        made = at(made, jnp.zeros_like(order).at[order].set(jnp.arange(len(order))))
    made = made[: B * n].transpose(0, 2, 1, 3, 4).reshape(B, n * rows, N, H + 1)[:, :T]
    return made[..., :H].astype(q.dtype), made[..., H]


class _Pairs(NamedTuple):
    """Pairs of a batch row and some of its queries."""

    q_PRNH: Array
    row_P: Array
    begin_P: Array  # the blocks that its queries need, of those of its row
    end_P: Array
    positions_PR: Array
    segments_PR: Array


def _attend(
    pairs: _Pairs, keys: Read, values: Read, sink_KR: Array, blocks: Blocks, window: int,
    scale: float,
) -> Array:  # fmt: skip
    """Float32 o and lse, [P, K, R, H + 1], of pairs; R are queries times heads per key head.

    In one array: of two the compiler would leave out what nobody reads, and compile the other anew.
    """
    (P, rows, _, H), K = pairs.q_PRNH.shape, sink_KR.shape[0]
    q_PKRH = pairs.q_PRNH.reshape(P, rows, K, -1, H).transpose(0, 2, 1, 3, 4).reshape(P, K, -1, H)
    row_P, begin_P, end_P = pairs.row_P, pairs.begin_P, pairs.end_P
    positions_PR1, segments_PR1 = (
        jnp.repeat(x, q_PKRH.shape[2] // rows, axis=1)[:, None, :, None]
        for x in (pairs.positions_PR, pairs.segments_PR)
    )

    def block(carry: Any) -> Any:
        i, top, total, acc = carry
        # a pair that has come to its end reads its last block again, and sees nothing of it
        here = row_P, jnp.clip(begin_P + i, 0, jnp.maximum(end_P - 1, 0))
        slot_PX = at(blocks.slot_BCX, *here)
        segment_P = jnp.where(begin_P + i < end_P, at(blocks.segment_BC, *here), 0)
        wanted_PX = (
            at(blocks.block_BC, *here)[:, None] * KEYS + jnp.arange(KEYS, dtype=jnp.int32)[None]
        )
        keys_PX = jnp.where(slot_PX >= 0, segment_P[:, None], 0)
        slot_PX = jnp.where(slot_PX >= 0, slot_PX, ~slot_PX)
        k_PXKH, v_PXKH = keys(row_P, slot_PX), values(row_P, slot_PX)
        seen = visible(
            positions_PR1, wanted_PX[:, None, None, :], window, segments_PR1,
            keys_PX[:, None, None, :],
        )  # fmt: skip
        z = jnp.where(seen, _dot(q_PKRH, k_PXKH, 3, 3) * scale, UNSEEN)
        new = jnp.maximum(top, jnp.max(z, axis=3, keepdims=True))
        p, shrink = jnp.exp(z - new), jnp.exp(top - new)
        total = total * shrink + jnp.sum(p, axis=3, keepdims=True)
        acc = acc * shrink + _dot(p, v_PXKH, 3, 1)
        return i + 1, new, total, acc

    sink_1KR1 = sink_KR[None, :, :, None]
    top = jnp.broadcast_to(jnp.maximum(sink_1KR1, UNSEEN / 2), (*q_PKRH.shape[:3], 1))
    total = jnp.exp(sink_1KR1 - top)
    carry = (jnp.int32(0), top, total, jnp.zeros(q_PKRH.shape, jnp.float32))
    most = jnp.max(end_P - begin_P)
    _, top, total, acc = lax.while_loop(lambda carry: carry[0] < most, block, carry)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
    # of pairs that see nothing: what they read may be anything
    acc = jnp.where((begin_P < end_P)[:, None, None, None], acc / safe, 0.0)
    return jnp.concatenate([acc, lse], axis=3)


def _reader(x_BSKH: Array) -> Read:
    S, K, H = x_BSKH.shape[1:]
    bits_MF = hidden(x_BSKH.reshape(-1, K * H))

    def read(row_P: Array, slot_PX: Array) -> Array:
        rows = at(bits_MF, (row_P[:, None] * S + slot_PX).reshape(-1))
        return shown(rows, x_BSKH.dtype).astype(jnp.float32).reshape(*slot_PX.shape, K, H)

    return read


def _dot(a_PKRY: Array, b_PXKH: Array, contract_a: int, contract_b: int) -> Array:
    """Over an axis of a and one of keys or values, for each pair and key head."""
    dims = (((contract_a,), (contract_b,)), ((0, 1), (0, 2)))
    return lax.dot_general(a_PKRY, b_PXKH, dims, precision=products(a_PKRY.dtype))
