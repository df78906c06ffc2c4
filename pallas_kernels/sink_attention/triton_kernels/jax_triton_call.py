# SPDX-License-Identifier: Apache-2.0
"""Sink attention in Triton, called from JAX, for GPUs before Hopper.

A row of the kernels is one query of one head; the heads of a key head are adjacent. This module
computes the tables of blocks to visit from positions and segments, Δ and the sinks' gradient.
triton and jax-triton are imported when the first call is traced. Next: triton_kernel.py.
"""

import inspect
from functools import partial
from typing import Any

import jax
import jax.interpreters.partial_eval
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.blocks import block_ranges, block_table
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import signature as sig
from pallas_kernels.sink_attention.common import positive_scale
from pallas_kernels.sink_attention.gradients import attend_with_gradients
from pallas_kernels.sink_attention.triton_kernels import triton_launch as launch


def _triton_call(name: str, tiles: launch.TritonTiles, grid, out, args, constants) -> Any:
    """Call one kernel through jax-triton 0.3 (for JAX before 0.11) or later."""
    import jax_triton  # pyright: ignore[reportMissingImports]
    from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

    from pallas_kernels.sink_attention.triton_kernels import triton_kernel

    _accept_live_inputs(triton_lib.triton_kernel_call_p)
    fusion = {"enable_fp_fusion": False}  # see triton_kernel.py
    is_new_api = "out_type" in inspect.signature(jax_triton.triton_call).parameters
    options = (
        {"out_type": out, "backend_options": fusion} if is_new_api else {"out_shape": out} | fusion
    )
    return jax_triton.triton_call(
        *args,
        kernel=getattr(triton_kernel, name),
        grid=grid,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **options,
        **constants,
    )


def _accept_live_inputs(primitive: Any) -> None:
    """Adapt the primitive's rule of dead-code elimination to JAX 0.12, which adds an argument.

    jax-triton 0.4.1 does not accept it. The wrapped rule behaves the same in every version.
    """
    rules = jax.interpreters.partial_eval.dce_rules
    rule = rules.get(primitive)
    if rule is not None and len(inspect.signature(rule).parameters) == 2:
        rules[primitive] = lambda used_outs, *dce_args: rule(used_outs, dce_args[-1])


def _head_sizes(q: Array, k: Array) -> tuple[int, int, int, int, int]:
    """K, G, H and the lengths T and S."""
    return k.shape[2], q.shape[2] // k.shape[2], q.shape[3], q.shape[1], k.shape[1]


def _block_tables(layout, G, rows, keys, window):
    """(needed, full), [B, n, m] each, for pairs of a tile of rows and a block of keys."""
    T, S = layout.q_positions_BT.shape[1], layout.k_positions_BS.shape[1]
    more_rows = launch.count_blocks(T * G, rows) * rows - T * G
    more_keys = launch.count_blocks(S, keys) * keys - S
    return block_table(
        layout.repeat_queries(G).with_padding(more_rows, more_keys), rows, keys, window
    )


def _scalar_args(q: Array, k: Array) -> tuple[int, ...]:
    def strides(x):  # of batch, time and head, in elements; the arrays of JAX are dense
        return x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[3]

    lengths = launch.negated_lengths(q.shape[1], k.shape[1])
    return lengths + launch.strides_in_units(strides(q), strides(k), strides(k))


def _run_forward(q, k, v, sink, layout, window, scale):
    B, N = q.shape[0], q.shape[2]
    K, G, H, T, S = _head_sizes(q, k)
    tiles = launch.triton_forward_tiles(H, q.dtype.itemsize)
    table = block_ranges(*_block_tables(layout, G, tiles.rows, tiles.keys, window))
    out = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, T, N), jnp.float32))
    return _triton_call(
        "forward_kernel",
        tiles,
        (table.shape[1], B * K),
        out,
        (q, k, v, sink.astype(jnp.float32), *layout.unshared_arrays(), table, *_scalar_args(q, k)),
        launch.kernel_constants(K, G, H, window, scale, tiles),
    )


def _run_backward(q, k, v, dout, lse, delta, layout, window, scale):
    B = q.shape[0]
    K, G, H, T, S = _head_sizes(q, k)
    row_args = (dout, lse, delta, *_scalar_args(q, k))

    tiles = launch.triton_dq_tiles(H, q.dtype.itemsize)
    table = block_ranges(*_block_tables(layout, G, tiles.rows, tiles.keys, window))
    dq = _triton_call(
        "dq_kernel",
        tiles,
        (table.shape[1], B * K),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        (q, k, v, *layout.unshared_arrays(), table, *row_args),
        launch.kernel_constants(K, G, H, window, scale, tiles),
    )

    tiles = launch.triton_dkv_tiles(H, q.dtype.itemsize)
    needed, full = _block_tables(layout, G, tiles.rows, tiles.keys, window)
    table = block_ranges(needed.transpose(0, 2, 1), full.transpose(0, 2, 1))
    like_k = jax.ShapeDtypeStruct(k.shape, k.dtype)
    dk, dv = _triton_call(
        "dkv_kernel",
        tiles,
        (table.shape[1], B * K),
        (like_k, like_k),
        (q, k, v, *layout.unshared_arrays(), table, *row_args),
        launch.kernel_constants(K, G, H, window, scale, tiles),
    )
    return dq, dk, dv


def sink_attention_triton(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    sink_N: sig.Sinks,
    layout: Layout,
    window: int,
    scale: float,
) -> sig.Result:
    """(o, lse); see `sink_attention_reference` for the formula."""
    q, scale, _ = positive_scale(q_BTNH, scale)
    forward, gradients = (
        partial(x, window=window, scale=scale) for x in (_run_forward, _run_backward)
    )
    return attend_with_gradients(forward, gradients, q, k_BSKH, v_BSKH, sink_N, layout)


def sink_attention_backward_triton(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    dout_BTNH: sig.Queries,
    lse_BTN: sig.Rows,
    delta_BTN: sig.Rows,
    layout: Layout,
    window: int,
    scale: float,
) -> sig.Gradients:
    """(dq, dk, dv); see `sink_attention_backward_reference` for the formula.

    Each is rounded to the dtype of q.
    """
    q, scale, sign = positive_scale(q_BTNH, scale)
    rows = dout_BTNH, lse_BTN, delta_BTN
    gradients = _run_backward(q, k_BSKH, v_BSKH, *rows, layout, window, scale)
    dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
    return dq * sign, dk, dv


def sink_attention_triton_unsupported(q_BTNH: Any, k_BSKH: Any) -> str | None:
    """The reason why these shapes cannot run, or None."""
    if launch.find_missing_package("jax_triton", "triton"):
        return "needs jax-triton: pip install jax-triton"
    return launch.triton_shape_unsupported(q_BTNH.shape[3], q_BTNH.dtype.name)


sink_attention_backward_triton_unsupported = sink_attention_triton_unsupported
