# SPDX-License-Identifier: Apache-2.0
"""Sink attention for Hopper: the backward pass, in two kernels without atomics.

One block of threads owns queries and sums dq over keys; another owns keys and sums dk and dv over
the queries of all heads that share them, in a fixed order: the same bits every time. Both make the
weights again from lse. Five products would do where these take seven; the other way is to add to
dq from many blocks at once, in an order that nobody fixes, or block after block: docs/kernels.md.
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
from pallas_kernels.dispatch import gpu_cores
from pallas_kernels.sink_attention.pallas_gpu_blocks import (
    LOG2E,
    Mask,
    MosaicTiles,
    in_turn,
    only_seen,
    pad,
    padded,
    split_index,
    this_core,
    tile_refs,
    visits,
)

ROWS = hopper.WARPGROUP_ROWS


def query_tiles(H: int, window: int, G: int) -> MosaicTiles:
    """For dq. A thread holds scores and their cotangents, step/2 registers each, and H/2 sums.

    128 columns a wgmma keep shared memory ahead of the tensor cores, where registers allow; in a
    short window most of so long a step would be unseen, and two heads have the same rows.
    """
    short = 0 < window <= 128
    step, stages = (128, 4) if H == 64 and not short else (64, 4 if H == 64 else 2)
    return MosaicTiles(consumers=2, step=step, stages=stages, heads=gcd(G, 2) if short else 1)


def key_tiles(H: int, window: int) -> MosaicTiles:
    """For dk and dv. As above, but with two sums of H/2: 128 columns spill in batches of several
    rows, and so does a longer ring with heads of 128."""
    return MosaicTiles(consumers=2, step=64, stages=4 if H == 64 else 2)


def backward(q, k, v, do, lse, delta, layout, window, scale, interpret):
    """dq, dk, dv in their dtypes, of these keys; lse and Δ are those of all."""
    stats_BN2T = jnp.stack([lse * LOG2E, delta], 1).transpose(0, 3, 1, 2)
    arrays = (q, k, v, do.astype(q.dtype), stats_BN2T, layout)
    dq = _queries(*arrays, window, scale, interpret)
    dk, dv = _keys(*arrays, window, scale, interpret)
    return dq, dk, dv


def _queries(q, k, v, do, stats, layout, window, scale, interpret):
    (B, T, N, H), K, dtype = q.shape, k.shape[2], q.dtype
    tiles = query_tiles(H, window, N // K)
    where = padded(layout, tiles.rows, tiles.step, window)
    q, do, stats = pad(q, tiles.rows), pad(do, tiles.rows), pad(stats, tiles.rows, 3)
    k, v = pad(k, tiles.step), pad(v, tiles.step)
    C, stages = tiles.consumers, tiles.stages
    scratch = dict(
        q_s=tile_refs(2 * C, ROWS, H, dtype),  # of this tile and of the next
        do_s=tile_refs(2 * C, ROWS, H, dtype),
        stats_s=plgpu.SMEM((2 * C, 2, ROWS), jnp.float32),
        q_at=plgpu.SMEM((2 * C, 2, ROWS), jnp.int32),
        k_s=tile_refs(stages, tiles.step, H, dtype),
        v_s=tile_refs(stages, tiles.step, H, dtype),
        k_at=plgpu.SMEM((stages, 2, tiles.step), jnp.int32),
        q_here=plgpu.Barrier(num_arrivals=4, num_barriers=2 * C),
        here=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=C, num_barriers=stages),
    )
    kernel = plgpu.kernel(
        partial(_query_kernel, tiles=tiles, G=N // K, window=window, scale=scale,
                interpret=interpret),
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=[scratch],
        grid=(min(gpu_cores(), q.shape[1] // tiles.rows * B * N // tiles.heads),),
        grid_names=("core",),
        num_threads=C + 1,
        thread_name="warpgroup",
        kernel_name="sink_attention_dq",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpreter(interpret),
    )  # fmt: skip
    return kernel(q, k, v, do, stats, where.q_B2T, where.k_B2S, where.table())[:, :T]


def _query_kernel(
    q_ref, k_ref, v_ref, do_ref, stats_ref, q_at_ref, k_at_ref, table_ref, dq_ref, s,
    *, tiles, G, window, scale, interpret,
):  # fmt: skip
    (B, T, N, H), (C, step, stages, heads) = q_ref.shape, tiles
    dtype, tile = q_ref.dtype, (ROWS, step)
    group = lax.axis_index("warpgroup")
    mine, place = this_core(T // tiles.rows, B, N // heads)
    ring = hopper.Ring(stages, s["here"], s["free"])

    @pl.when(group == C)
    def _producer():
        plgpu.set_max_registers(hopper.REGISTERS[C][1], action="decrease")

        def one_tile(n, done):
            i, b, pair = place(n)
            visit, key_head = visits(table_ref, b, i), lax.div(pair, jnp.int32(G // heads))

            @pl.loop(0, visit.count)
            def _(k):
                keys, slot = pl.ds(visit.at(k) * step, step), ring.slot(done + k)
                ring.room(done + k)
                ring.copy(
                    done + k,
                    (k_ref.at[b, keys, key_head], s["k_s"].at[slot]),
                    (v_ref.at[b, keys, key_head], s["v_s"].at[slot]),
                    (k_at_ref.at[b, :, keys], s["k_at"].at[slot]),
                )

            return done + visit.count

        ring.drain(lax.fori_loop(0, mine, one_tile, jnp.int32(0)))

    @pl.when(group < C)
    def _consumer():
        plgpu.set_max_registers(hopper.REGISTERS[C][0], action="increase")

        def own_rows(n):
            i, b, pair = place(n)
            own, head = tiles.own(group, pair)
            return i, b, head, pl.ds(i * tiles.rows + own, ROWS)

        def at_slot(n, *names):
            return [s[x].at[2 * group + lax.rem(n, jnp.int32(2))] for x in names]

        def fetch_q(n):
            _, b, head, rows = own_rows(n)
            here, *to = at_slot(n, "q_here", "q_s", "do_s", "stats_s", "q_at")
            arrays = (q_ref.at[b, rows, head], do_ref.at[b, rows, head],
                      stats_ref.at[b, head, :, rows], q_at_ref.at[b, :, rows])  # fmt: skip
            hopper.copy_in(here, *zip(arrays, to, strict=True))

        def one_tile(n, done):
            i, b, head, rows = own_rows(n)
            visit = visits(table_ref, b, i)
            q_here, q_s, do_s, stats_s, q_at = at_slot(
                n, "q_here", "q_s", "do_s", "stats_s", "q_at"
            )
            # The next queries come where the tile before was, once its results are out of there.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(n + 1 < mine)(lambda: fetch_q(n + 1))
            plgpu.barrier_wait(q_here)
            lse, delta = hopper.load_two(stats_s, hopper.PER_ROW, interpret)

            def one_step(k, dq, mask):
                slot = ring.slot(done + k)
                k_s, v_s = s["k_s"].at[slot], s["v_s"].at[slot]
                ring.wait(done + k)

                def weights(z):
                    z = only_seen(z, mask, q_at, s["k_at"].at[slot], 0, window, interpret)
                    return jnp.exp2(z * (scale * LOG2E) - hopper.spread(lse, tile, 0))

                start = hopper.spread(-delta, tile, 0)
                dq = _add_to_queries(dq, start, q_s, k_s, do_s, v_s, weights, interpret)
                ring.leave(done + k)
                return dq

            dq = hopper.full((ROWS, H), 0.0, hopper.TILE, interpret)
            dq = in_turn(visit.loops, one_step, dq)
            q_s[...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s, dq_ref.at[b, rows, head])
            return done + visit.count

        fetch_q(jnp.int32(0))
        lax.fori_loop(0, mine, one_tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _keys(q, k, v, do, stats, layout, window, scale, interpret):
    (_, _, N, H), (B, S, K, _), dtype = q.shape, k.shape, q.dtype
    tiles = key_tiles(H, window)
    where = padded(layout, tiles.step, tiles.rows, window)
    q, do, stats = pad(q, tiles.step), pad(do, tiles.step), pad(stats, tiles.step, 3)
    k, v = pad(k, tiles.rows), pad(v, tiles.rows)
    C, stages = tiles.consumers, tiles.stages
    scratch = dict(
        k_s=tile_refs(C, ROWS, H, dtype),
        v_s=tile_refs(C, ROWS, H, dtype),
        k_at=plgpu.SMEM((C, 2, ROWS), jnp.int32),
        q_s=tile_refs(stages, tiles.step, H, dtype),
        do_s=tile_refs(stages, tiles.step, H, dtype),
        stats_s=plgpu.SMEM((stages, 2, tiles.step), jnp.float32),
        q_at=plgpu.SMEM((stages, 2, tiles.step), jnp.int32),
        k_here=plgpu.Barrier(num_arrivals=3, num_barriers=C),
        here=plgpu.Barrier(num_arrivals=4, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=C, num_barriers=stages),
    )
    kernel = plgpu.kernel(
        partial(_key_kernel, tiles=tiles, G=N // K, window=window, scale=scale,
                interpret=interpret),
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype),) * 2,
        scratch_types=[scratch],
        grid=(k.shape[1] // tiles.rows * B * K,),
        grid_names=("block",),
        num_threads=C + 1,
        thread_name="warpgroup",
        kernel_name="sink_attention_dkv",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpreter(interpret),
    )  # fmt: skip
    dk, dv = kernel(q, k, v, do, stats, where.q_B2T, where.k_B2S, where.table_of_keys())
    return dk[:, :S], dv[:, :S]


def _key_kernel(
    q_ref, k_ref, v_ref, do_ref, stats_ref, q_at_ref, k_at_ref, table_ref, dk_ref, dv_ref, s,
    *, tiles, G, window, scale, interpret,
):  # fmt: skip
    (B, S, K, H), (C, step, stages, _) = k_ref.shape, tiles
    dtype, tile = q_ref.dtype, (ROWS, step)
    # Early keys, which most queries see, go first.
    i, b, key_head = split_index(lax.axis_index("block"), S // tiles.rows, B, K)
    visit = visits(table_ref, b, i)
    group = lax.axis_index("warpgroup")
    ring = hopper.Ring(stages, s["here"], s["free"])

    @pl.when(group == C)
    def _producer():
        plgpu.set_max_registers(hopper.REGISTERS[C][1], action="decrease")

        @pl.loop(0, visit.count * G)
        def _(n):
            # The heads of one block of queries lie side by side in memory.
            queries = pl.ds(visit.at(lax.div(n, jnp.int32(G))) * step, step)
            head, slot = key_head * G + lax.rem(n, jnp.int32(G)), ring.slot(n)
            ring.room(n)
            ring.copy(
                n,
                (q_ref.at[b, queries, head], s["q_s"].at[slot]),
                (do_ref.at[b, queries, head], s["do_s"].at[slot]),
                (stats_ref.at[b, head, :, queries], s["stats_s"].at[slot]),
                (q_at_ref.at[b, :, queries], s["q_at"].at[slot]),
            )

        ring.drain(visit.count * G)

    @pl.when(group < C)
    def _consumer():
        plgpu.set_max_registers(hopper.REGISTERS[C][0], action="increase")
        k_s, v_s, k_at = (s[x].at[group] for x in ("k_s", "v_s", "k_at"))
        keys = pl.ds(i * tiles.rows + group * ROWS, ROWS)
        pairs = (
            (k_ref.at[b, keys, key_head], k_s),
            (v_ref.at[b, keys, key_head], v_s),
            (k_at_ref.at[b, :, keys], k_at),
        )
        hopper.copy_in(s["k_here"].at[group], *pairs)
        plgpu.barrier_wait(s["k_here"].at[group])

        def one_step(n, sums, mask):
            """Keys are rows here and queries columns, so that dk and dv sum over columns."""
            slot = ring.slot(n)
            q_s, do_s, stats_s = (s[x].at[slot] for x in ("q_s", "do_s", "stats_s"))
            ring.wait(n)

            def weights(z):
                z = only_seen(z, mask, k_at, s["q_at"].at[slot], 1, window, interpret)
                return jnp.exp2(z * (scale * LOG2E) - hopper.spread(lse, tile, 1))

            lse, delta = hopper.load_two(stats_s, hopper.PER_COLUMN, interpret)
            start = hopper.spread(-delta, tile, 1)
            sums = _add_to_keys(sums, start, k_s, q_s, v_s, do_s, weights, interpret)
            ring.leave(n)
            return sums

        zero = hopper.full((ROWS, H), 0.0, hopper.TILE, interpret)
        # The tensor cores take longer than all tests here, and one more loop has bounds that spill.
        loops = (Mask.ALL, visit.masked * G), (Mask.NONE, visit.count * G)
        dv, dk = in_turn(loops, one_step, (zero, zero))
        k_s[...] = (dk * scale).astype(dtype)
        v_s[...] = dv.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_s, dk_ref.at[b, keys, key_head])
        plgpu.copy_smem_to_gmem(v_s, dv_ref.at[b, keys, key_head])
        plgpu.wait_smem_to_gmem(0)


# A product whose sum starts at −Δ saves the subtraction. Where p goes into a wgmma before the
# product beside it is waited for, the compiler cannot move its exponentials behind that wait.


def _add_to_queries(dq, start, q, k, do, v, weights, interpret):
    """dq + (p∘(dO·vᵀ − Δ))·k with p = weights(q·kᵀ); start = −Δ over the tile."""
    if interpret:
        p = weights(hopper.dot(q[...], k[...].T))
        dz = p * (start + hopper.dot(do[...], v[...].T))
        return dq + hopper.dot(dz.astype(k.dtype), k[...])

    def body(refs):
        dq_ref, dp_ref = refs

        def with_scores(z_ref):
            plgpu.wgmma(z_ref, q, k.transpose((1, 0)))
            plgpu.wgmma(dp_ref, do, v.transpose((1, 0)))
            p = weights(plgpu.wgmma_accumulator_load(z_ref, wait_n=1))
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
            plgpu.wgmma(dq_ref, (p * dp).astype(k.dtype), k)

        pl.run_scoped(with_scores, hopper.ACC((q.shape[0], k.shape[0]), jnp.float32))

    return pl.run_state(body)((hopper.ACC.init(dq), hopper.ACC.init(start)))[0]


def _add_to_keys(sums, start, k, q, v, do, weights, interpret):
    """(dv + p·dO, dk + (p∘(v·dOᵀ − Δ))·q) with p = weights(k·qᵀ); start = −Δ over the tile."""
    if interpret:
        p = weights(hopper.dot(k[...], q[...].T))
        dz = p * (start + hopper.dot(v[...], do[...].T))
        dv = sums[0] + hopper.dot(p.astype(k.dtype), do[...])
        return dv, sums[1] + hopper.dot(dz.astype(k.dtype), q[...])

    def body(refs):
        dv_ref, dk_ref, dp_ref = refs

        def with_scores(z_ref):
            plgpu.wgmma(z_ref, k, q.transpose((1, 0)))
            plgpu.wgmma(dp_ref, v, do.transpose((1, 0)))
            p = weights(plgpu.wgmma_accumulator_load(z_ref, wait_n=1))
            plgpu.wgmma(dv_ref, p.astype(k.dtype), do)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)  # dv's product goes on
            plgpu.wgmma(dk_ref, (p * dp).astype(k.dtype), q)

        pl.run_scoped(with_scores, hopper.ACC((k.shape[0], q.shape[0]), jnp.float32))

    return pl.run_state(body)(tuple(hopper.ACC.init(x) for x in (*sums, start)))[:2]
