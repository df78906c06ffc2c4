# SPDX-License-Identifier: Apache-2.0
"""The gradients of sink attention on TPU: one kernel for dq, one for dk and dv.

The weights are made again from lse, twice: 7 products instead of the 5 of one fused kernel, which
would have to add up dq in HBM. Each kernel owns what it writes and adds in a fixed order: bit for
bit repeatable, without atomics. Statistics are [B, K, G, 2, T]: lse, then Δ.

Back: pallas_tpu.py.
"""

from functools import partial

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks


def _dq_kernel(
    runs, q, do, stats, q_places, k_hbm, v_hbm, k_places_hbm, dq,
    k_two, v_two, k_places_two, sems, slot, acc, *, window, scale, rest,
):  # fmt: skip
    b, head = pl.program_id(0), pl.program_id(1)
    bs = k_two.shape[1]

    def copies(block, buffer):
        at = pl.ds(pl.multiple_of(block * bs, bs), bs)
        pairs = ((k_hbm.at[b, head, at], k_two), (v_hbm.at[b, head, at], v_two),
                 (k_places_hbm.at[b, :, at], k_places_two))  # fmt: skip
        return tuple(
            pltpu.make_async_copy(source, two.at[buffer], sems.at[buffer, i])
            for i, (source, two) in enumerate(pairs)
        )

    acc[...] = jnp.zeros_like(acc)

    def body(buffer, whole):
        k, v = k_two[buffer], v_two[buffer]
        mask = None if whole else blocks.seen(q_places[...], k_places_two[buffer], window)

        def step(heads):
            for g in heads:
                p = jnp.exp(blocks.scores(k, q[g], rest, mask) - stats[g, 0:1, :])
                ds = p * (blocks.dot(v, do[g], 1, 0) - stats[g, 1:2, :])
                acc[g] += blocks.dot(k, ds.astype(k.dtype), 0, 0)

        blocks.each_head(q.shape[0], window, step)

    blocks.visit(runs, slot, copies, body)
    dq[...] = (acc[...] * scale).astype(dq.dtype)


def _dkv_kernel(
    runs, k, v, k_places, q_hbm, do_hbm, stats_hbm, q_places_hbm, dk, dv,
    q_two, do_two, stats_two, q_places_two, sems, slot, dk_acc, dv_acc, *, window, rest,
):  # fmt: skip
    b, head = pl.program_id(0), pl.program_id(1)
    bt = q_two.shape[3]

    def copies(block, buffer):
        at = pl.ds(pl.multiple_of(block * bt, bt), bt)
        pairs = ((q_hbm.at[b, head, :, :, at], q_two), (do_hbm.at[b, head, :, :, at], do_two),
                 (stats_hbm.at[b, head, :, :, at], stats_two),
                 (q_places_hbm.at[b, :, at], q_places_two))  # fmt: skip
        return tuple(
            pltpu.make_async_copy(source, two.at[buffer], sems.at[buffer, i])
            for i, (source, two) in enumerate(pairs)
        )

    dk_acc[...] = jnp.zeros_like(dk_acc)
    dv_acc[...] = jnp.zeros_like(dv_acc)

    def body(buffer, whole):
        mask = None if whole else blocks.seen(q_places_two[buffer], k_places[...], window)

        def step(heads):
            dk_part, dv_part = 0.0, 0.0  # one addition in VMEM for all these heads
            for g in heads:
                q, do, stats = q_two[buffer, g], do_two[buffer, g], stats_two[buffer, g]
                p = jnp.exp(blocks.scores(k[...], q, rest, mask) - stats[0:1, :])
                dv_part += blocks.dot(p.astype(do.dtype), do, 1, 1)
                ds = p * (blocks.dot(v[...], do, 1, 0) - stats[1:2, :])
                dk_part += blocks.dot(ds.astype(q.dtype), q, 1, 1)
            dk_acc[...] += dk_part
            dv_acc[...] += dv_part

        blocks.each_head(q_two.shape[1], window, step)

    blocks.visit(runs, slot, copies, body)
    dk[...] = (dk_acc[...] * rest).astype(dk.dtype)
    dv[...] = dv_acc[...].astype(dv.dtype)


def backward(
    x: blocks.Sizes, q, k, v, do, stats, where: blocks.Blocked, window, scale, rest, interpret
):
    """(dq [B, K, G, H, T], dk, dv [B, K, S, H]) of arrays laid out by `x`, q by `prescaled`."""
    dtype, H, G, bt, bs = q.dtype, x.H, x.G, x.bt, x.bs
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    per_query = pl.BlockSpec((None, None, G, H, bt), lambda b, k, i, _: (b, k, 0, 0, i))
    statistics = pl.BlockSpec((None, None, G, 2, bt), lambda b, k, i, _: (b, k, 0, 0, i))
    per_key = pl.BlockSpec((None, None, bs, H), lambda b, k, i, _: (b, k, i, 0))
    pairs = x.B * x.T * x.F * x.S * x.K * G // 2
    bytes_accessed = (3 * q.size + 3 * k.size) * dtype.itemsize

    def place(size):
        return pl.BlockSpec((None, blocks.SUBLANES, size), lambda b, k, i, _: (b, 0, i))

    def two(shape, dtype):
        return pltpu.VMEM((2, *shape), dtype)

    dq = pl.pallas_call(
        partial(_dq_kernel, window=window, scale=scale, rest=rest),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.B, x.K, x.n),
            in_specs=[per_query, per_query, statistics, place(bt), in_hbm, in_hbm, in_hbm],
            out_specs=per_query,
            scratch_shapes=[
                two((bs, H), dtype),
                two((bs, H), dtype),
                two((blocks.SUBLANES, bs), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 3)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((G, H, bt), jnp.float32),
            ],
        ),
        out_shape=blocks.struct(q.shape, dtype),
        compiler_params=blocks.PARAMS,
        cost_estimate=pl.CostEstimate(
            flops=6 * pairs * H, transcendentals=pairs, bytes_accessed=bytes_accessed
        ),
        interpret=interpret,
        name="sink_attention_dq",
    )(where.q_runs, q, do, stats, where.q_B8T, k, v, where.k_B8S)

    dk, dv = pl.pallas_call(
        partial(_dkv_kernel, window=window, rest=rest),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.B, x.K, x.m),
            in_specs=[per_key, per_key, place(bs), in_hbm, in_hbm, in_hbm, in_hbm],
            out_specs=[per_key, per_key],
            scratch_shapes=[
                two((G, H, bt), dtype),
                two((G, H, bt), dtype),
                two((G, 2, bt), jnp.float32),
                two((blocks.SUBLANES, bt), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 4)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((bs, H), jnp.float32),
                pltpu.VMEM((bs, H), jnp.float32),
            ],
        ),
        out_shape=[blocks.struct(k.shape, dtype)] * 2,
        compiler_params=blocks.PARAMS,
        cost_estimate=pl.CostEstimate(
            flops=8 * pairs * H, transcendentals=pairs, bytes_accessed=bytes_accessed
        ),
        interpret=interpret,
        name="sink_attention_dkv",
    )(where.k_runs, k, v, where.k_B8S, q, do, stats, where.q_B8T)
    return dq, dk, dv
