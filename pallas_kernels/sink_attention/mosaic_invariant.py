# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant sink attention on GPU and TPU: kernels with key blocks of one size, in order.

A query adds up its keys in the same blocks and the same order in a training forward, a prefill and
a decode step. A block that only other queries of its tile need adds exact zeros. Blocks begin at
multiples of their size from column 0, so each key must be in the column of its position. Keys of a
cache are moved there first; rows of a trainer already are so (one sequence from column 0, or
several that begin at multiples of BLOCK). The same kernels under their own names choose order and
size of their blocks for speed. Next: xla_invariant.py, the same on a CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.dispatch import kernel_module, kernels_unsupported
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import signature as sig
from pallas_kernels.sink_attention.gradients import attend_with_gradients

_HERE = "pallas_kernels.sink_attention"
# A multiple of the key block of every kernel: keys that are moved by whole blocks stay in the same
# block of the kernel.
BLOCK = 256


def sink_attention_mosaic_invariant(
    kernels: str,
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    sink_N: sig.Sinks,
    layout: Layout,
    window: int,
    scale: float,
    *,
    cache: bool | None = None,
    interpret: bool = False,
) -> sig.Result:
    """Batch-invariant (o, lse) by `kernels`: a query's bits depend on its own keys alone.

    If the keys are no cache, that holds for sequences of a row that begin at a column that is a
    multiple of BLOCK. Queries and keys of a row of a cache are of one segment. Its keys are in any
    order, at most S positions apart and, without a window, below S; its queries at most T apart.

    Args:
        kernels: mosaic_gpu or mosaic_tpu.
        cache: by default True where S ≠ T.
    Numerics: as of the kernel; the gradients are those of its backward.
    """
    layout.unshared_arrays()  # raises for shared keys, which would come in blocks of other sizes
    if q_BTNH.shape[1] != k_BSKH.shape[1] if cache is None else cache:
        k_BSKH, v_BSKH, layout = order_by_position(k_BSKH, v_BSKH, layout, window)
    statics = dict(window=window, scale=scale, interpret=interpret)
    module = kernel_module(_HERE, kernels)
    forward = partial(getattr(module, f"sink_attention_{kernels}_invariant"), **statics)
    gradients = partial(getattr(module, f"sink_attention_backward_{kernels}"), **statics)
    return attend_with_gradients(
        partial(_run_unfused, forward), gradients, q_BTNH, k_BSKH, v_BSKH, sink_N, layout
    )


def sink_attention_mosaic_invariant_unsupported(
    kernels: str, q_BTNH: Any, k_BSKH: Any, *, cache: bool | None = None
) -> str | None:
    """The reason why the kernels cannot take these shapes, or None."""
    B, S, K, H = k_BSKH.shape
    if q_BTNH.shape[1] != S if cache is None else cache:
        k_BSKH = jax.ShapeDtypeStruct((B, -(-S // BLOCK) * BLOCK, K, H), k_BSKH.dtype)
    return kernels_unsupported(_HERE, "sink_attention", kernels, q_BTNH, k_BSKH)


# In a decode step the keys are a cache even if there are as many queries as keys.
decode_attention_mosaic_invariant = partial(sink_attention_mosaic_invariant, cache=True)
decode_attention_mosaic_invariant_unsupported = partial(
    sink_attention_mosaic_invariant_unsupported, cache=True
)


def _run_unfused(
    forward: Callable[..., sig.Result], q: Array, k: Array, v: Array, sink: Array, layout: Layout
) -> sig.Result:
    """forward(…) behind barriers: XLA must not fuse inputs or outputs with other operations."""
    barrier: Any = lax.optimization_barrier
    return barrier(forward(*barrier((q, k, v, sink)), layout))


def order_by_position(
    k_BSKH: sig.Keys, v_BSKH: sig.Keys, layout: Layout, window: int
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
        # The first key may be anywhere in its block, which adds up to BLOCK − 1 columns.
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
    """(slot, valid) of the segment's keys at these positions, found by position modulo S."""
    segments_BS, positions_BS = layout.k_segment_ids_BS, layout.k_positions_BS
    B, S = positions_BS.shape
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    # other segments and padding are dropped
    residue_BS = jnp.where(segments_BS == segment_B[:, None], positions_BS % S, S)
    slots_BS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    table_BS = jnp.zeros((B, S), jnp.int32).at[row_B1, residue_BS].set(slots_BS, mode="drop")
    slot_BC = table_BS[row_B1, positions_BC % S]
    valid_BC = (segments_BS[row_B1, slot_BC] == segment_B[:, None]) & (segment_B[:, None] > 0)
    return slot_BC, valid_BC & (positions_BS[row_B1, slot_BC] == positions_BC)
