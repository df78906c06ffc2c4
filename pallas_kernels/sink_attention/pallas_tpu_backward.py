# SPDX-License-Identifier: Apache-2.0
"""The gradients of sink attention on TPU: dq, dk and dv of one kernel, 5 products a pair.

Each step of the grid holds one block of queries, all heads of one key head, and visits the keys
that it needs, as the forward does. dq is its own; dk and dv lie in VMEM, float32 and whole, until
the last block of queries has added to them: they are far smaller than dq, as a group of heads
shares them, so no sum travels through HBM. The steps of one key head come one after another and
add in their order: bit for bit repeatable, without atomics. Statistics are [B, K, G, 2, T]: lse,
then Δ.

Rows with more keys than VMEM has room for are taken in parts, each of which adds to the dq of the
one before. Back: pallas_tpu.py.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks


def _kernel(
    runs, q, do, stats, q_places, k_hbm, v_hbm, k_places_hbm, *refs, window, scale, k_scale, unit
):
    *before, dq, dk, dv, k_two, v_two, k_places_two, sems, slot, acc = refs
    b, head = pl.program_id(0), pl.program_id(1)
    bs = k_two.shape[1]

    def keys(block):
        return pl.ds(pl.multiple_of(block * unit, unit), bs)

    def copies(block, buffer):
        at = keys(block)
        pairs = ((k_hbm.at[b, head, at], k_two), (v_hbm.at[b, head, at], v_two),
                 (k_places_hbm.at[b, :, at], k_places_two))  # fmt: skip
        return tuple(
            pltpu.make_async_copy(source, two.at[buffer], sems.at[buffer, i])
            for i, (source, two) in enumerate(pairs)
        )

    @pl.when(pl.program_id(2) == 0)
    def _():
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    acc[...] = before[0][...] if before else jnp.zeros_like(acc)

    def body(block, buffer, whole):
        k, v = k_two[buffer], v_two[buffer]
        mask = None if whole else blocks.seen(q_places[...], k_places_two[buffer], window)

        def step(heads):
            dk_part, dv_part = 0.0, 0.0  # one addition in VMEM for all these heads
            for g in heads:
                p = jnp.exp(blocks.scores(k, q[g], k_scale, mask) - stats[g, 0:1, :])
                ds = p * (blocks.dot(v, do[g], 1, 0) - stats[g, 1:2, :])
                p, ds = p.astype(k.dtype), ds.astype(k.dtype)
                acc[g] += blocks.dot(k, ds, 0, 0)
                # [H, keys]: the head size in the lanes would leave half of them empty, and takes a
                # quarter more of v5's matrix units
                dv_part += blocks.dot(do[g], p, 1, 1)
                dk_part += blocks.dot(q[g], ds, 1, 1)
            dk[:, keys(block)] += dk_part
            dv[:, keys(block)] += dv_part

        blocks.each_head(q.shape[0], window, step)

    blocks.visit(runs, slot, copies, body, bs // unit)
    dq[...] = (acc[...] * scale).astype(dq.dtype)


def keys_at_once(H: int) -> int:
    """Whose gradients, float32 and in two buffers for the pipeline, take a quarter of VMEM."""
    return tpu.vmem_bytes() // 4 // (2 * 2 * 4 * H)


def parts_of(x: blocks.Sizes, window: int) -> list[tuple[str, int, int]]:
    """Of each part its kernel's name, and its blocks of keys: the first, and the one past them."""
    most = max(1, keys_at_once(x.H) // x.unit)
    name = f"sink_attention_backward{'_window' if window else ''}"
    return [
        (f"{name}_keys{low * x.unit}" if x.m > most else name, low, min(low + most, x.m))
        for low in range(0, x.m, most)
    ]


def backward(
    x: blocks.Sizes, q, k, v, do, stats, where: blocks.Blocked, window, scale, k_scale, dtype,
    interpret,
):  # fmt: skip
    """(dq [B, K, G, H, T], dk, dv [B, K, S, H]) in `dtype`, of arrays laid out by `x`, q by
    `prescaled`."""
    dq: Any = None
    parts = []
    for name, low, high in parts_of(x, window):
        size = (high - low) * x.unit
        # a step from the last block goes past it, where the next part's keys are no keys of this
        keys = slice(low * x.unit, (high - 1) * x.unit + x.bs)
        places = where.k_B8S[:, :, keys]
        places = jnp.where(jnp.arange(places.shape[2]) < size, places, 0)
        near = where.within(low, high), k[:, :, keys], v[:, :, keys], places
        dq, *dkv = _part(
            x, q, do, stats, where.q_B8T, *near, dq, high == x.m, window, scale, k_scale, dtype,
            interpret, name,
        )  # fmt: skip
        parts.append([y[..., :size] for y in dkv])
    dk, dv = (jnp.concatenate(part, axis=3).swapaxes(2, 3) for part in zip(*parts, strict=True))
    return dq, (dk * k_scale).astype(dtype), dv.astype(dtype)


def _part(
    x: blocks.Sizes, q, do, stats, q_places, runs, k, v, k_places, before, last, window, scale,
    k_scale, dtype_of_dq, interpret, name,
):  # fmt: skip
    """dq so far, float32 and not yet scaled but in the last part; dk and dv, float32 [B, K, H, S],
    of these keys."""
    dtype, H, G, bt, bs, S = q.dtype, x.H, x.G, x.bt, x.bs, k.shape[2]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    per_query = pl.BlockSpec((None, None, G, H, bt), lambda b, k, i, _: (b, k, 0, 0, i))
    every_key = pl.BlockSpec((None, None, H, S), lambda b, k, i, _: (b, k, 0, 0))
    pairs = x.B * x.T * x.F * S * x.K * G // 2
    more = () if before is None else (before,)
    return pl.pallas_call(
        partial(_kernel, window=window, scale=scale if last else 1.0, k_scale=k_scale, unit=x.unit),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.B, x.K, x.n),
            in_specs=[
                per_query,
                per_query,
                pl.BlockSpec((None, None, G, 2, bt), lambda b, k, i, _: (b, k, 0, 0, i)),
                pl.BlockSpec((None, blocks.SUBLANES, bt), lambda b, k, i, _: (b, 0, i)),
                in_hbm,
                in_hbm,
                in_hbm,
                *(per_query for _ in more),
            ],
            out_specs=[per_query, every_key, every_key],
            scratch_shapes=[
                pltpu.VMEM((2, bs, H), dtype),
                pltpu.VMEM((2, bs, H), dtype),
                pltpu.VMEM((2, blocks.SUBLANES, bs), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 3)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((G, H, bt), jnp.float32),
            ],
        ),
        out_shape=[
            blocks.struct(q.shape, dtype_of_dq if last else jnp.float32),
            *[blocks.struct((x.B, x.K, H, S), jnp.float32)] * 2,
        ],
        input_output_aliases={8: 0} if more and not last else {},
        compiler_params=blocks.params(),
        cost_estimate=pl.CostEstimate(
            flops=10 * pairs * H,
            transcendentals=pairs,
            bytes_accessed=(3 * q.size + 2 * k.size) * dtype.itemsize + 8 * k.size,
        ),
        interpret=interpret,
        name=name,
    )(runs, q, do, stats, q_places, k, v, k_places, *more)
