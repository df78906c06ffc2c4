# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant sink attention on GPU and TPU: kernels with key blocks of one size, in order.

A query adds up its keys in the same blocks and the same order in a training forward, a prefill and
a decode step. A block that only other queries of its tile need adds exact zeros. Blocks begin at
multiples of their size from column 0, so each key must be in the column of its position. Keys of a
cache are moved there first; rows of a trainer already are so (one sequence from column 0, or
several that begin at multiples of BLOCK). `sink_attention` instead chooses order and size of its
blocks for speed. Next: xla_invariant.py, the same on a CPU.
"""

import importlib
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import as_floats, resolve_scale, window_size
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.common import (
    as_int32_layout,
    backward_sums,
    check_attention_arrays,
    check_same_batch,
    name_for_checkpoint,
)

Chip = Literal["mosaic_gpu", "mosaic_tpu"]
BLOCK = 256  # positions; a multiple of the key block of every kernel


def sink_attention_mosaic_invariant(
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
    """Batch-invariant `sink_attention` by `impl`: a query's bits depend on its own keys alone.

    Args: see `sink_attention`. If S = T, queries and keys are the same tokens, and each sequence
        of a row begins at a column that is a multiple of BLOCK. If S ≠ T, the keys are a cache:
        those of a row are of one segment, in any order, at most S positions apart and, without a
        window, below S; its queries are at most T apart.
    Numerics: as of the kernel; the gradients are those of its backward.
    Raises: ValueError for shapes that do not fit.
    """
    q, k, v, sink = (
        as_floats(name, x)
        for name, x in (("q", q_BTNH), ("k", k_BSKH), ("v", v_BSKH), ("sink", sink_N))
    )
    check_attention_arrays(q, k, v, sink)
    check_same_batch(q, k)
    layout = as_int32_layout(
        Layout(q_positions_BT, k_positions_BS, q_segment_ids_BT, k_segment_ids_BS), q, k
    )
    window_keys = window_size(window)
    if k.shape[1] != q.shape[1]:
        k, v, layout = order_by_position(k, v, layout, window_keys)
    return _attend_ordered(
        q, k, v, sink, layout, window_keys, resolve_scale(scale, q.shape[3]), impl, interpret
    )


def order_by_position(
    k_BSKH: Float[Array, "B S K H"], v_BSKH: Float[Array, "B S K H"], layout: Layout, window: int
) -> tuple[Array, Array, Layout]:
    """(k, v, layout) of a cache with each key moved to the column of its position.

    With a window only keys that a query can see are kept: columns count from the multiple of BLOCK
    at or before the first of them.
    """
    T, S = layout.q_positions_BT.shape[1], layout.k_positions_BS.shape[1]
    first_B1, length = jnp.zeros((layout.q_positions_BT.shape[0], 1), jnp.int32), S
    if window:
        is_query, highest = layout.q_segment_ids_BT > 0, jnp.iinfo(jnp.int32).max
        positions_BT = layout.q_positions_BT
        first_B1 = (
            jnp.min(jnp.where(is_query, positions_BT, highest), axis=1, keepdims=True) - window + 1
        )
        last_B1 = jnp.max(jnp.where(is_query, positions_BT, 0), axis=1, keepdims=True)
        first_B1 = jnp.minimum(first_B1, last_B1)  # for a row without queries
        first_B1 = jnp.maximum(jnp.maximum(first_B1, last_B1 - S + 1), 0) // BLOCK * BLOCK
        length = min(window + T - 1, S) + BLOCK - 1
    columns = jnp.arange(-(-length // BLOCK) * BLOCK, dtype=jnp.int32)
    positions_BC = first_B1 + columns[None, :]
    segment_B = jnp.max(layout.q_segment_ids_BT, axis=1)
    slot_BC, valid_BC = _find_slots(layout, segment_B, positions_BC)

    def gather_columns(x_BSKH: Array) -> Array:
        x_BCKH = jnp.take_along_axis(x_BSKH, slot_BC[:, :, None, None], axis=1)
        return jnp.where(valid_BC[:, :, None, None], x_BCKH, jnp.zeros_like(x_BCKH))

    segments_BC = jnp.where(valid_BC, segment_B[:, None], 0)
    moved = layout._replace(k_positions_BS=positions_BC, k_segment_ids_BS=segments_BC)
    return gather_columns(k_BSKH), gather_columns(v_BSKH), moved


def _find_slots(layout: Layout, segment_B: Array, positions_BC: Array) -> tuple[Array, Array]:
    """(slot, valid) of the keys at these positions, found by position modulo S."""
    segments_BS, positions_BS = layout.k_segment_ids_BS, layout.k_positions_BS
    B, S = positions_BS.shape
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    residue_BS = jnp.where(segments_BS > 0, positions_BS % S, S)  # padding is dropped
    slots_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    table_BS = jnp.zeros((B, S), jnp.int32).at[row_B1, residue_BS].set(slots_BS, mode="drop")
    slot_BC = table_BS[row_B1, positions_BC % S]
    valid_BC = (segments_BS[row_B1, slot_BC] == segment_B[:, None]) & (segment_B[:, None] > 0)
    return slot_BC, valid_BC & (positions_BS[row_B1, slot_BC] == positions_BC)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _attend_ordered(
    q: Array, k: Array, v: Array, sink: Array, layout: Layout, window: int, scale: float,
    impl: Chip, interpret: bool,
) -> tuple[Array, Array]:  # fmt: skip
    # The barriers keep XLA from fusing the kernel's inputs and outputs with surrounding operations.
    barrier: Any = lax.optimization_barrier
    results = getattr(_kernel_module(impl), f"sink_attention_{impl}_invariant")(
        *barrier((q, k, v, sink)), layout, window, scale, interpret
    )
    return barrier(results)


def _attend_ordered_fwd(q, k, v, sink, layout, window, scale, impl, interpret):
    results: Any = _attend_ordered(q, k, v, sink, layout, window, scale, impl, interpret)
    o, lse = name_for_checkpoint(*results)
    return (o, lse), (q, k, v, sink, layout, o, lse)


def _attend_ordered_bwd(window, scale, impl, interpret, saved, cotangents):
    q, k, v, sink, layout, o, lse = saved
    dout, dlse = cotangents
    lse, delta, dsink = backward_sums(o, lse, sink, dout, dlse)
    run = getattr(_kernel_module(impl), f"sink_attention_backward_{impl}")
    dq, dk, dv = run(q, k, v, dout, lse, delta, layout, window, scale, interpret=interpret)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dsink, None


_attend_ordered.defvjp(_attend_ordered_fwd, _attend_ordered_bwd)


def _kernel_module(impl: Chip) -> Any:
    name = f"pallas_kernels.sink_attention.{impl.replace('mosaic', 'pallas')}"
    return importlib.import_module(name)
