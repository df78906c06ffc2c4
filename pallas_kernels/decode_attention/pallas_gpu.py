# SPDX-License-Identifier: Apache-2.0
"""Decoding on Hopper: a kernel over splits of fixed length of every row, then a kernel to merge.

Decoding is bound by memory bandwidth, so the design keeps loads of keys and values in flight: one
warpgroup holds all query rows of one key head in one wgmma tile, TMA fetches page after page into
a ring of stages, and two blocks of threads share a core, so that one computes while the other
waits. Splits have a fixed number of slots and are merged in order: a row's bits depend neither on
the number of rows nor on the size of the cache.
Next: pages.py for what is read, pallas_kernels/hopper.py for the tiles.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import hopper
from pallas_kernels.decode_attention import pages
from pallas_kernels.decode_attention.pages import Pages
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.hopper.pallas_gpu_blocks import arrays_unsupported
from pallas_kernels.sink_attention.reference import UNSEEN
from pallas_kernels.sink_attention.signature import Keys, Queries, Result, Sinks

ROWS = hopper.WARPGROUP_ROWS  # query rows (queries times heads per key head) of one tile
# Slots per step: scores then take 32 registers a thread, and so do outputs.
KEYS = 64
# Steps in shared memory. With heads of 64 a step is 16 KiB, so two blocks of threads fit on a core
# with 96 KiB in flight; bandwidth times latency is 33 KiB a core (4.3 TB/s, 1 µs). With heads of
# 128 one block fits.
STAGES = 4
# Slots per split. 64 rows of 8k have 4096 splits for 264 concurrent blocks, one row of 8k has 64.
# Each split writes 2 KiB of partial results and reads 256 KiB of keys and values.
SPLIT = 1024
# A swizzled tile has 8 rows, so a page must not be smaller.
MIN_PAGE = 8
LOG2E = math.log2(math.e)  # the hardware's exponential has base 2


class DecodeTiles(NamedTuple):
    """The query rows of one key head, in tiles of ROWS."""

    count: int
    rows: int  # rows of each tile that are written to the results, a multiple of 8


def decode_attention_mosaic_gpu(
    q_BTNH: Queries,
    k_BSKH: Keys,
    v_BSKH: Keys,
    sink_N: Sinks,
    layout: Layout,
    window: int,
    scale: float,
    *,
    interpret: bool = False,
) -> Result:
    """(o, lse) on a Hopper GPU; see `decode_attention_reference` for the formula."""
    x = pages.pages_from_cache(k_BSKH, v_BSKH, layout, window, max_page=KEYS, min_page=MIN_PAGE)
    return _attend_gpu(q_BTNH, x, sink_N, scale, interpret)


def decode_attention_in_stack_mosaic_gpu(
    q_BTNH: Queries,
    k_LBSKH: Array,
    v_LBSKH: Array,
    layer: Array,
    sink_N: Sinks,
    layout: Layout,
    window: int,
    scale: float,
    *,
    interpret: bool = False,
) -> Result:
    """`decode_attention_mosaic_gpu` of one layer of stacked caches, which is read in place."""
    page = math.gcd(k_LBSKH.shape[2], KEYS)
    if page < MIN_PAGE:  # pages of padded slots: of a copy of the layer, not of the stack
        k, v = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (k_LBSKH, v_LBSKH))
        return decode_attention_mosaic_gpu(
            q_BTNH, k, v, sink_N, layout, window, scale, interpret=interpret
        )
    x = pages.pages_from_stack(k_LBSKH, v_LBSKH, layer, layout, window, page)
    return _attend_gpu(q_BTNH, x, sink_N, scale, interpret)


def decode_attention_mosaic_gpu_unsupported(q_BTNH: Any, k_BSKH: Any, *_arrays: Any) -> str | None:
    """The reason why the kernel cannot run, or None."""
    if reason := arrays_unsupported(q_BTNH, k_BSKH):
        return reason
    if q_BTNH.shape[1] > pages.MAX_QUERIES:
        return f"{q_BTNH.shape[1]} queries per row are more than {pages.MAX_QUERIES}"
    return None


def decode_tiles(T: int, G: int) -> DecodeTiles:
    """One tile with as many rows as needed, or several full ones."""
    count = -(-T * G // ROWS)
    return DecodeTiles(count, ROWS if count > 1 else -(-T * G // 8) * 8)


def _attend_gpu(q_BTNH: Array, x: Pages, sink_N: Array, scale: float, interpret: bool):
    (B, T, N, H), K, dtype = q_BTNH.shape, x.k_PSKH.shape[2], q_BTNH.dtype
    # A short cache is one split.
    G, split = N // K, min(SPLIT, -(-x.visible_bits_BS.shape[1] // KEYS) * KEYS)
    if scale <= 0:  # the kernel scales after taking a maximum
        q_BTNH, scale = q_BTNH * jnp.asarray(-1 if scale else 0, dtype), -scale or 1.0
    tiles = decode_tiles(T, G)
    x = pages.pad_to_splits(x, split)
    n = x.visible_bits_BS.shape[1] // split
    # blocks [B, n, 4]: ranges of blocks of each split; splits [B, 2]: range of splits of each row
    blocks = pages.split_ranges(x.visible_bits_BS, T, split, KEYS)
    live = (blocks[:, :, 3] > 0)[:, None, :]
    splits = pages.block_ranges(live, live)[:, 0, :][:, jnp.array([0, 3])]

    def split_tiles(rows: Array) -> Array:  # [.., T·G, ...] to [.., tiles, ROWS, ...] at axis 2
        pad = [(0, 0)] * rows.ndim
        pad[2] = (0, tiles.count * ROWS - T * G)
        rows = jnp.pad(rows, pad)
        return rows.reshape(*rows.shape[:2], tiles.count, ROWS, *rows.shape[3:])

    q = split_tiles(q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H))
    sink_KG = sink_N.astype(jnp.float32).reshape(K, G)
    sinks = split_tiles(jnp.tile(sink_KG, (1, T))[None])[0]
    bit = jnp.left_shift(1, jnp.repeat(jnp.arange(T, dtype=jnp.int32), G))
    bits = split_tiles(bit[None, None])[0, 0]

    common: dict[str, Any] = dict(
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpret_params(interpret),
    )
    per_tile, visible_bits = KEYS // x.page, x.visible_bits_BS.reshape(B, -1, KEYS)
    table = x.table_BJ.reshape(B, n, split // x.page)
    # A copy moves a multiple of 128 bytes.
    table = jnp.pad(table, ((0, 0), (0, 0), (0, -table.shape[2] % 32)))
    parts, lses = plgpu.kernel(
        partial(_split_kernel, tiles=tiles, page=x.page, factor=scale * LOG2E, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((B, K, n, tiles.count, tiles.rows, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, n, tiles.count, ROWS), jnp.float32),
        ),
        scratch_types=[
            dict(
                q_s=plgpu.SMEM((ROWS, H), dtype, transforms=hopper.swizzle_transforms()),
                k_s=plgpu.SMEM((STAGES, KEYS, H), dtype, transforms=hopper.swizzle_transforms()),
                v_s=plgpu.SMEM((STAGES, KEYS, H), dtype, transforms=hopper.swizzle_transforms()),
                o_s=_float_tile(H),
                lse_s=plgpu.SMEM((ROWS,), jnp.float32),
                bits_s=plgpu.SMEM((ROWS,), jnp.int32),
                column_bits_s=plgpu.SMEM((split // KEYS, KEYS), jnp.int32),
                row_bits_s=plgpu.SMEM((split // KEYS, KEYS), jnp.int32),
                table_s=plgpu.SMEM((table.shape[2],), jnp.int32),
                # An arrival for each copy of `one_split`, and for keys and values of each page of a
                # step.
                start=plgpu.Barrier(num_arrivals=5),
                filled=plgpu.Barrier(num_arrivals=2 * per_tile, num_barriers=STAGES),
            )
        ],
        grid=(B, n, K * tiles.count),  # heads vary fastest: adjacent in memory
        grid_names=("row", "split", "head"),
        kernel_name="decode_attention_splits",
        **common,
    )(q, x.k_PSKH, x.v_PSKH, table, visible_bits, bits, blocks, splits)
    o, lse = plgpu.kernel(
        partial(_merge_kernel, tiles=tiles, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((B, K, tiles.count, tiles.rows, H), dtype),
            jax.ShapeDtypeStruct((B, K, tiles.count, ROWS), jnp.float32),
        ),
        scratch_types=[
            dict(
                part_s=_float_tile(H, STAGES),
                lses_s=plgpu.SMEM((STAGES, ROWS), jnp.float32),
                sink_s=plgpu.SMEM((ROWS,), jnp.float32),
                o_s=plgpu.SMEM((ROWS, H), dtype, transforms=hopper.swizzle_transforms()),
                lse_s=plgpu.SMEM((ROWS,), jnp.float32),
                start=plgpu.Barrier(),
                filled=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            )
        ],
        grid=(B, K * tiles.count),
        grid_names=("row", "head"),
        kernel_name="decode_attention_merge",
        **common,
    )(parts, lses, sinks, splits)
    o = o.reshape(B, K, -1, H)[:, :, : T * G].reshape(B, K, T, G, H)
    lse = lse.reshape(B, K, -1)[:, :, : T * G].reshape(B, K, T, G)
    return (
        o.transpose(0, 2, 1, 3, 4).reshape(B, T, N, H),
        lse.transpose(0, 2, 1, 3).reshape(B, T, N),
    )


def _float_tile(H: int, *stages: int):
    transforms = (hopper.Tiling((8, 32)), hopper.Swizzle(128))
    return plgpu.SMEM((*stages, ROWS, H), jnp.float32, transforms=transforms)


def _head_and_tile(tiles: DecodeTiles):
    index = lax.axis_index("head")
    return lax.div(index, jnp.int32(tiles.count)), lax.rem(index, jnp.int32(tiles.count))


def _split_kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    seen_ref,
    bits_ref,
    blocks_ref,
    splits_ref,
    o_ref,
    lse_ref,
    s,
    *,
    tiles,
    page,
    factor,
    interpret,
):
    """One split of one key head of one row: o over its own slots, and lse without the sink."""
    b, n = lax.axis_index("row"), lax.axis_index("split")
    head, tile = _head_and_tile(tiles)
    H, dtype = q_ref.shape[4], q_ref.dtype
    per_step, scores = KEYS // page, (ROWS, KEYS)
    steps = s["column_bits_s"].shape[0]  # of a split

    def one_split():
        for source, destination in (
            (table_ref.at[b, n], s["table_s"]),
            (seen_ref.at[b, pl.ds(n * steps, steps)], s["column_bits_s"]),
            # a second copy: columns of z and rows of v need different register layouts
            (seen_ref.at[b, pl.ds(n * steps, steps)], s["row_bits_s"]),
            (bits_ref.at[tile], s["bits_s"]),
            (q_ref.at[b, head, tile], s["q_s"]),
        ):
            plgpu.copy_gmem_to_smem(source, destination, s["start"])
        # Blocks that need a mask come first, then full blocks.
        first, whole_first, whole_last, last = (blocks_ref[b, n, i] for i in range(4))
        before = whole_first - first
        masked = before + last - whole_last
        count = last - first

        def block_at(i):
            edge = jnp.where(i < before, first + i, whole_last + i - before)
            return jnp.where(i < masked, edge, whole_first + i - masked)

        def fetch_step(i):
            slot = lax.rem(i, jnp.int32(STAGES))
            block = block_at(i)
            for j in range(per_step):
                page_id = s["table_s"][block * per_step + j]
                for source, destination in ((k_ref, "k_s"), (v_ref, "v_s")):
                    destination = (
                        s[destination].at[slot]
                        if per_step == 1
                        else s[destination].at[slot, pl.ds(j * page, page)]
                    )
                    plgpu.copy_gmem_to_smem(
                        source.at[page_id, :, head], destination, s["filled"].at[slot]
                    )

        plgpu.barrier_wait(s["start"])
        lax.fori_loop(0, jnp.minimum(count, STAGES - 1), lambda i, _: fetch_step(i), None)

        def one_step(i, carry, is_masked):
            acc, top, total = carry
            slot = lax.rem(i, jnp.int32(STAGES))
            plgpu.barrier_wait(s["filled"].at[slot])
            z = hopper.multiply_transposed(s["q_s"], s["k_s"].at[slot], interpret) * factor
            if is_masked:
                column_bits = hopper.load_registers(
                    s["column_bits_s"].at[block_at(i)], hopper.PER_COLUMN, interpret
                )
                bit = hopper.load_registers(s["bits_s"], hopper.PER_ROW, interpret)
                visible = hopper.broadcast_along(column_bits, scores, 1) & hopper.broadcast_along(
                    bit, scores, 0
                )
                z = jnp.where(visible != 0, z, UNSEEN)
                # weights of invisible slots are 0, but 0·NaN is NaN: set v to 0 there
                v_s = s["v_s"].at[slot]
                row_bits = hopper.load_registers(
                    s["row_bits_s"].at[block_at(i)], hopper.PER_ROW, interpret
                )
                v = hopper.load_registers(v_s, hopper.TILE, interpret).astype(jnp.float32)
                v = jnp.where(hopper.broadcast_along(row_bits, (KEYS, H), 0) != 0, v, 0.0)
                v_s[...] = v.astype(dtype)
            new = jnp.maximum(top, z.max(axis=1))
            shrink = jnp.exp2(top - new)
            p = jnp.exp2(z - hopper.broadcast_along(new, scores, 0))
            total = total * shrink + p.sum(axis=1)
            # This is also a barrier: all warps have finished the previous step; its stage is free.
            plgpu.commit_smem()

            @pl.when(i + STAGES - 1 < count)
            def _():
                fetch_step(i + STAGES - 1)

            acc = acc * hopper.broadcast_along(shrink, acc.shape, 0)
            acc = hopper.add_product(acc, p.astype(dtype), s["v_s"].at[slot], interpret)
            return acc, new, total

        carry = (
            hopper.fill_registers((ROWS, H), 0.0, hopper.TILE, interpret),
            # Halfway to UNSEEN: the weights of a row that sees nothing are then exp2 of a huge
            # negative number, which is 0, and not exp2(0).
            hopper.fill_registers((ROWS,), UNSEEN / 2, hopper.PER_ROW, interpret),
            hopper.fill_registers((ROWS,), 0.0, hopper.PER_ROW, interpret),
        )
        carry = lax.fori_loop(0, masked, partial(one_step, is_masked=True), carry)
        carry = lax.fori_loop(masked, count, partial(one_step, is_masked=False), carry)
        acc, top, total = carry
        has_weights = total > 0
        safe = jnp.where(has_weights, total, 1.0)
        s["o_s"][...] = acc * hopper.broadcast_along(1.0 / safe, acc.shape, 0)
        s["lse_s"][...] = jnp.where(has_weights, top / LOG2E + jnp.log(safe), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(_result_rows(s["o_s"], tiles), o_ref.at[b, head, n, tile])
        plgpu.copy_smem_to_gmem(s["lse_s"], lse_ref.at[b, head, n, tile])
        # Shared memory must not be given up while copies still read it.
        plgpu.wait_smem_to_gmem(0)

    pl.when((n >= splits_ref[b, 0]) & (n < splits_ref[b, 1]))(one_split)


def _merge_kernel(part_ref, lses_ref, sink_ref, splits_ref, o_ref, lse_ref, s, *, tiles, interpret):
    """Merge the splits of one key head of one row in order, starting with the sink."""
    b = lax.axis_index("row")
    head, tile = _head_and_tile(tiles)
    first, last = splits_ref[b, 0], splits_ref[b, 1]
    plgpu.copy_gmem_to_smem(sink_ref.at[head, tile], s["sink_s"], s["start"])

    def fetch_split(n):
        slot = lax.rem(n - first, jnp.int32(STAGES))
        barrier = s["filled"].at[slot]
        plgpu.copy_gmem_to_smem(
            part_ref.at[b, head, n, tile], _result_rows(s["part_s"].at[slot], tiles), barrier
        )
        plgpu.copy_gmem_to_smem(lses_ref.at[b, head, n, tile], s["lses_s"].at[slot], barrier)

    prefetch_end = jnp.minimum(last, first + STAGES - 1)
    lax.fori_loop(first, prefetch_end, lambda n, _: fetch_split(n), None)
    plgpu.barrier_wait(s["start"])
    sink = hopper.load_registers(s["sink_s"], hopper.PER_ROW, interpret)
    top = jnp.maximum(sink, UNSEEN / 2)  # the sum starts with the sink; −inf means no sink
    total = jnp.exp(sink - top)

    def one_split(n, carry):
        acc, top, total = carry
        slot = lax.rem(n - first, jnp.int32(STAGES))
        plgpu.barrier_wait(s["filled"].at[slot])
        lse = hopper.load_registers(s["lses_s"].at[slot], hopper.PER_ROW, interpret)
        part = hopper.load_registers(s["part_s"].at[slot], hopper.TILE, interpret)
        plgpu.commit_smem()  # also a barrier: all warps have read the previous split's stage

        @pl.when(n + STAGES - 1 < last)
        def _():
            fetch_split(n + STAGES - 1)

        new = jnp.maximum(top, lse)
        shrink, weight = jnp.exp(top - new), jnp.exp(lse - new)
        acc = acc * hopper.broadcast_along(shrink, acc.shape, 0)
        acc = acc + part * hopper.broadcast_along(weight, acc.shape, 0)
        return acc, new, total * shrink + weight

    H = part_ref.shape[5]
    carry = (hopper.fill_registers((ROWS, H), 0.0, hopper.TILE, interpret), top, total)
    acc, top, total = lax.fori_loop(first, last, one_split, carry)
    has_weights = total > 0
    safe = jnp.where(has_weights, total, 1.0)
    s["o_s"][...] = (acc * hopper.broadcast_along(1.0 / safe, acc.shape, 0)).astype(o_ref.dtype)
    s["lse_s"][...] = jnp.where(has_weights, top + jnp.log(safe), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(_result_rows(s["o_s"], tiles), o_ref.at[b, head, tile])
    plgpu.copy_smem_to_gmem(s["lse_s"], lse_ref.at[b, head, tile])
    plgpu.wait_smem_to_gmem(0)


def _result_rows(ref, tiles: DecodeTiles):
    """The rows of a tile that are written to the results."""
    return ref if tiles.rows == ROWS else ref.at[pl.ds(0, tiles.rows)]
