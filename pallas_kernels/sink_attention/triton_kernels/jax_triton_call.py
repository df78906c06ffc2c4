# SPDX-License-Identifier: Apache-2.0
"""Sink attention in Triton, called from JAX, for GPUs before Hopper.

A row of the kernels is one query of one head, the heads of a key head side by side; the tables of
blocks to visit are made here from positions and segments, as are Δ and the sinks' gradient.
triton and jax-triton are imported when the first call is traced. Next: triton_kernel.py.
"""

import inspect
from functools import partial
from typing import Any

import jax
import jax.interpreters.partial_eval
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.blocks import block_table, runs
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.common import backward_sums, named
from pallas_kernels.sink_attention.signature import (
    Gradients,
    Keys,
    Queries,
    Result,
    Rows,
    Sinks,
)
from pallas_kernels.sink_attention.triton_kernels import triton_launch as launch


def _triton_call(name: str, tiles: launch.TritonTiles, grid, out, args, constants) -> Any:
    """One kernel through jax-triton 0.3 (JAX before 0.11) or later."""
    import jax_triton  # pyright: ignore[reportMissingImports]
    from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

    from pallas_kernels.sink_attention.triton_kernels import triton_kernel

    _take_live_inputs(triton_lib.triton_kernel_call_p)
    fusion = {"enable_fp_fusion": False}  # triton_kernel.py says why
    later = "out_type" in inspect.signature(jax_triton.triton_call).parameters
    options = {"out_type": out, "backend_options": fusion} if later else {"out_shape": out} | fusion
    return jax_triton.triton_call(
        *args, kernel=getattr(triton_kernel, name), grid=grid, num_warps=tiles.warps,
        num_stages=tiles.stages, **options, **constants,
    )  # fmt: skip


def _take_live_inputs(primitive: Any) -> None:
    """Let JAX 0.12 remove dead code around the primitive: it gives rules one argument more.

    jax-triton 0.4.1 does not know of it; the rule wrapped here does the same in every version.
    """
    rules = jax.interpreters.partial_eval.dce_rules
    rule = rules.get(primitive)
    if rule is not None and len(inspect.signature(rule).parameters) == 2:
        rules[primitive] = lambda used_outs, *rest: rule(used_outs, rest[-1])


def _sizes(q: Array, k: Array) -> tuple[int, int, int, int, int]:
    """K, G, H and the lengths T and S."""
    return k.shape[2], q.shape[2] // k.shape[2], q.shape[3], q.shape[1], k.shape[1]


def _tables(layout, G, rows, keys, window):
    """Per pair of a tile of rows and a block of keys, [B, n, m]: needed and whole."""
    T, S = layout.q_positions_BT.shape[1], layout.k_positions_BS.shape[1]
    more_rows = launch.blocks(T * G, rows) * rows - T * G
    more_keys = launch.blocks(S, keys) * keys - S
    return block_table(layout.folded(G).padded(more_rows, more_keys), rows, keys, window)


def _scalars(q: Array, k: Array) -> tuple[int, ...]:
    def strides(x):  # of batch, time and head, in elements; the arrays of JAX are dense
        return x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], x.shape[3]

    lengths = launch.lengths(q.shape[1], k.shape[1])
    return lengths + launch.strides(strides(q), strides(k), strides(k))


def _forward(q, k, v, sink, layout, window, scale):
    B, N = q.shape[0], q.shape[2]
    K, G, H, T, S = _sizes(q, k)
    tiles = launch.forward_tiles(H, q.dtype.itemsize)
    table = runs(*_tables(layout, G, tiles.rows, tiles.keys, window))
    out = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, T, N), jnp.float32))
    return _triton_call(
        "forward_kernel", tiles, (table.shape[1], B * K), out,
        (q, k, v, sink.astype(jnp.float32), *layout, table, *_scalars(q, k)),
        launch.constants(K, G, H, window, scale, tiles),
    )  # fmt: skip


def _backward(q, k, v, layout, do, lse, delta, window, scale):
    B = q.shape[0]
    K, G, H, T, S = _sizes(q, k)
    rest = (do, lse, delta, *_scalars(q, k))

    tiles = launch.dq_tiles(H, q.dtype.itemsize)
    table = runs(*_tables(layout, G, tiles.rows, tiles.keys, window))
    dq = _triton_call(
        "dq_kernel", tiles, (table.shape[1], B * K), jax.ShapeDtypeStruct(q.shape, q.dtype),
        (q, k, v, *layout, table, *rest), launch.constants(K, G, H, window, scale, tiles),
    )  # fmt: skip

    tiles = launch.dkv_tiles(H, q.dtype.itemsize)
    needed, whole = _tables(layout, G, tiles.rows, tiles.keys, window)
    table = runs(needed.transpose(0, 2, 1), whole.transpose(0, 2, 1))
    like_k = jax.ShapeDtypeStruct(k.shape, k.dtype)
    dk, dv = _triton_call(
        "dkv_kernel", tiles, (table.shape[1], B * K), (like_k, like_k),
        (q, k, v, *layout, table, *rest), launch.constants(K, G, H, window, scale, tiles),
    )  # fmt: skip
    return dq, dk, dv


def triton(
    q_BTNH: Queries, k_BSKH: Keys, v_BSKH: Keys, sink_N: Sinks, layout: Layout, window: int,
    scale: float,
) -> Result:  # fmt: skip
    """(o, lse); see `reference` for the formula."""
    q, scale, _ = _positive(q_BTNH, scale)
    return _triton(q, k_BSKH, v_BSKH, sink_N, layout, window, scale)


def _positive(q: Array, scale: float) -> tuple[Array, float, int]:
    """(q, scale, sign) with the scale above 0, as the kernels take maxima before they scale."""
    sign = (scale > 0) - (scale < 0)
    if scale <= 0:
        q, scale = q * jnp.asarray(sign, q.dtype), abs(scale) or 1.0
    return q, float(scale), sign


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _triton(q, k, v, sink, layout, window, scale):
    return _forward(q, k, v, sink, layout, window, scale)


def _triton_fwd(q, k, v, sink, layout, window, scale):
    o, lse = named(*_forward(q, k, v, sink, layout, window, scale))
    return (o, lse), (q, k, v, sink, layout, o, lse)


def _triton_bwd(window, scale, saved, cotangents):
    q, k, v, sink, layout, o, lse = saved
    do, dlse = cotangents
    lse, delta, dsink = backward_sums(o, lse, sink, do, dlse)
    dq, dk, dv = _backward(q, k, v, layout, do, lse, delta, window, scale)
    return dq, dk, dv, dsink, None


_triton.defvjp(_triton_fwd, _triton_bwd)


def triton_backward(
    q_BTNH: Queries, k_BSKH: Keys, v_BSKH: Keys, do_BTNH: Queries, lse_BTN: Rows, delta_BTN: Rows,
    layout: Layout, window: int, scale: float,
) -> Gradients:  # fmt: skip
    """(dq, dk, dv); see `reference_backward` for the formula. Each is rounded to the dtype of q."""
    q, scale, sign = _positive(q_BTNH, scale)
    rows = do_BTNH, lse_BTN, delta_BTN
    gradients = _backward(q, k_BSKH, v_BSKH, layout, *rows, window, scale)
    dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
    return dq * sign, dk, dv


def unsupported(q_BTNH: Any, k_BSKH: Any) -> str | None:
    """Why these shapes cannot run, in one phrase; None when they can."""
    if launch.missing("jax_triton", "triton"):
        return "needs jax-triton: pip install jax-triton"
    return launch.unsupported(q_BTNH.shape[3], q_BTNH.dtype.name)


unsupported_backward = unsupported
