# SPDX-License-Identifier: Apache-2.0
"""Sink attention for Hopper: the backward pass, in two kernels without atomics.

One kernel's blocks own queries and sum dq over keys. The other's own keys and sum dk and dv over
the queries of all heads that share them. The order is fixed, so results are bitwise repeatable.
Both recompute the weights from lse. Together they take seven products. Five would suffice in one
kernel, but it would add to dq from many blocks at once, in no fixed order, or one block after
another: see docs/results/kernels.md.
Next: pallas_kernels/hopper.py for the products.
"""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.dispatch import count_gpu_cores
from pallas_kernels.sink_attention.hopper import pallas_gpu_blocks as shared
from pallas_kernels.sink_attention.hopper.pallas_gpu_blocks import LOG2E, Mask, MosaicTiles

ROWS = hopper.WARPGROUP_ROWS


def mosaic_dq_tiles(H: int, window: int, G: int) -> MosaicTiles:
    """Tile sizes of the dq kernel, limited by registers.

    A thread holds scores and their cotangents, step/2 registers each, and H/2 sums. With 128
    columns a wgmma, reads of shared memory are not the bottleneck. With a short window most pairs
    of such a step would be masked: there the two consumers have the same rows, of two heads.
    """
    short = 0 < window <= 128
    step, stages = (128, 4) if H == 64 and not short else (64, 4 if H == 64 else 2)
    return MosaicTiles(consumers=2, step=step, stages=stages, heads=gcd(G, 2) if short else 1)


def mosaic_dkv_tiles(H: int, window: int) -> MosaicTiles:
    """Tile sizes of the dk and dv kernel, whose threads hold two sums of H/2 registers.

    128 columns, or a longer ring with heads of 128, would spill registers.
    """
    return MosaicTiles(consumers=2, step=64, stages=4 if H == 64 else 2)


def attention_gradients_gpu(q, k, v, dout, lse, delta, layout, window, scale, interpret):
    """(dq, dk, dv) for these keys, in the inputs' dtypes; lse and Δ are those over all keys."""
    # The weights are powers of 2, so lse is converted once and not in every block.
    stats_BN2T = jnp.stack([lse * LOG2E, delta], 1).transpose(0, 3, 1, 2)
    arrays = (q, k, v, dout.astype(q.dtype), stats_BN2T, layout)
    dq = _query_gradients(*arrays, window, scale, interpret)
    dk, dv = _key_gradients(*arrays, window, scale, interpret)
    return dq, dk, dv


def _pad_queries(multiple, q, dout, stats):
    pad = shared.pad_to_multiple
    return pad(q, multiple), pad(dout, multiple), pad(stats, multiple, axis=3)


def _query_gradients(q, k, v, dout, stats, layout, window, scale, interpret):
    (B, T, N, H), K, dtype = q.shape, k.shape[2], q.dtype
    tiles = mosaic_dq_tiles(H, window, N // K)
    if layout.k_last_segment_ids_BS is not None:
        # 128 columns with three numbers each, and not two, would spill registers.
        tiles = tiles._replace(step=min(tiles.step, 64))
    layout_blocks = shared.pad_layout(layout, tiles.rows, tiles.step, window)
    q, dout, stats = _pad_queries(tiles.rows, q, dout, stats)
    k, v = shared.pad_to_multiple(k, tiles.step), shared.pad_to_multiple(v, tiles.step)
    C, stages = tiles.consumers, tiles.stages
    scratch = dict(
        q_s=shared.tile_refs(2 * C, ROWS, H, dtype),  # of this tile and of the next
        dout_s=shared.tile_refs(2 * C, ROWS, H, dtype),
        stats_s=plgpu.SMEM((2 * C, 2, ROWS), jnp.float32),
        q_at=plgpu.SMEM((2 * C, 2, ROWS), jnp.int32),
        k_s=shared.tile_refs(stages, tiles.step, H, dtype),
        v_s=shared.tile_refs(stages, tiles.step, H, dtype),
        k_at=plgpu.SMEM((stages, layout_blocks.k_BRS.shape[1], tiles.step), jnp.int32),
        q_filled=plgpu.Barrier(num_arrivals=4, num_barriers=2 * C),
        filled=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=C, num_barriers=stages),
    )
    kernel = hopper.make_kernel(
        partial(
            _query_kernel, tiles=tiles, G=N // K, window=window, scale=scale, interpret=interpret
        ),
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch=[scratch],
        programs=min(count_gpu_cores(), q.shape[1] // tiles.rows * B * N // tiles.heads),
        num_threads=C + 1,
        name="sink_attention_dq",
        interpret=interpret,
    )
    return kernel(
        q,
        k,
        v,
        dout,
        stats,
        layout_blocks.q_B2T,
        layout_blocks.k_BRS,
        layout_blocks.key_block_table(),
    )[:, :T]


def _query_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    stats_ref,
    q_at_ref,
    k_at_ref,
    table_ref,
    dq_ref,
    s,
    *,
    tiles,
    G,
    window,
    scale,
    interpret,
):
    (B, T, N, H), (C, step, stages, heads) = q_ref.shape, tiles
    dtype, tile = q_ref.dtype, (ROWS, step)
    group = lax.axis_index("warpgroup")
    n_tiles, locate_tile = shared.tiles_of_core(T // tiles.rows, B, N // heads)
    ring = hopper.Ring(stages, s["filled"], s["free"])

    @pl.when(group == C)
    def _produce():
        plgpu.set_max_registers(hopper.REGISTERS[C][1], action="decrease")

        def fetch(visit, b, keys, key_head):
            slot = ring.slot_of(visit)
            ring.wait_free(visit)
            ring.start_copies(
                visit,
                (k_ref.at[b, keys, key_head], s["k_s"].at[slot]),
                (v_ref.at[b, keys, key_head], s["v_s"].at[slot]),
                (k_at_ref.at[b, :, keys], s["k_at"].at[slot]),
            )

        ring.drain(
            shared.fetch_key_blocks(n_tiles, locate_tile, table_ref, G // heads, step, fetch)
        )

    @pl.when(group < C)
    def _consume():
        plgpu.set_max_registers(hopper.REGISTERS[C][0], action="increase")

        def locate_rows(n):
            i, b, pair = locate_tile(n)
            tile_row, head = tiles.locate_consumer(group, pair)
            return i, b, head, pl.ds(i * tiles.rows + tile_row, ROWS)

        def slot_refs(n, *names):
            return [s[x].at[2 * group + lax.rem(n, jnp.int32(2))] for x in names]

        def fetch_q(n):
            _, b, head, rows = locate_rows(n)
            barrier, *destinations = slot_refs(n, "q_filled", "q_s", "dout_s", "stats_s", "q_at")
            arrays = (
                q_ref.at[b, rows, head],
                dout_ref.at[b, rows, head],
                stats_ref.at[b, head, :, rows],
                q_at_ref.at[b, :, rows],
            )
            hopper.copy_to_shared(barrier, *zip(arrays, destinations, strict=True))

        def one_tile(n, offset):
            i, b, head, rows = locate_rows(n)
            visit = shared.read_visits(table_ref, b, i)
            q_filled, q_s, dout_s, stats_s, q_at = slot_refs(
                n, "q_filled", "q_s", "dout_s", "stats_s", "q_at"
            )
            # The next queries come where the tile before was, once its results are out of there.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(n + 1 < n_tiles)(lambda: fetch_q(n + 1))
            plgpu.barrier_wait(q_filled)
            lse, delta = hopper.load_two_rows(stats_s, hopper.PER_ROW, interpret)

            def one_step(k, dq, mask):
                slot = ring.slot_of(offset + k)
                k_s, v_s = s["k_s"].at[slot], s["v_s"].at[slot]
                ring.wait_filled(offset + k)

                def softmax_weights(z):
                    z = shared.mask_scores(z, mask, q_at, s["k_at"].at[slot], 0, window, interpret)
                    return jnp.exp2(z * (scale * LOG2E) - hopper.broadcast_along(lse, tile, 0))

                start = hopper.broadcast_along(-delta, tile, 0)
                dq = _add_to_queries(dq, start, q_s, k_s, dout_s, v_s, softmax_weights, interpret)
                ring.release(offset + k)
                return dq

            dq = hopper.fill_registers((ROWS, H), 0.0, hopper.TILE, interpret)
            dq = shared.loop_by_mask(visit.loops, one_step, dq)
            # The scale of dz is a common factor of the sum and is applied once.
            q_s[...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s, dq_ref.at[b, rows, head])
            return offset + visit.count

        fetch_q(jnp.int32(0))
        lax.fori_loop(0, n_tiles, one_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _key_gradients(q, k, v, dout, stats, layout, window, scale, interpret):
    (_, _, N, H), (B, S, K, _), dtype = q.shape, k.shape, q.dtype
    tiles = mosaic_dkv_tiles(H, window)
    layout_blocks = shared.pad_layout(layout, tiles.step, tiles.rows, window)
    q, dout, stats = _pad_queries(tiles.step, q, dout, stats)
    k, v = shared.pad_to_multiple(k, tiles.rows), shared.pad_to_multiple(v, tiles.rows)
    C, stages = tiles.consumers, tiles.stages
    scratch = dict(
        k_s=shared.tile_refs(C, ROWS, H, dtype),
        v_s=shared.tile_refs(C, ROWS, H, dtype),
        k_at=plgpu.SMEM((C, layout_blocks.k_BRS.shape[1], ROWS), jnp.int32),
        q_s=shared.tile_refs(stages, tiles.step, H, dtype),
        dout_s=shared.tile_refs(stages, tiles.step, H, dtype),
        stats_s=plgpu.SMEM((stages, 2, tiles.step), jnp.float32),
        q_at=plgpu.SMEM((stages, 2, tiles.step), jnp.int32),
        k_filled=plgpu.Barrier(num_arrivals=3, num_barriers=C),
        filled=plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=C, num_barriers=stages),
    )
    kernel = hopper.make_kernel(
        partial(
            _key_kernel, tiles=tiles, G=N // K, window=window, scale=scale, interpret=interpret
        ),
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype),) * 2,
        scratch=[scratch],
        programs=k.shape[1] // tiles.rows * B * K,
        axis="block",
        num_threads=C + 1,
        name="sink_attention_dkv",
        interpret=interpret,
    )
    dk, dv = kernel(
        q,
        k,
        v,
        dout,
        stats,
        layout_blocks.q_B2T,
        layout_blocks.k_BRS,
        layout_blocks.query_block_table(),
    )
    return dk[:, :S], dv[:, :S]


def _key_kernel(
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    stats_ref,
    q_at_ref,
    k_at_ref,
    table_ref,
    dk_ref,
    dv_ref,
    s,
    *,
    tiles,
    G,
    window,
    scale,
    interpret,
):
    (B, S, K, H), (C, step, stages, _) = k_ref.shape, tiles
    dtype, tile = q_ref.dtype, (ROWS, step)
    # Early keys go first: most queries see them.
    i, b, key_head = shared.split_index(lax.axis_index("block"), S // tiles.rows, B, K)
    visit = shared.read_visits(table_ref, b, i)
    group = lax.axis_index("warpgroup")
    ring = hopper.Ring(stages, s["filled"], s["free"])

    @pl.when(group == C)
    def _produce():
        plgpu.set_max_registers(hopper.REGISTERS[C][1], action="decrease")

        @pl.loop(0, visit.count * G)
        def _(n):
            # The heads of a block of queries are adjacent in memory.
            queries = pl.ds(visit.block(lax.div(n, jnp.int32(G))) * step, step)
            head, slot = key_head * G + lax.rem(n, jnp.int32(G)), ring.slot_of(n)
            ring.wait_free(n)
            ring.start_copies(
                n,
                (q_ref.at[b, queries, head], s["q_s"].at[slot]),
                (dout_ref.at[b, queries, head], s["dout_s"].at[slot]),
                (stats_ref.at[b, head, :, queries], s["stats_s"].at[slot]),
                (q_at_ref.at[b, :, queries], s["q_at"].at[slot]),
            )

        ring.drain(visit.count * G)

    @pl.when(group < C)
    def _consume():
        plgpu.set_max_registers(hopper.REGISTERS[C][0], action="increase")
        k_s, v_s, k_at = (s[x].at[group] for x in ("k_s", "v_s", "k_at"))
        keys = pl.ds(i * tiles.rows + group * ROWS, ROWS)
        pairs = (
            (k_ref.at[b, keys, key_head], k_s),
            (v_ref.at[b, keys, key_head], v_s),
            (k_at_ref.at[b, :, keys], k_at),
        )
        hopper.copy_to_shared(s["k_filled"].at[group], *pairs)
        plgpu.barrier_wait(s["k_filled"].at[group])

        def one_step(n, sums, mask):
            """Add one step. Keys are rows, queries columns: dk and dv are sums over columns."""
            slot = ring.slot_of(n)
            q_s, dout_s, stats_s = (s[x].at[slot] for x in ("q_s", "dout_s", "stats_s"))
            ring.wait_filled(n)

            def softmax_weights(z):
                z = shared.mask_scores(z, mask, k_at, s["q_at"].at[slot], 1, window, interpret)
                return jnp.exp2(z * (scale * LOG2E) - hopper.broadcast_along(lse, tile, 1))

            lse, delta = hopper.load_two_rows(stats_s, hopper.PER_COLUMN, interpret)
            start = hopper.broadcast_along(-delta, tile, 1)
            sums = _add_to_keys(sums, start, k_s, q_s, v_s, dout_s, softmax_weights, interpret)
            ring.release(n)
            return sums

        zero = hopper.fill_registers((ROWS, H), 0.0, hopper.TILE, interpret)
        # The tensor cores take longer than the mask's tests. A third loop would spill its bounds.
        loops = (Mask.ALL, visit.masked * G), (Mask.NONE, visit.count * G)
        dv, dk = shared.loop_by_mask(loops, one_step, (zero, zero))
        k_s[...] = (dk * scale).astype(dtype)
        v_s[...] = dv.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_s, dk_ref.at[b, keys, key_head])
        plgpu.copy_smem_to_gmem(v_s, dv_ref.at[b, keys, key_head])
        plgpu.wait_smem_to_gmem(0)


# The product dp starts from −Δ, which saves the subtraction. p enters a wgmma before dp is awaited,
# which prevents the compiler from moving the exponentials behind that wait.


def _add_to_queries(dq, start, q, k, dout, v, softmax_weights, interpret):
    """dq + (p∘(dO·vᵀ − Δ))·k with p = weights(q·kᵀ); start = −Δ over the tile."""
    if interpret:
        p = softmax_weights(hopper.interpreted_dot(q[...], k[...].T))
        dz = p * (start + hopper.interpreted_dot(dout[...], v[...].T))
        return dq + hopper.interpreted_dot(dz.astype(k.dtype), k[...])

    def body(refs):
        dq_ref, dp_ref = refs

        def with_scores(z_ref):
            plgpu.wgmma(z_ref, q, k.transpose((1, 0)))
            plgpu.wgmma(dp_ref, dout, v.transpose((1, 0)))
            p = softmax_weights(plgpu.wgmma_accumulator_load(z_ref, wait_n=1))
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            plgpu.wgmma(dq_ref, (p * dp).astype(k.dtype), k)

        pl.run_scoped(with_scores, hopper.ACC((q.shape[0], k.shape[0]), jnp.float32))

    return pl.run_state(body)((hopper.ACC.init(dq), hopper.ACC.init(start)))[0]


def _add_to_keys(sums, start, k, q, v, dout, softmax_weights, interpret):
    """(dv + p·dO, dk + (p∘(v·dOᵀ − Δ))·q) with p = weights(k·qᵀ); start = −Δ over the tile."""
    if interpret:
        p = softmax_weights(hopper.interpreted_dot(k[...], q[...].T))
        dz = p * (start + hopper.interpreted_dot(v[...], dout[...].T))
        dv = sums[0] + hopper.interpreted_dot(p.astype(k.dtype), dout[...])
        return dv, sums[1] + hopper.interpreted_dot(dz.astype(k.dtype), q[...])

    def body(refs):
        dv_ref, dk_ref, dp_ref = refs

        def with_scores(z_ref):
            plgpu.wgmma(z_ref, k, q.transpose((1, 0)))
            plgpu.wgmma(dp_ref, v, dout.transpose((1, 0)))
            p = softmax_weights(plgpu.wgmma_accumulator_load(z_ref, wait_n=1))
            plgpu.wgmma(dv_ref, p.astype(k.dtype), dout)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)  # dv's product goes on
            plgpu.wgmma(dk_ref, (p * dp).astype(k.dtype), q)

        pl.run_scoped(with_scores, hopper.ACC((k.shape[0], q.shape[0]), jnp.float32))

    return pl.run_state(body)(tuple(hopper.ACC.init(x) for x in (*sums, start)))[:2]
