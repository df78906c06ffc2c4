# SPDX-License-Identifier: Apache-2.0
"""Sink attention whose blocks of keys begin at multiples of their size from position 0.

Whatever slot a key lies in, whatever else is in its row and however many queries are asked, a query
sums its keys in the same blocks, in arrays of the same shape: its bits depend on its own past
alone, in a training forward, a prefill of any length and a decode step. A block that it does not
see adds exact zeros. `sink_attention` and `decode_attention` promise none of it: their blocks
follow the shapes, which is faster. Next: pallas_kernels/tiles.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import floats, products, scale_of, window_size
from pallas_kernels.masks import Layout, visible
from pallas_kernels.sink_attention.api import sink_attention_backward
from pallas_kernels.sink_attention.common import (
    backward_sums,
    check,
    checked_layout,
    named,
    same_batch,
)
from pallas_kernels.sink_attention.reference import UNSEEN
from pallas_kernels.tiles import unknown

KEYS = 32  # of a block
SCORES = 4  # rows of a product: queries times heads per key head; a decode step fills one query's
PAIRS = 64  # of a batch row and some of its queries, in one product
_NOBODY = 2**31 - 1  # the segment of a key that is padding, behind all others

# of (row, segment, positions): the slots of these keys, and whether they are there
Find = Callable[[Array, Array, Array], tuple[Array, Array]]


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
        ring: the keys of a row are of one segment, at most S positions apart, as in a cache: they
            are found without sorting them.
    Numerics: as sink_attention's; keys in blocks of KEYS positions from 0 on, the sink first. The
        gradients are those of `sink_attention_backward` from this (o, lse).
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
    find = (ring_of_keys if ring else sorted_keys)(layout)
    layout = layout.padded(n * rows - T, 0)
    turns = -(-B * n // PAIRS)

    def cut(x: Array) -> Array:
        """[B, n·rows, …] to [turns, PAIRS, rows, …]."""
        x = x.reshape(B * n, rows, *x.shape[2:])
        more = ((0, turns * PAIRS - B * n), *((0, 0) for _ in x.shape[1:]))
        return jnp.pad(x, more).reshape(turns, PAIRS, *x.shape[1:])

    queries = cut(jnp.pad(q, ((0, 0), (0, n * rows - T), (0, 0), (0, 0))))
    positions, segments = cut(layout.q_positions_BT), cut(layout.q_segment_ids_BT)
    of_row = cut(jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], (B, n * rows)))
    sink_KR = jnp.tile(sink.astype(jnp.float32).reshape(K, G), (1, rows))

    def turn(i: Array, out: Array) -> Array:
        def of(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, i, keepdims=False)

        q_PRKGH = of(queries).reshape(PAIRS, rows, K, G, H)
        q_PKRH = q_PRKGH.transpose(0, 2, 1, 3, 4).reshape(PAIRS, K, rows * G, H)
        made = _pairs(
            q_PKRH,
            of(positions),
            of(segments),
            of(of_row)[:, 0],
            k,
            v,
            sink_KR,
            find,
            window,
            scale,
        )
        return lax.dynamic_update_index_in_dim(out, made, i, 0)

    empty = jnp.zeros((turns, PAIRS, K, rows * G, H + 1), jnp.float32)
    made = lax.fori_loop(0, unknown(turns), turn, empty)
    made = made.reshape(turns * PAIRS, K, rows, G, H + 1)[: B * n].transpose(0, 2, 1, 3, 4)
    made = made.reshape(B, n * rows, N, H + 1)[:, :T]
    return made[..., :H].astype(q.dtype), made[..., H]


class _Block(NamedTuple):
    """Where each pair is on its way through the blocks that its queries need."""

    segment_P: Array  # _NOBODY where it has come to an end
    block_P: Array


def _pairs(
    q_PKRH: Array, positions_PR: Array, segments_PR: Array, row_P: Array, k_BSKH: Array,
    v_BSKH: Array, sink_KR: Array, find: Find, window: int, scale: float,
) -> Array:  # fmt: skip
    """Float32 o and lse, [P, K, R, H + 1], of pairs of a batch row and some queries.

    In one array: of two the compiler would leave out what nobody reads, and compile the other anew.
    """
    heads = q_PKRH.shape[2] // positions_PR.shape[1]
    first_PR = jnp.maximum(positions_PR - window + 1, 0) if window else jnp.zeros_like(positions_PR)
    asks_PR = jnp.where(segments_PR > 0, segments_PR, _NOBODY)

    def blocks(segment_P: Array) -> tuple[Array, Array]:
        """First and last block that the queries of this segment need."""
        here_PR = asks_PR == segment_P[:, None]
        first_P = jnp.min(jnp.where(here_PR, first_PR, _NOBODY), axis=1) // KEYS
        return first_P, jnp.max(jnp.where(here_PR, positions_PR, 0), axis=1) // KEYS

    def start(segment_P: Array) -> _Block:
        return _Block(segment_P, blocks(segment_P)[0])

    def after(at: _Block) -> _Block:
        """The next block of this segment, or the first of the next one."""
        goes_on_P = at.block_P < blocks(at.segment_P)[1]
        later_PR = jnp.where(asks_PR > at.segment_P[:, None], asks_PR, _NOBODY)
        other = start(jnp.min(later_PR, axis=1))
        return _Block(
            jnp.where(goes_on_P, at.segment_P, other.segment_P),
            jnp.where(goes_on_P, at.block_P + 1, other.block_P),
        )

    positions_PR1, segments_PR1 = (
        jnp.repeat(x, heads, axis=1)[:, None, :, None] for x in (positions_PR, segments_PR)
    )

    def block(carry: Any) -> Any:
        at, top, total, acc = carry
        wanted_PS = at.block_P[:, None] * KEYS + jnp.arange(KEYS, dtype=jnp.int32)[None, :]
        slot_PS, there_PS = find(row_P, at.segment_P, wanted_PS)
        at_PS = row_P[:, None] * k_BSKH.shape[1] + slot_PS
        k_PSKH, v_PSKH = (_rows(x, at_PS) for x in (k_BSKH, v_BSKH))
        v_PSKH = jnp.where(there_PS[:, :, None, None], v_PSKH, jnp.zeros_like(v_PSKH))  # 0·NaN
        keys_PS = jnp.where(there_PS, at.segment_P[:, None], 0)[:, None, None, :]
        seen = visible(positions_PR1, wanted_PS[:, None, None, :], window, segments_PR1, keys_PS)
        z = jnp.where(seen, _dot(q_PKRH, k_PSKH, 3, 3) * scale, UNSEEN)
        new = jnp.maximum(top, jnp.max(z, axis=3, keepdims=True))
        p, shrink = jnp.exp(z - new), jnp.exp(top - new)
        total = total * shrink + jnp.sum(p, axis=3, keepdims=True)
        acc = acc * shrink + _dot(p.astype(v_PSKH.dtype), v_PSKH, 3, 1)
        return after(at), new, total, acc

    sink_1KR1 = sink_KR[None, :, :, None]
    top = jnp.broadcast_to(jnp.maximum(sink_1KR1, UNSEEN / 2), (*q_PKRH.shape[:3], 1))
    total = jnp.exp(sink_1KR1 - top)
    carry = (start(jnp.min(asks_PR, axis=1)), top, total, jnp.zeros(q_PKRH.shape, jnp.float32))
    _, top, total, acc = lax.while_loop(
        lambda carry: jnp.any(carry[0].segment_P != _NOBODY), block, carry
    )
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log(safe), -jnp.inf)
    return jnp.concatenate([acc / safe, lse], axis=3)


def _rows(x_BSKH: Array, at_PS: Array) -> Array:
    """Keys or values [P, S, K, H], whole rows of memory at a time."""
    flat = x_BSKH.reshape(-1, x_BSKH.shape[2] * x_BSKH.shape[3])
    rows = flat.at[at_PS.reshape(-1)].get(mode="promise_in_bounds")
    return rows.reshape(*at_PS.shape, *x_BSKH.shape[2:])


def _dot(a_PKRX: Array, b_PSKH: Array, contract_a: int, contract_b: int) -> Array:
    """Over an axis of a and one of keys or values, for each pair and key head."""
    dims = (((contract_a,), (contract_b,)), ((0, 1), (0, 2)))
    exact = products(a_PKRX.dtype, b_PSKH.dtype)
    return lax.dot_general(
        a_PKRX, b_PSKH, dims, precision=exact, preferred_element_type=jnp.float32
    )


def sorted_keys(layout: Layout) -> Find:
    """Keys in any order: sorted by segment and position once, then looked up by halving."""
    segments = jnp.where(layout.k_segment_ids_BS > 0, layout.k_segment_ids_BS, _NOBODY)
    slots = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    segments_BS, positions_BS, slots_BS = lax.sort(
        (segments, layout.k_positions_BS, slots), dimension=1, num_keys=2
    )
    size = segments_BS.shape[1]

    def find(row_P: Array, segment_P: Array, wanted_PS: Array) -> tuple[Array, Bool[Array, "P S"]]:
        row, segment = row_P[:, None], segment_P[:, None]
        low = jnp.zeros_like(wanted_PS)
        width = 1 << max(size - 1, 0).bit_length()
        while width > 1:  # low: so many keys are known to come before
            width //= 2
            at = jnp.minimum(low + width, size) - 1
            there, where = segments_BS[row, at], positions_BS[row, at]
            before = (there < segment) | ((there == segment) & (where < wanted_PS))
            low = jnp.where(before & (low + width <= size), low + width, low)
        low = jnp.minimum(low, size - 1)
        found = (segments_BS[row, low] == segment) & (positions_BS[row, low] == wanted_PS)
        return slots_BS[row, low], found & (segment != _NOBODY)

    return find


def ring_of_keys(layout: Layout) -> Find:
    """Keys of one segment a row, at most S positions apart: a table by position modulo S."""
    segments_BS, positions_BS = layout.k_segment_ids_BS, layout.k_positions_BS
    batch, size = positions_BS.shape
    row_B1 = jnp.arange(batch, dtype=jnp.int32)[:, None]
    at_BS = jnp.where(segments_BS > 0, positions_BS % size, size)  # padding is written nowhere
    slots_BS = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    table_BS = jnp.zeros((batch, size), jnp.int32).at[row_B1, at_BS].set(slots_BS, mode="drop")

    def find(row_P: Array, segment_P: Array, wanted_PS: Array) -> tuple[Array, Bool[Array, "P S"]]:
        row = row_P[:, None]
        slot = table_BS[row, wanted_PS % size]
        there = (segments_BS[row, slot] == segment_P[:, None]) & (segment_P[:, None] > 0)
        return slot, there & (positions_BS[row, slot] == wanted_PS)

    return find
