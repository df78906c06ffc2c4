# SPDX-License-Identifier: Apache-2.0
"""Sink attention for TPU: one Pallas kernel forward, one backward, in linear memory.

Each step of the grid takes one block of queries, all heads of one key head, and visits the key
blocks that it needs: keys and values are read once per group of heads. The heads of a group are
unrolled, so that the MXU works on one while the vector units compute the softmax of another. Full
blocks skip the mask. float32 operands are multiplied in float32 precision, which is slow.

This was compiled for TPUs, but not timed on one. Next: pallas_tpu_blocks.py for the
layout and the loop, pallas_tpu_backward.py for the gradients.
"""

import math
from functools import partial

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks
from pallas_kernels.sink_attention import signature as sig
from pallas_kernels.sink_attention.gradients import attend_with_gradients
from pallas_kernels.sink_attention.pallas_tpu_backward import attention_gradients_tpu
from pallas_kernels.sink_attention.pallas_tpu_visits import visit_blocks
from pallas_kernels.sink_attention.reference import UNSEEN

# Maximum of heads per key head times head size: more was never compiled.
COLUMNS = 1024
TABLE = 2**17  # maximum bytes of block tables in SMEM; of shared keys twice as many


def _forward_kernel(
    runs,
    sink,
    q,
    q_places,
    k_hbm,
    v_hbm,
    k_places_hbm,
    o,
    lse,
    k_two,
    v_two,
    k_places_two,
    sems,
    slot,
    acc,
    top,
    total,
    *,
    window,
    scale,
    unit,
    shares,
):
    b, head = pl.program_id(0), pl.program_id(1)
    bs = k_two.shape[1]

    def block_copies(block, buffer):
        # The compiler cannot see that the slice begins at a tile, and is told so.
        keys = pl.ds(pl.multiple_of(block * unit, unit), bs)
        pairs = (
            (k_hbm.at[b, head, keys], k_two),
            (v_hbm.at[b, head, keys], v_two),
            (k_places_hbm.at[b, :, keys], k_places_two),
        )
        return tuple(
            pltpu.make_async_copy(source, two.at[buffer], sems.at[buffer, i])
            for i, (source, two) in enumerate(pairs)
        )

    # The running softmax starts with the sink; −inf means no sink.
    top[...] = jnp.maximum(sink[...], UNSEEN / 2)[:, None]
    total[...] = jnp.exp(sink[...][:, None] - top[...])
    acc[...] = jnp.zeros_like(acc)

    def attend_block(_, buffer, full):
        k, v = k_two[buffer], v_two[buffer]
        mask = None
        if not full:
            mask = blocks.visible_pairs(q_places[...], k_places_two[buffer], window, shares)

        def attend_heads(heads):
            for g in heads:
                z = blocks.masked_scores(k, q[g], scale, mask)
                new = jnp.maximum(top[g], jnp.max(z, axis=0, keepdims=True))
                p, shrink = jnp.exp(z - new), jnp.exp(top[g] - new)
                top[g] = new
                total[g] = total[g] * shrink + jnp.sum(p, axis=0, keepdims=True)
                acc[g] = acc[g] * shrink + blocks.dot_in_kernel(v, p.astype(v.dtype), 0, 0)

        blocks.for_each_head(q.shape[0], window, attend_heads)

    visit_blocks(runs, slot, block_copies, attend_block, bs // unit, shares)
    has_weights = total[...] > 0  # the sum of a query without keys and sink is 0
    safe = jnp.where(has_weights, total[...], 1.0)
    lse[...] = jnp.where(has_weights, top[...] + jnp.log(safe), -jnp.inf)[:, 0]
    o[...] = (acc[...] / safe).astype(o.dtype)


def attention_forward_tpu(
    x: blocks.Sizes, q, k, v, sink, layout_blocks: blocks.Blocked, window, scale, interpret
):
    """o [B, K, G, H, T] and lse [B, K, G, T] of arrays in the memory layout of `x`."""
    dtype, H, G, bt = q.dtype, x.H, x.G, x.bt
    per_query = pl.BlockSpec((None, None, G, H, bt), lambda b, k, i, _: (b, k, 0, 0, i))
    statistic = pl.BlockSpec((None, None, G, bt), lambda b, k, i, _: (b, k, 0, i))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    pairs = x.B * x.T * x.F * x.S * x.K * G // 2
    return pl.pallas_call(
        partial(
            _forward_kernel,
            window=window,
            scale=scale,
            unit=x.unit,
            shares=layout_blocks.shares,
        ),
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
                *blocks.key_ring_scratch(x, dtype),
                pltpu.VMEM((G, H, bt), jnp.float32),
                pltpu.VMEM((G, 1, bt), jnp.float32),
                pltpu.VMEM((G, 1, bt), jnp.float32),
            ],
        ),
        out_shape=[
            blocks.result_struct(q.shape, dtype),
            blocks.result_struct((x.B, x.K, G, x.n * bt), jnp.float32),
        ],
        compiler_params=blocks.compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * H,
            transcendentals=pairs,
            bytes_accessed=(2 * q.size + 2 * k.size) * dtype.itemsize,
        ),
        interpret=interpret,
        name=f"sink_attention_forward{'_window' if window else ''}",
    )(layout_blocks.q_runs, sink, q, layout_blocks.q_B8T, k, v, layout_blocks.k_B8S)


def sink_attention_mosaic_tpu(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    sink_N: sig.Sinks,
    layout: Layout,
    window: int,
    scale: float,
    interpret: bool = False,
) -> sig.Result:
    """(o, lse) by a TPU kernel; see `sink_attention_reference` for the formula."""
    x = blocks.choose_sizes(q_BTNH.shape, k_BSKH.shape, window, q_BTNH.dtype.itemsize)
    statics = dict(window=window, scale=scale, interpret=interpret)
    forward = partial(attend_in_blocks, x, **statics)
    gradients = partial(_attention_gradients, **statics, dtype=q_BTNH.dtype)
    return attend_with_gradients(forward, gradients, q_BTNH, k_BSKH, v_BSKH, sink_N, layout)


def attend_in_blocks(
    x: blocks.Sizes, q, k, v, sink, layout, window, scale, interpret, masked=False
):
    """(o, lse) with the block sizes of `x`; see `blocks.block_layout` for `masked`."""
    layout_blocks = blocks.block_layout(x, layout, window, masked)
    scaled, k_scale = blocks.prescale_queries(q, scale)
    arrays = x.columns(scaled), x.keys(k), x.keys(v), x.sinks(sink)
    o, lse = attention_forward_tpu(x, *arrays, layout_blocks, window, k_scale, interpret)
    return x.rows(o), x.rows(lse[:, :, :, None])[..., 0]


def sink_attention_mosaic_tpu_invariant(q, k, v, sink, layout, window, scale, interpret):
    """(o, lse) for mosaic_invariant.py: all blocks have one size and are masked."""
    x = blocks.invariant_sizes(q.shape, k.shape, window)
    return attend_in_blocks(x, q, k, v, sink, layout, window, scale, interpret, masked=True)


def _attention_gradients(q, k, v, dout, lse, delta, layout, window, scale, dtype, interpret):
    """(dq, dk, dv) in `dtype`."""
    x = blocks.choose_sizes(q.shape, k.shape, window, q.dtype.itemsize, backward=True)
    layout_blocks = blocks.block_layout(x, layout, window)
    stats_BTN2 = jnp.stack([lse, delta], axis=3)
    scaled, k_scale = blocks.prescale_queries(q, scale)
    arrays = x.columns(scaled), x.keys(k), x.keys(v), x.columns(dout), x.columns(stats_BTN2)
    dq, dk, dv = attention_gradients_tpu(
        x, *arrays, layout_blocks, window, scale, k_scale, dtype, interpret
    )
    dk, dv = (y[:, :, : x.S].transpose(0, 2, 1, 3) for y in (dk, dv))
    return x.rows(dq), dk, dv


def sink_attention_backward_mosaic_tpu(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    dout_BTNH: sig.Queries,
    lse_BTN: sig.Rows,
    delta_BTN: sig.Rows,
    layout: Layout,
    window: int,
    scale: float,
    interpret: bool = False,
) -> sig.Gradients:
    """(dq, dk, dv) by a TPU kernel; see `sink_attention_backward_reference` for the formula."""
    arrays = q_BTNH, k_BSKH, v_BSKH, dout_BTNH, lse_BTN, delta_BTN
    return _attention_gradients(*arrays, layout, window, scale, jnp.float32, interpret)


def sink_attention_mosaic_tpu_unsupported(q_BTNH, k_BSKH) -> str | None:
    """The reason why the kernels cannot take these shapes, or None."""
    if reason := tpu.tpu_unsupported():
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


sink_attention_backward_mosaic_tpu_unsupported = sink_attention_mosaic_tpu_unsupported
