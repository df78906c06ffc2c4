# SPDX-License-Identifier: Apache-2.0
"""Sink attention for Hopper: the forward pass, a warp-specialised kernel with wgmma and TMA.

The producer warpgroup fetches keys and values into a ring in shared memory. Consumer warpgroups own
64 queries each and alternate on the tensor cores: one multiplies while the others exponentiate. For
heads of 64 the exponentials of a step take as long as its products, by the compiler's stall counts,
and the rest of the softmax half as long, so three consumers alternate; for heads of 128 two do. The
running softmax starts with the sink. Unneeded blocks are not read, full blocks are not masked. A
consumer issues the product of weights and values together with the next step's product of queries
and keys, so the tensor cores do not wait for the softmax. A block of threads stays on its core and
loops over tiles: the last step of a tile computes the first scores of the next tile.

Next: pallas_gpu_blocks.py, pallas_gpu_backward.py.
"""

from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import hopper
from pallas_kernels.dispatch import count_gpu_cores
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import signature as sig
from pallas_kernels.sink_attention.common import positive_scale
from pallas_kernels.sink_attention.gradients import attend_with_gradients
from pallas_kernels.sink_attention.hopper import pallas_gpu_backward
from pallas_kernels.sink_attention.hopper import pallas_gpu_blocks as shared
from pallas_kernels.sink_attention.hopper.pallas_gpu_blocks import LOG2E, MosaicTiles
from pallas_kernels.sink_attention.reference import UNSEEN

ROWS = hopper.WARPGROUP_ROWS


def mosaic_forward_tiles(H: int, window: int, G: int) -> MosaicTiles:
    """Tile sizes of the forward kernel, limited by registers.

    A thread holds step/2 scores, step/4 weights and H/2 outputs: 128 of 160 registers with three
    consumers and heads of 64, 160 of 240 with two and heads of 128. One block of threads fits on a
    core, so its ring may use all shared memory. With a short window most pairs of a long step, or
    of many rows, would be masked: there the consumers have the same 64 rows, of different heads
    that share keys. Their number must divide G.
    """
    if 0 < window <= 128:
        consumers = 4 if H == 64 else 2
        return MosaicTiles(consumers, step=64, stages=4, heads=gcd(G, consumers))
    return MosaicTiles(consumers=3, step=128, stages=4) if H == 64 else MosaicTiles(2, 128, 2)


def sink_attention_mosaic_gpu(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    sink_N: sig.Sinks,
    layout: Layout,
    window: int,
    scale: float,
    *,
    interpret: bool = False,
) -> sig.Result:
    """(o, lse) on a Hopper GPU; see `sink_attention_reference` for the formula. Differentiable."""
    q, scale, _ = positive_scale(q_BTNH, scale)
    statics = dict(window=window, scale=scale, interpret=interpret)
    forward = partial(attention_forward_gpu, **statics)
    gradients = partial(pallas_gpu_backward.attention_gradients_gpu, **statics)
    return attend_with_gradients(forward, gradients, q, k_BSKH, v_BSKH, sink_N, layout)


def sink_attention_backward_mosaic_gpu(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    dout_BTNH: sig.Queries,
    lse_BTN: sig.Rows,
    delta_BTN: sig.Rows,
    layout: Layout,
    window: int,
    scale: float,
    *,
    interpret: bool = False,
) -> sig.Gradients:
    """(dq, dk, dv) on a Hopper GPU; see `sink_attention_backward_reference` for the formula.

    Each is rounded to the dtype of q.
    """
    q, scale, sign = positive_scale(q_BTNH, scale)
    arrays = q, k_BSKH, v_BSKH, dout_BTNH, lse_BTN, delta_BTN, layout
    gradients = pallas_gpu_backward.attention_gradients_gpu(*arrays, window, scale, interpret)
    dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
    return dq * sign, dk, dv


def sink_attention_mosaic_gpu_invariant(q, k, v, sink, layout, window, scale, interpret):
    """(o, lse) for mosaic_invariant.py: key blocks in order of position."""
    q, scale, _ = positive_scale(q, scale)
    return attention_forward_gpu(q, k, v, sink, layout, window, scale, interpret, ordered=True)


def sink_attention_mosaic_gpu_unsupported(q_BTNH: Any, k_BSKH: Any, *_arrays: Array) -> str | None:
    """The reason why the kernel cannot run, or None."""
    return shared.arrays_unsupported(q_BTNH, k_BSKH)


sink_attention_backward_mosaic_gpu_unsupported = sink_attention_mosaic_gpu_unsupported


def attention_forward_gpu(q, k, v, sink, layout, window, scale, interpret, ordered=False):
    """o [B, T, N, H] in q's dtype and lse [B, T, N] in float32.

    With `ordered` a query's bits depend on its own keys alone: see
    `Padded.invariant_key_block_table`.
    """
    (B, T, N, H), K = q.shape, k.shape[2]
    tiles = mosaic_forward_tiles(H, window, N // K)
    layout_blocks = shared.pad_layout(layout, tiles.rows, tiles.step, window)
    q, k, v = (
        shared.pad_to_multiple(q, ROWS),
        shared.pad_to_multiple(k, tiles.step),
        shared.pad_to_multiple(v, tiles.step),
    )
    blocks = pl.cdiv(T, tiles.rows)
    # The running maximum, in units of log 2, and the sum start with the sink; −inf means no sink.
    top_N = jnp.maximum(sink.astype(jnp.float32) * LOG2E, UNSEEN / 2)
    total_N = jnp.exp2(sink.astype(jnp.float32) * LOG2E - top_N)

    C, dtype = tiles.consumers, q.dtype
    scratch = dict(
        q_s=shared.tile_refs(2 * C, ROWS, H, dtype),  # for this tile and the next
        k_s=shared.tile_refs(tiles.stages, tiles.step, H, dtype),
        v_s=shared.tile_refs(tiles.stages, tiles.step, H, dtype),
        q_at=plgpu.SMEM((2 * C, 2, ROWS), jnp.int32),
        k_at=plgpu.SMEM((tiles.stages, layout_blocks.k_BRS.shape[1], tiles.step), jnp.int32),
        lse_s=plgpu.SMEM((C, ROWS), jnp.float32),
        q_filled=plgpu.Barrier(num_arrivals=2, num_barriers=2 * C),
        k_filled=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
        v_filled=plgpu.Barrier(num_barriers=tiles.stages),
        # Keys are free before the values of the same block, so both have barriers of their own.
        k_free=plgpu.Barrier(num_arrivals=C, num_barriers=tiles.stages),
        v_free=plgpu.Barrier(num_arrivals=C, num_barriers=tiles.stages),
        tensor_cores=plgpu.Barrier(num_barriers=C),
    )
    kernel = hopper.make_kernel(
        partial(
            _forward_kernel,
            tiles=tiles,
            G=N // K,
            window=window,
            factor=scale * LOG2E,
            interpret=interpret,
        ),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((B, N, q.shape[1]), jnp.float32),
        ),
        scratch=[scratch],
        # One block of threads a core, which takes tile after tile: the next tile is fetched under
        # this one.
        programs=min(count_gpu_cores(), blocks * B * N // tiles.heads),
        num_threads=C + 1,
        name="sink_attention_forward",
        interpret=interpret,
    )
    starts = jnp.stack([top_N, total_N])
    table = (
        layout_blocks.invariant_key_block_table()
        if ordered
        else layout_blocks.nonempty_key_block_table()
    )
    o, lse = kernel(q, k, v, starts, layout_blocks.q_B2T, layout_blocks.k_BRS, table)
    return o[:, :T], lse[:, :, :T].transpose(0, 2, 1)


def _forward_kernel(
    q_ref,
    k_ref,
    v_ref,
    starts_ref,
    q_at_ref,
    k_at_ref,
    table_ref,
    o_ref,
    lse_ref,
    s,
    *,
    tiles,
    G,
    window,
    factor,
    interpret,
):
    (B, T, N, H), (C, step, stages, heads) = q_ref.shape, tiles
    dtype, tile, blocks = q_ref.dtype, (ROWS, step), pl.cdiv(T, tiles.rows)
    group = lax.axis_index("warpgroup")
    n_tiles, locate_tile = shared.tiles_of_core(blocks, B, N // heads)
    k_ring, v_ring = (hopper.Ring(stages, s[f"{x}_filled"], s[f"{x}_free"]) for x in "kv")

    @pl.when(group == C)
    def _produce():
        plgpu.set_max_registers(hopper.REGISTERS[C][1], action="decrease")

        def fetch(visit, b, keys, key_head):
            slot = k_ring.slot_of(visit)
            k_ring.wait_free(visit)
            k_ring.start_copies(
                visit,
                (k_ref.at[b, keys, key_head], s["k_s"].at[slot]),
                (k_at_ref.at[b, :, keys], s["k_at"].at[slot]),
            )
            v_ring.wait_free(visit)
            v_ring.start_copies(visit, (v_ref.at[b, keys, key_head], s["v_s"].at[slot]))

        offset = shared.fetch_key_blocks(n_tiles, locate_tile, table_ref, G // heads, step, fetch)
        # The last step prefetches like every other; its scores are not used.
        k_ring.wait_free(offset)
        first_keys, slot = pl.ds(0, step), k_ring.slot_of(offset)
        k_ring.start_copies(
            offset,
            (k_ref.at[0, first_keys, 0], s["k_s"].at[slot]),
            (k_at_ref.at[0, :, first_keys], s["k_at"].at[slot]),
        )
        k_ring.drain(offset + 1)
        v_ring.drain(offset)

    @pl.when(group < C)
    def _consume():
        plgpu.set_max_registers(hopper.REGISTERS[C][0], action="increase")

        def locate_rows(n):
            """Block, row of the batch, head, first row, and slice of rows of tile n."""
            i, b, pair = locate_tile(n)
            tile_row, head = tiles.locate_consumer(group, pair)
            first = i * tiles.rows + tile_row
            # In the last block warpgroups past the last row compute, but do not write.
            return i, b, head, first, pl.ds(jnp.minimum(first, T - ROWS), ROWS)

        def q_slot(n):
            return 2 * group + (n & 1)

        def fetch_q(n):
            # Past the last tile its queries are fetched once more, so that every tile runs the same
            # code.
            _, b, head, _, rows = locate_rows(jnp.minimum(n, n_tiles - 1))
            destinations = [s[x].at[q_slot(n)] for x in ("q_s", "q_at", "q_filled")]
            pairs = (
                (q_ref.at[b, rows, head], destinations[0]),
                (q_at_ref.at[b, :, rows], destinations[1]),
            )
            hopper.copy_to_shared(destinations[2], *pairs)

        def q_wait(n):
            plgpu.barrier_wait(s["q_filled"].at[q_slot(n)])

        def await_tensor_cores():
            plgpu.barrier_wait(s["tensor_cores"].at[group])

        def pass_tensor_cores():
            plgpu.barrier_arrive(s["tensor_cores"].at[lax.rem(group + 1, jnp.int32(C))])

        def score_operands(n, k_step):
            """Operands of one step's product of queries and keys."""
            return s["q_s"].at[q_slot(n)], s["k_s"].at[k_ring.slot_of(k_step)]

        def one_tile(n, carry):
            offset, z = carry  # z: scores of its first step
            i, b, head, first, rows = locate_rows(n)
            visit = shared.read_visits(table_ref, b, i)
            q_s, q_at = (s[x].at[q_slot(n)] for x in ("q_s", "q_at"))

            def one_step(k, carry, mask):
                acc, top, total, z = carry
                k_step = offset + k
                slot, ends = k_ring.slot_of(k_step), k + 1 == visit.count
                z = shared.mask_scores(z, mask, q_at, s["k_at"].at[slot], 0, window, interpret)
                # The previous step has multiplied these keys; their positions, read for the mask,
                # were the last use.
                k_ring.release(k_step)
                new = jnp.maximum(top, z.max(axis=1) * factor)
                shrink = jnp.exp2(top - new)
                p = jnp.exp2(z * factor - hopper.broadcast_along(new, tile, 0))
                acc = acc * hopper.broadcast_along(shrink, acc.shape, 0)
                total = total * shrink + p.sum(axis=1)
                weights = p.astype(dtype)
                v_ring.wait_filled(k_step)
                k_ring.wait_filled(k_step + 1)
                pl.when(ends)(lambda: q_wait(n + 1))
                await_tensor_cores()  # passed on once both products are issued
                following = score_operands(n + ends.astype(jnp.int32), k_step + 1)
                acc, z = hopper.add_product_and_next(
                    acc, weights, s["v_s"].at[slot], *following, interpret, pass_tensor_cores
                )
                v_ring.release(k_step)
                return acc, new, total, z

            carry = (
                hopper.fill_registers((ROWS, H), 0.0, hopper.TILE, interpret),
                hopper.fill_registers((ROWS,), starts_ref[0, head], hopper.PER_ROW, interpret),
                hopper.fill_registers((ROWS,), starts_ref[1, head], hopper.PER_ROW, interpret),
                z,
            )
            # The next queries overwrite the previous tile's results, once these are stored.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch_q(n + 1)
            acc, top, total, z = shared.loop_by_mask(visit.loops, one_step, carry)

            # Without keys and sink the sum is 0.
            has_weights = total > 0
            safe = jnp.where(has_weights, total, 1.0)
            # The results replace the tile's queries, which are no longer needed, and are copied
            # from there.
            q_s[...] = (acc * hopper.broadcast_along(1.0 / safe, acc.shape, 0)).astype(dtype)
            s["lse_s"].at[group][...] = jnp.where(
                has_weights, top / LOG2E + jnp.log(safe), -jnp.inf
            )
            plgpu.commit_smem()

            @pl.when(first < T)
            def _():
                plgpu.copy_smem_to_gmem(q_s, o_ref.at[b, rows, head])
                plgpu.copy_smem_to_gmem(s["lse_s"].at[group], lse_ref.at[b, head, rows])

            return offset + visit.count, z

        start = jnp.int32(0)
        fetch_q(start)
        pl.when(group == C - 1)(pass_tensor_cores)  # consumer 0 starts
        q_wait(start)
        k_ring.wait_filled(start)
        await_tensor_cores()
        z = hopper.multiply_transposed(*score_operands(start, start), interpret, pass_tensor_cores)
        offset, _ = lax.fori_loop(0, n_tiles, one_tile, (start, z))
        k_ring.release(offset)
        # The last turn is passed on as well, and consumer 0 takes it: arrivals and waits must
        # match.
        pl.when(group == 0)(await_tensor_cores)
        plgpu.wait_smem_to_gmem(0)
