# SPDX-License-Identifier: Apache-2.0
"""The gradients of sink attention on TPU: dq, dk and dv in one kernel, 5 products a pair.

Each step of the grid holds one block of queries, all heads of one key head, and visits the key
blocks that it needs, as the forward does. It writes its own dq. dk and dv of all keys stay in VMEM,
in float32, until the last block of queries has added to them, so no partial sums pass through HBM;
they are far smaller than dq, as a group of heads shares them. The steps of one key head run in
order, so results are bitwise repeatable without atomics. Statistics are [B, K, G, 2, T]: lse, then
Δ.

Rows with more keys than fit into VMEM are processed in parts, each of which adds to the dq of the
previous one. Back: pallas_tpu.py.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks
from pallas_kernels.sink_attention.pallas_tpu_visits import visit_blocks


def _backward_kernel(runs, q, dout, stats, q_places, *refs, window, scale, k_scale, unit, shares):
    k_hbm, v_hbm, k_places_hbm, *previous, dq, dk, dv = refs[:-6]
    k_two, v_two, k_places_two, sems, slot, acc = refs[-6:]
    b, head = pl.program_id(0), pl.program_id(1)
    bs = k_two.shape[1]

    def key_rows(block):
        return pl.ds(pl.multiple_of(block * unit, unit), bs)

    def block_copies(block, buffer):
        key_slice = key_rows(block)
        pairs = (
            (k_hbm.at[b, head, key_slice], k_two),
            (v_hbm.at[b, head, key_slice], v_two),
            (k_places_hbm.at[b, :, key_slice], k_places_two),
        )
        return tuple(
            pltpu.make_async_copy(source, two.at[buffer], sems.at[buffer, i])
            for i, (source, two) in enumerate(pairs)
        )

    # The first block of queries clears the sums, which stay in VMEM for all blocks of this head.
    @pl.when(pl.program_id(2) == 0)
    def _():
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    acc[...] = previous[0][...] if previous else jnp.zeros_like(acc)

    def add_block(block, buffer, full):
        k, v = k_two[buffer], v_two[buffer]
        mask = None
        if not full:
            mask = blocks.visible_pairs(q_places[...], k_places_two[buffer], window, shares)

        def add_heads(heads):
            dk_part, dv_part = 0.0, 0.0  # one addition in VMEM for all these heads
            for g in heads:
                p = jnp.exp(blocks.masked_scores(k, q[g], k_scale, mask) - stats[g, 0:1, :])
                ds = p * (blocks.dot_in_kernel(v, dout[g], 1, 0) - stats[g, 1:2, :])
                p, ds = p.astype(k.dtype), ds.astype(k.dtype)
                acc[g] += blocks.dot_in_kernel(k, ds, 0, 0)
                # [H, keys]: with the head size in the lanes half of these would be empty, and v5's
                # matrix units would take a quarter more time
                dv_part += blocks.dot_in_kernel(dout[g], p, 1, 1)
                dk_part += blocks.dot_in_kernel(q[g], ds, 1, 1)
            dk[:, key_rows(block)] += dk_part
            dv[:, key_rows(block)] += dv_part

        blocks.for_each_head(q.shape[0], window, add_heads)

    visit_blocks(runs, slot, block_copies, add_block, bs // unit, shares)
    dq[...] = (acc[...] * scale).astype(dq.dtype)


def max_keys_per_part(H: int) -> int:
    """Keys whose gradients take a quarter of VMEM, in float32 and two pipeline buffers."""
    return tpu.vmem_bytes() // 4 // (2 * 2 * 4 * H)


def split_key_blocks(x: blocks.Sizes, window: int) -> list[tuple[str, int, int]]:
    """(kernel name, first key block, one past the last) of each part."""
    max_blocks = max(1, max_keys_per_part(x.H) // x.unit)
    name = f"sink_attention_backward{'_window' if window else ''}"
    return [
        (
            f"{name}_keys{low * x.unit}" if x.m > max_blocks else name,
            low,
            min(low + max_blocks, x.m),
        )
        for low in range(0, x.m, max_blocks)
    ]


def attention_gradients_tpu(
    x: blocks.Sizes,
    q,
    k,
    v,
    dout,
    stats,
    layout_blocks: blocks.Blocked,
    window,
    scale,
    k_scale,
    dtype,
    interpret,
):
    """(dq [B, K, G, H, T], dk, dv [B, K, S, H]) in `dtype`.

    Arrays are in the memory layout of `x`, q as scaled by `prescale_queries`.
    """
    dq: Any = None
    parts = []
    for name, low, high in split_key_blocks(x, window):
        size = (high - low) * x.unit
        # A step from the last block reads past it: mask the keys of the next part.
        keys = slice(low * x.unit, (high - 1) * x.unit + x.bs)
        places = layout_blocks.k_B8S[:, :, keys]
        places = jnp.where(jnp.arange(places.shape[2]) < size, places, 0)
        part_arrays = layout_blocks.slice_runs(low, high), k[:, :, keys], v[:, :, keys], places
        dq, *dkv = _gradients_of_part(
            x,
            q,
            dout,
            stats,
            layout_blocks.q_B8T,
            *part_arrays,
            dq,
            high == x.m,
            window,
            scale,
            k_scale,
            dtype,
            interpret,
            name,
            layout_blocks.shares,
        )
        parts.append([y[..., :size] for y in dkv])
    dk, dv = (jnp.concatenate(part, axis=3).swapaxes(2, 3) for part in zip(*parts, strict=True))
    return dq, (dk * k_scale).astype(dtype), dv.astype(dtype)


def _gradients_of_part(
    x: blocks.Sizes,
    q,
    dout,
    stats,
    q_places,
    runs,
    k,
    v,
    k_places,
    previous,
    last,
    window,
    scale,
    k_scale,
    dtype_of_dq,
    interpret,
    name,
    shares,
):
    """(sum of dq up to this part, dk, dv [B, K, H, S] of its keys).

    dk, dv and dq are float32. dq is unscaled, except in the last part, which scales and casts it.
    """
    dtype, H, G, bt, S = q.dtype, x.H, x.G, x.bt, k.shape[2]
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    per_query = pl.BlockSpec((None, None, G, H, bt), lambda b, k, i, _: (b, k, 0, 0, i))
    every_key = pl.BlockSpec((None, None, H, S), lambda b, k, i, _: (b, k, 0, 0))
    pairs = x.B * x.T * x.F * S * x.K * G // 2
    extra_inputs = () if previous is None else (previous,)
    return pl.pallas_call(
        partial(
            _backward_kernel,
            window=window,
            scale=scale if last else 1.0,
            k_scale=k_scale,
            unit=x.unit,
            shares=shares,
        ),
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
                *(per_query for _ in extra_inputs),
            ],
            out_specs=[per_query, every_key, every_key],
            scratch_shapes=[
                *blocks.key_ring_scratch(x, dtype),
                pltpu.VMEM((G, H, bt), jnp.float32),
            ],
        ),
        out_shape=[
            blocks.result_struct(q.shape, dtype_of_dq if last else jnp.float32),
            *[blocks.result_struct((x.B, x.K, H, S), jnp.float32)] * 2,
        ],
        # A part adds to the previous part's dq in place. The last part's dq has another dtype.
        input_output_aliases={8: 0} if extra_inputs and not last else {},
        compiler_params=blocks.compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=10 * pairs * H,
            transcendentals=pairs,
            bytes_accessed=(3 * q.size + 2 * k.size) * dtype.itemsize + 8 * k.size,
        ),
        interpret=interpret,
        name=name,
    )(runs, q, dout, stats, q_places, k, v, k_places, *extra_inputs)
