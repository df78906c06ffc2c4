# SPDX-License-Identifier: Apache-2.0
"""Sink attention by a chip's kernel whose blocks of keys are visited by position, all in one size.

A query then adds up its keys in the same blocks and the same order in a training forward, a prefill
and a decode step; a block that others of its tile need and it does not adds exact zeros. Blocks
begin at multiples of their size from column 0, so there must be a key's position: keys of a cache
are brought there first, and rows of a trainer lie so (one sequence from column 0, or several that
begin at multiples of BLOCK). `sink_attention` orders and sizes its blocks by what is fastest.
Next: aligned.py, the same on a CPU.
"""

import importlib
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import floats, scale_of, window_size
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.common import (
    backward_sums,
    check,
    checked_layout,
    named,
    same_batch,
)

Chip = Literal["mosaic_gpu", "mosaic_tpu"]
BLOCK = 256  # positions: a multiple of every kernel's block of keys


def ordered_attention(
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
    impl: Chip,
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`sink_attention` by `impl`, whose (o, lse) of a query are the same bits in every batch.

    Args: see `sink_attention`. Where S = T the keys are the queries' own, each sequence of a row
        from a column on that is a multiple of BLOCK. Where S ≠ T they are a cache's: a row's are of
        one segment, in any order, at most S positions apart and without a window below S; its
        queries are at most T apart.
    Numerics: the kernel's; gradients are its backward's.
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
    reach = window_size(window)
    if k.shape[1] != q.shape[1]:
        k, v, layout = by_position(k, v, layout, reach)
    return _ordered(q, k, v, sink, layout, reach, scale_of(scale, q.shape[3]), impl, interpret)


def by_position(
    k_BSKH: Float[Array, "B S K H"], v_BSKH: Float[Array, "B S K H"], layout: Layout, window: int
) -> tuple[Array, Array, Layout]:
    """Keys and values of a cache, each in the column of its position, and where they then lie.

    Behind a window only those that a query may see: columns count from the multiple of BLOCK at or
    before the first of them.
    """
    T, S = layout.q_positions_BT.shape[1], layout.k_positions_BS.shape[1]
    first_B1, length = jnp.zeros((layout.q_positions_BT.shape[0], 1), jnp.int32), S
    if window:
        asks, highest = layout.q_segment_ids_BT > 0, jnp.iinfo(jnp.int32).max
        at_BT = layout.q_positions_BT
        first_B1 = jnp.min(jnp.where(asks, at_BT, highest), axis=1, keepdims=True) - window + 1
        last_B1 = jnp.max(jnp.where(asks, at_BT, 0), axis=1, keepdims=True)
        first_B1 = jnp.minimum(first_B1, last_B1)  # of a row that asks for nothing
        first_B1 = jnp.maximum(jnp.maximum(first_B1, last_B1 - S + 1), 0) // BLOCK * BLOCK
        length = min(window + T - 1, S) + BLOCK - 1
    columns = jnp.arange(-(-length // BLOCK) * BLOCK, dtype=jnp.int32)
    positions_BC = first_B1 + columns[None, :]
    segment_B = jnp.max(layout.q_segment_ids_BT, axis=1)
    slot_BC, there_BC = _slots(layout, segment_B, positions_BC)

    def placed(x_BSKH: Array) -> Array:
        x_BCKH = jnp.take_along_axis(x_BSKH, slot_BC[:, :, None, None], axis=1)
        return jnp.where(there_BC[:, :, None, None], x_BCKH, jnp.zeros_like(x_BCKH))

    segments_BC = jnp.where(there_BC, segment_B[:, None], 0)
    moved = layout._replace(k_positions_BS=positions_BC, k_segment_ids_BS=segments_BC)
    return placed(k_BSKH), placed(v_BSKH), moved


def _slots(layout: Layout, segment_B: Array, positions_BC: Array) -> tuple[Array, Array]:
    """Where the keys of these positions lie, and whether they are there: by position modulo S."""
    segments_BS, held_BS = layout.k_segment_ids_BS, layout.k_positions_BS
    B, S = held_BS.shape
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    at_BS = jnp.where(segments_BS > 0, held_BS % S, S)  # padding is written nowhere
    slots_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    table_BS = jnp.zeros((B, S), jnp.int32).at[row_B1, at_BS].set(slots_BS, mode="drop")
    slot_BC = table_BS[row_B1, positions_BC % S]
    there_BC = (segments_BS[row_B1, slot_BC] == segment_B[:, None]) & (segment_B[:, None] > 0)
    return slot_BC, there_BC & (held_BS[row_B1, slot_BC] == positions_BC)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _ordered(
    q: Array, k: Array, v: Array, sink: Array, layout: Layout, window: int, scale: float,
    impl: Chip, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    # what comes before and after is computed alike whatever stands around it
    apart: Any = lax.optimization_barrier
    made = _kernels(impl).in_order(*apart((q, k, v, sink)), layout, window, scale, interpret)
    return apart(made)


def _forward(q, k, v, sink, layout, window, scale, impl, interpret):
    made: Any = _ordered(q, k, v, sink, layout, window, scale, impl, interpret)
    o, lse = named(*made)
    return (o, lse), (q, k, v, sink, layout, o, lse)


def _backward(window, scale, impl, interpret, saved, cotangents):
    q, k, v, sink, layout, o, lse = saved
    do, dlse = cotangents
    lse, delta, dsink = backward_sums(o, lse, sink, do, dlse)
    run = getattr(_kernels(impl), f"{impl}_backward")
    dq, dk, dv = run(q, k, v, do, lse, delta, layout, window, scale, interpret=interpret)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsink, None


_ordered.defvjp(_forward, _backward)


def _kernels(impl: Chip) -> Any:
    name = f"pallas_kernels.sink_attention.{impl.replace('mosaic', 'pallas')}"
    return importlib.import_module(name)
