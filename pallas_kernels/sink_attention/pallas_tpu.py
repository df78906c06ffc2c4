# SPDX-License-Identifier: Apache-2.0
"""Sink attention for TPU: a Pallas kernel forward, one backward, linear memory.

Each step of the grid takes one block of queries, all heads of one key head, and visits the blocks
of keys that it needs: keys and values are read once per group. The heads of the group are
unrolled, so that the MXU works on one while the vector units take the softmax of another. Blocks
that are seen whole skip the mask. float32 operands are multiplied exactly to float32 (slowly).

Nothing here was timed: there was no TPU, only its compiler. Next: pallas_tpu_blocks.py for the
layout and the loop, pallas_tpu_backward.py for the gradients.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks
from pallas_kernels.sink_attention.common import backward_sums, named
from pallas_kernels.sink_attention.pallas_tpu_backward import backward
from pallas_kernels.sink_attention.reference import UNSEEN
from pallas_kernels.sink_attention.signature import (
    Gradients,
    Keys,
    Queries,
    Result,
    Rows,
    Sinks,
)

COLUMNS = 1024  # heads per key head times head size: what VMEM holds and what was compiled
TABLE = 2**17  # bytes of block tables in SMEM


def _forward_kernel(
    runs, sink, q, q_places, k_hbm, v_hbm, k_places_hbm, o, lse,
    k_two, v_two, k_places_two, sems, slot, acc, top, total, *, window, scale, unit,
):  # fmt: skip
    b, head = pl.program_id(0), pl.program_id(1)
    bs = k_two.shape[1]

    def copies(block, buffer):
        at = pl.ds(pl.multiple_of(block * unit, unit), bs)
        pairs = ((k_hbm.at[b, head, at], k_two), (v_hbm.at[b, head, at], v_two),
                 (k_places_hbm.at[b, :, at], k_places_two))  # fmt: skip
        return tuple(
            pltpu.make_async_copy(source, two.at[buffer], sems.at[buffer, i])
            for i, (source, two) in enumerate(pairs)
        )

    # The sink is where the running softmax starts; −inf starts it empty.
    top[...] = jnp.maximum(sink[...], UNSEEN / 2)[:, None]
    total[...] = jnp.exp(sink[...][:, None] - top[...])
    acc[...] = jnp.zeros_like(acc)

    def body(_, buffer, whole):
        k, v = k_two[buffer], v_two[buffer]
        mask = None if whole else blocks.seen(q_places[...], k_places_two[buffer], window)

        def step(heads):
            for g in heads:
                z = blocks.scores(k, q[g], scale, mask)
                new = jnp.maximum(top[g], jnp.max(z, axis=0, keepdims=True))
                p, shrink = jnp.exp(z - new), jnp.exp(top[g] - new)
                top[g] = new
                total[g] = total[g] * shrink + jnp.sum(p, axis=0, keepdims=True)
                acc[g] = acc[g] * shrink + blocks.dot(v, p.astype(v.dtype), 0, 0)

        blocks.each_head(q.shape[0], window, step)

    blocks.visit(runs, slot, copies, body, bs // unit)
    some = total[...] > 0  # a query without keys and without a sink has nothing to divide by
    safe = jnp.where(some, total[...], 1.0)
    lse[...] = jnp.where(some, top[...] + jnp.log(safe), -jnp.inf)[:, 0]
    o[...] = (acc[...] / safe).astype(o.dtype)


def forward(x: blocks.Sizes, q, k, v, sink, where: blocks.Blocked, window, scale, interpret):
    """o [B, K, G, H, T] and lse [B, K, G, T] of arrays laid out by `x`."""
    dtype, H, G, bt, bs = q.dtype, x.H, x.G, x.bt, x.bs
    per_query = pl.BlockSpec((None, None, G, H, bt), lambda b, k, i, _: (b, k, 0, 0, i))
    statistic = pl.BlockSpec((None, None, G, bt), lambda b, k, i, _: (b, k, 0, i))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    pairs = x.B * x.T * x.F * x.S * x.K * G // 2
    return pl.pallas_call(
        partial(_forward_kernel, window=window, scale=scale, unit=x.unit),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.B, x.K, x.n),
            in_specs=[
                pl.BlockSpec((None, G, bt), lambda b, k, i, _: (k, 0, 0)),
                per_query,
                pl.BlockSpec((None, blocks.SUBLANES, bt), lambda b, k, i, _: (b, 0, i)),
                in_hbm,
                in_hbm,
                in_hbm,
            ],
            out_specs=[per_query, statistic],
            scratch_shapes=[
                pltpu.VMEM((2, bs, H), dtype),
                pltpu.VMEM((2, bs, H), dtype),
                pltpu.VMEM((2, blocks.SUBLANES, bs), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 3)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((G, H, bt), jnp.float32),
                pltpu.VMEM((G, 1, bt), jnp.float32),
                pltpu.VMEM((G, 1, bt), jnp.float32),
            ],
        ),
        out_shape=[
            blocks.struct(q.shape, dtype),
            blocks.struct((x.B, x.K, G, x.n * bt), jnp.float32),
        ],
        compiler_params=blocks.params(),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * H,
            transcendentals=pairs,
            bytes_accessed=(2 * q.size + 2 * k.size) * dtype.itemsize,
        ),
        interpret=interpret,
        name=f"sink_attention_forward{'_window' if window else ''}",
    )(where.q_runs, sink, q, where.q_B8T, k, v, where.k_B8S)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def mosaic_tpu(
    q_BTNH: Queries, k_BSKH: Keys, v_BSKH: Keys, sink_N: Sinks, layout: Layout, window: int,
    scale: float, interpret: bool = False,
) -> Result:  # fmt: skip
    """(o, lse) by a TPU kernel; see `reference` for the formula."""
    return _fwd(q_BTNH, k_BSKH, v_BSKH, sink_N, layout, window, scale, interpret)[0]


def attend(x: blocks.Sizes, q, k, v, sink, layout, window, scale, interpret, masked=False):
    """(o, lse) in blocks of `x`; see `blocks.blocked`."""
    where = blocks.blocked(x, layout, window, masked)
    scaled, rest = blocks.prescaled(q, scale)
    arrays = x.columns(scaled), x.keys(k), x.keys(v), x.sinks(sink)
    o, lse = forward(x, *arrays, where, window, rest, interpret)
    return x.rows(o), x.rows(lse[:, :, :, None])[..., 0]


def in_order(q, k, v, sink, layout, window, scale, interpret):
    """(o, lse) for in_order.py: in blocks of one size, each asked for every pair."""
    x = blocks.fixed_sizes(q.shape, k.shape, window)
    return attend(x, q, k, v, sink, layout, window, scale, interpret, masked=True)


def _fwd(q, k, v, sink, layout, window, scale, interpret):
    x = blocks.sizes(q.shape, k.shape, window, q.dtype.itemsize)
    o, lse = named(*attend(x, q, k, v, sink, layout, window, scale, interpret))
    return (o, lse), (q, k, v, sink, layout, o, lse)


def _bwd(window, scale, interpret, saved, cotangents):
    q, k, v, sink, layout, o, lse = saved
    do, dlse = cotangents
    lse, delta, dsink = backward_sums(o, lse, sink, do, dlse)
    rows = do, lse, delta
    dq, dk, dv = _gradients(q, k, v, *rows, layout, window, scale, q.dtype, interpret)
    return dq, dk, dv, dsink, None


def _gradients(q, k, v, do, lse, delta, layout, window, scale, dtype, interpret):
    """(dq, dk, dv) in `dtype`."""
    x = blocks.sizes(q.shape, k.shape, window, q.dtype.itemsize, backward=True)
    where = blocks.blocked(x, layout, window)
    stats_BTN2 = jnp.stack([lse, delta], axis=3)
    scaled, rest = blocks.prescaled(q, scale)
    arrays = x.columns(scaled), x.keys(k), x.keys(v), x.columns(do), x.columns(stats_BTN2)
    dq, dk, dv = backward(x, *arrays, where, window, scale, rest, dtype, interpret)
    dk, dv = (y[:, :, : x.S].transpose(0, 2, 1, 3) for y in (dk, dv))
    return x.rows(dq), dk, dv


mosaic_tpu.defvjp(_fwd, _bwd)


def mosaic_tpu_backward(
    q_BTNH: Queries, k_BSKH: Keys, v_BSKH: Keys, do_BTNH: Queries, lse_BTN: Rows, delta_BTN: Rows,
    layout: Layout, window: int, scale: float, interpret: bool = False,
) -> Gradients:  # fmt: skip
    """(dq, dk, dv) by a TPU kernel; see `reference_backward` for the formula."""
    arrays = q_BTNH, k_BSKH, v_BSKH, do_BTNH, lse_BTN, delta_BTN
    return _gradients(*arrays, layout, window, scale, jnp.float32, interpret)


def unsupported(q_BTNH, k_BSKH) -> str | None:
    """Why the kernels cannot take these shapes; None where they can."""
    if reason := tpu.unsupported():
        return reason
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    if H not in (64, 128):
        return f"head size {H} is neither 64 nor 128"
    if q_BTNH.dtype not in (jnp.float32, jnp.bfloat16):
        return f"dtype {q_BTNH.dtype} is neither float32 nor bfloat16"
    if N // K * H > COLUMNS:
        return f"{N // K} query heads per key head times head size {H} exceed {COLUMNS}"
    table = 16 * B * math.ceil(max(T, S) / blocks.LANES)
    if table > TABLE:
        return f"batch {B} of {max(T, S)} tokens needs {table} bytes of SMEM, over {TABLE}"
    return None


unsupported_backward = unsupported
