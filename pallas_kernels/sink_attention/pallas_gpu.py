# SPDX-License-Identifier: Apache-2.0
"""Sink attention for Hopper: warp-specialised blocks on wgmma and TMA; the forward pass.

One warpgroup fetches keys and values into a ring in shared memory; the others own 64 queries each
and take turns at the tensor cores: one multiplies while the others exponentiate. With heads of 64
a step's exponentials alone take as long as its products and the rest of the softmax, by the
compiler's stall counts, half as long again, so three take turns; with heads of 128 two do. The
sink is where the running softmax starts. Blocks nobody sees are not read, blocks seen whole are
not masked. A turn is a step's product of weights and values and, right behind it, the next step's
of queries and keys: the tensor cores wait for no result. A block of threads stays on its core and
counts on over its tiles: the last step of one makes the first scores of the next, whose queries
and keys have come meanwhile. Next: pallas_gpu_blocks.py, pallas_gpu_backward.py.
"""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import hopper
from pallas_kernels.dispatch import gpu_cores, target
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import pallas_gpu_backward
from pallas_kernels.sink_attention.common import backward_sums, named
from pallas_kernels.sink_attention.pallas_gpu_blocks import (
    LOG2E,
    MosaicTiles,
    in_turn,
    only_seen,
    pad,
    padded,
    this_core,
    tile_refs,
    visits,
)
from pallas_kernels.sink_attention.reference import UNSEEN
from pallas_kernels.sink_attention.signature import (
    Gradients,
    Keys,
    Queries,
    Result,
    Rows,
    Sinks,
)

ROWS = hopper.WARPGROUP_ROWS


def forward_tiles(H: int, window: int, G: int) -> MosaicTiles:
    """A thread holds step/2 scores, step/4 weights and H/2 outputs: 128 of 160 registers with
    three warpgroups and heads of 64, 160 of 240 with two and heads of 128.

    They also leave room for one block of threads per core, so its ring may be long. In a short
    window most of a long step would be unseen, and of a long block too: there the warpgroups have
    the same 64 rows of heads that share keys, as many as divide the G of them.
    """
    if 0 < window <= 128:
        consumers = 4 if H == 64 else 2
        return MosaicTiles(consumers, step=64, stages=4, heads=gcd(G, consumers))
    return MosaicTiles(consumers=3, step=128, stages=4) if H == 64 else MosaicTiles(2, 128, 2)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attend(q, k, v, sink, layout, window, scale, interpret):
    return forward(q, k, v, sink, layout, window, scale, interpret)


def _attend_fwd(q, k, v, sink, layout, window, scale, interpret):
    o, lse = named(*forward(q, k, v, sink, layout, window, scale, interpret))
    return (o, lse), (q, k, v, sink, layout, o, lse)


def _attend_bwd(window, scale, interpret, saved, cotangents):
    q, k, v, sink, layout, o, lse = saved
    do, dlse = cotangents
    lse, delta, dsink = backward_sums(o, lse, sink, do, dlse)
    arrays = q, k, v, do, lse, delta, layout
    dq, dk, dv = pallas_gpu_backward.backward(*arrays, window, scale, interpret)
    return dq, dk, dv, dsink, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def mosaic_gpu(
    q_BTNH: Queries, k_BSKH: Keys, v_BSKH: Keys, sink_N: Sinks, layout: Layout, window: int,
    scale: float, *, interpret: bool = False,
) -> Result:  # fmt: skip
    """(o, lse) on a Hopper GPU; see `reference` for the formula. Differentiable."""
    q, scale, _ = _positive(q_BTNH, scale)
    return _attend(q, k_BSKH, v_BSKH, sink_N, layout, window, scale, interpret)


def _positive(q: Array, scale: float) -> tuple[Array, float, int]:
    """(q, scale, sign) with the scale above 0, as the kernels scale after taking a maximum."""
    sign = (scale > 0) - (scale < 0)
    return (q, scale, sign) if scale > 0 else (q * sign, -scale or 1.0, sign)


def mosaic_gpu_backward(
    q_BTNH: Queries, k_BSKH: Keys, v_BSKH: Keys, do_BTNH: Queries, lse_BTN: Rows, delta_BTN: Rows,
    layout: Layout, window: int, scale: float, *, interpret: bool = False,
) -> Gradients:  # fmt: skip
    """(dq, dk, dv) on a Hopper GPU; see `reference_backward` for the formula. Each is rounded to
    the dtype of q."""
    q, scale, sign = _positive(q_BTNH, scale)
    arrays = q, k_BSKH, v_BSKH, do_BTNH, lse_BTN, delta_BTN, layout
    gradients = pallas_gpu_backward.backward(*arrays, window, scale, interpret)
    dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
    return dq * sign, dk, dv


def in_order(q, k, v, sink, layout, window, scale, interpret):
    """`forward` of a scale above 0, for in_order.py: blocks of keys by their place alone."""
    return forward(q, k, v, sink, layout, window, scale, interpret, ordered=True)


def unsupported(q_BTNH: Array, k_BSKH: Array, *_arrays: Array) -> str | None:
    """Why the kernel cannot run, or None."""
    if not target().hopper:
        return f"it needs a Hopper GPU (wgmma), this is {target().kind}"
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {q_BTNH.dtype} is not bfloat16 or float16"
    if q_BTNH.shape[3] not in (64, 128):
        return f"head size {q_BTNH.shape[3]} is not 64 or 128"
    if 0 in (*q_BTNH.shape, *k_BSKH.shape):
        return "there are no queries or no keys"
    return None


unsupported_backward = unsupported


def forward(q, k, v, sink, layout, window, scale, interpret, ordered=False):
    """o [B, T, N, H] in q's dtype and lse [B, T, N] in float32; see `Padded.table_in_order`."""
    (B, T, N, H), K = q.shape, k.shape[2]
    tiles = forward_tiles(H, window, N // K)
    where = padded(layout, tiles.rows, tiles.step, window)
    q, k, v = pad(q, ROWS), pad(k, tiles.step), pad(v, tiles.step)
    blocks = pl.cdiv(T, tiles.rows)
    # The sink starts the running maximum, in units of log 2, and the sum; −inf starts it empty.
    top_N = jnp.maximum(sink.astype(jnp.float32) * LOG2E, UNSEEN / 2)
    total_N = jnp.exp2(sink.astype(jnp.float32) * LOG2E - top_N)

    C, dtype = tiles.consumers, q.dtype
    scratch = dict(
        q_s=tile_refs(2 * C, ROWS, H, dtype),  # of this tile and of the next
        k_s=tile_refs(tiles.stages, tiles.step, H, dtype),
        v_s=tile_refs(tiles.stages, tiles.step, H, dtype),
        q_at=plgpu.SMEM((2 * C, 2, ROWS), jnp.int32),
        k_at=plgpu.SMEM((tiles.stages, 2, tiles.step), jnp.int32),
        lse_s=plgpu.SMEM((C, ROWS), jnp.float32),
        q_here=plgpu.Barrier(num_arrivals=2, num_barriers=2 * C),
        k_here=plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
        v_here=plgpu.Barrier(num_barriers=tiles.stages),
        k_free=plgpu.Barrier(num_arrivals=C, num_barriers=tiles.stages),
        v_free=plgpu.Barrier(num_arrivals=C, num_barriers=tiles.stages),
        turn=plgpu.Barrier(num_barriers=C),
    )
    kernel = plgpu.kernel(
        partial(_forward_kernel, tiles=tiles, G=N // K, window=window, factor=scale * LOG2E,
                interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((B, N, q.shape[1]), jnp.float32),
        ),
        scratch_types=[scratch],
        grid=(min(gpu_cores(), blocks * B * N // tiles.heads),),
        grid_names=("core",),
        num_threads=C + 1,
        thread_name="warpgroup",
        kernel_name="sink_attention_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpreter(interpret),
    )  # fmt: skip
    starts = jnp.stack([top_N, total_N])
    table = where.table_in_order() if ordered else where.table_of_some()
    o, lse = kernel(q, k, v, starts, where.q_B2T, where.k_B2S, table)
    return o[:, :T], lse[:, :, :T].transpose(0, 2, 1)


def _forward_kernel(
    q_ref, k_ref, v_ref, starts_ref, q_at_ref, k_at_ref, table_ref, o_ref, lse_ref, s,
    *, tiles, G, window, factor, interpret,
):  # fmt: skip
    (B, T, N, H), (C, step, stages, heads) = q_ref.shape, tiles
    dtype, tile, blocks = q_ref.dtype, (ROWS, step), pl.cdiv(T, tiles.rows)
    group = lax.axis_index("warpgroup")
    mine, place = this_core(blocks, B, N // heads)
    k_ring, v_ring = (hopper.Ring(stages, s[f"{x}_here"], s[f"{x}_free"]) for x in "kv")

    @pl.when(group == C)
    def _producer():
        plgpu.set_max_registers(hopper.REGISTERS[C][1], action="decrease")

        def one_tile(n, done):
            i, b, pair = place(n)
            visit, key_head = visits(table_ref, b, i), lax.div(pair, jnp.int32(G // heads))

            @pl.loop(0, visit.count)
            def _(k):
                keys, slot = pl.ds(visit.at(k) * step, step), k_ring.slot(done + k)
                k_ring.room(done + k)
                k_ring.copy(
                    done + k,
                    (k_ref.at[b, keys, key_head], s["k_s"].at[slot]),
                    (k_at_ref.at[b, :, keys], s["k_at"].at[slot]),
                )
                v_ring.room(done + k)
                v_ring.copy(done + k, (v_ref.at[b, keys, key_head], s["v_s"].at[slot]))

            return done + visit.count

        done = lax.fori_loop(0, mine, one_tile, jnp.int32(0))
        # The last step begins one more tile as every other does, and nobody takes its scores.
        k_ring.room(done)
        some, slot = pl.ds(0, step), k_ring.slot(done)
        k_ring.copy(
            done,
            (k_ref.at[0, some, 0], s["k_s"].at[slot]),
            (k_at_ref.at[0, :, some], s["k_at"].at[slot]),
        )
        k_ring.drain(done + 1)
        v_ring.drain(done)

    @pl.when(group < C)
    def _consumer():
        plgpu.set_max_registers(hopper.REGISTERS[C][0], action="increase")

        def own_rows(n):
            """Of tile n: block, row of the batch, head, first row, and rows within the array."""
            i, b, pair = place(n)
            own, head = tiles.own(group, pair)
            first = i * tiles.rows + own
            # The last block may have more warpgroups than rows: those go along and write nothing.
            return i, b, head, first, pl.ds(jnp.minimum(first, T - ROWS), ROWS)

        def q_slot(n):
            return 2 * group + (n & 1)

        def fetch_q(n):
            _, b, head, _, rows = own_rows(jnp.minimum(n, mine - 1))
            to = [s[x].at[q_slot(n)] for x in ("q_s", "q_at", "q_here")]
            pairs = (q_ref.at[b, rows, head], to[0]), (q_at_ref.at[b, :, rows], to[1])
            hopper.copy_in(to[2], *pairs)

        def q_wait(n):
            plgpu.barrier_wait(s["q_here"].at[q_slot(n)])

        def my_turn():
            plgpu.barrier_wait(s["turn"].at[group])

        def pass_on():
            plgpu.barrier_arrive(s["turn"].at[lax.rem(group + 1, jnp.int32(C))])

        def scores(n, at):
            """The refs of one step's product of queries and keys."""
            return s["q_s"].at[q_slot(n)], s["k_s"].at[k_ring.slot(at)]

        def one_tile(n, carry):
            done, z = carry  # z: its first step's scores
            i, b, head, first, rows = own_rows(n)
            visit = visits(table_ref, b, i)
            q_s, q_at = (s[x].at[q_slot(n)] for x in ("q_s", "q_at"))

            def one_step(k, carry, mask):
                acc, top, total, z = carry
                at = done + k
                slot, ends = k_ring.slot(at), k + 1 == visit.count
                z = only_seen(z, mask, q_at, s["k_at"].at[slot], 0, window, interpret)
                k_ring.leave(at)
                new = jnp.maximum(top, z.max(axis=1) * factor)
                shrink = jnp.exp2(top - new)
                p = jnp.exp2(z * factor - hopper.spread(new, tile, 0))
                acc = acc * hopper.spread(shrink, acc.shape, 0)
                total = total * shrink + p.sum(axis=1)
                weights = p.astype(dtype)
                v_ring.wait(at)
                k_ring.wait(at + 1)
                pl.when(ends)(lambda: q_wait(n + 1))
                my_turn()  # passed on once both products are on their way
                following = scores(n + ends.astype(jnp.int32), at + 1)
                acc, z = hopper.add_product_and_next(
                    acc, weights, s["v_s"].at[slot], *following, interpret, pass_on
                )
                v_ring.leave(at)
                return acc, new, total, z

            carry = (
                hopper.full((ROWS, H), 0.0, hopper.TILE, interpret),
                hopper.full((ROWS,), starts_ref[0, head], hopper.PER_ROW, interpret),
                hopper.full((ROWS,), starts_ref[1, head], hopper.PER_ROW, interpret),
                z,
            )
            # The next queries come where the tile before was, once its results are out of there.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch_q(n + 1)
            acc, top, total, z = in_turn(visit.loops, one_step, carry)

            # Without keys and without a sink there is nothing to divide by.
            some = total > 0
            safe = jnp.where(some, total, 1.0)
            q_s[...] = (acc * hopper.spread(1.0 / safe, acc.shape, 0)).astype(dtype)
            s["lse_s"].at[group][...] = jnp.where(some, top / LOG2E + jnp.log(safe), -jnp.inf)
            plgpu.commit_smem()

            @pl.when(first < T)
            def _():
                plgpu.copy_smem_to_gmem(q_s, o_ref.at[b, rows, head])
                plgpu.copy_smem_to_gmem(s["lse_s"].at[group], lse_ref.at[b, head, rows])

            return done + visit.count, z

        start = jnp.int32(0)
        fetch_q(start)
        pl.when(group == C - 1)(pass_on)  # the first begins
        q_wait(start)
        k_ring.wait(start)
        my_turn()
        z = hopper.product(*scores(start, start), interpret, pass_on)
        done, _ = lax.fori_loop(0, mine, one_tile, (start, z))
        k_ring.leave(done)
        pl.when(group == 0)(my_turn)
        plgpu.wait_smem_to_gmem(0)
