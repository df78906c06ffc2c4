# SPDX-License-Identifier: Apache-2.0
"""Decoding on Hopper: every row of the batch in splits of fixed length, then their merge.

Decoding reads memory and does little else, so everything serves the stream of keys and values:
one warpgroup holds all query rows of one key head in one wgmma tile, TMA brings page after page
into a ring of stages, and two blocks share a core, so one computes while the other waits. Splits
have a fixed number of slots and are merged in order: a row's bits do not depend on how many
rows or how much room there is.
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
from pallas_kernels.decode_attention.signature import Lengths, PagedKeys, PageTable
from pallas_kernels.dispatch import target
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.reference import UNSEEN
from pallas_kernels.sink_attention.signature import Keys, Queries, Result, Sinks

ROWS = hopper.WARPGROUP_ROWS  # query rows (queries times heads per key head) of one tile
KEYS = 64  # slots per step: the scores of a step are 32 registers a thread, and so are outputs
# Steps in shared memory. With heads of 64 a step is 16 KiB, so two blocks of threads fit on a
# core and have 96 KiB on their way: 4.3 TB/s times 1 µs is 33 KiB a core. With 128 one fits.
STAGES = 4
# Slots per split. 64 rows of 8k are 4096 blocks for 264 places, and one row of 8k still 64; each
# split costs 2 KiB of partial results beside 256 KiB of keys and values.
SPLIT = 1024
LEAST_PAGE = 8  # rows of a swizzled tile: pages cannot be smaller
LOG2E = math.log2(math.e)  # the hardware's exponential has base 2


class DecodeTiles(NamedTuple):
    """The query rows of one key head, in tiles of ROWS."""

    count: int
    rows: int  # of each that are kept: results have no more, in steps of 8


def mosaic_gpu(
    q_BTNH: Queries, k_BSKH: Keys, v_BSKH: Keys, sink_N: Sinks, layout: Layout, window: int,
    scale: float, *, interpret: bool = False,
) -> Result:  # fmt: skip
    """(o, lse) on a Hopper GPU; see `reference` for the formula."""
    x = pages.of_cache(k_BSKH, v_BSKH, layout, window, most=KEYS, least=LEAST_PAGE)
    return _attend(q_BTNH, x, sink_N, scale, interpret)


def mosaic_gpu_paged(
    q_BTNH: Queries, k_PSKH: PagedKeys, v_PSKH: PagedKeys, sink_N: Sinks, page_table_BJ: PageTable,
    lengths_B: Lengths, window: int, scale: float, *, interpret: bool = False,
) -> Result:  # fmt: skip
    """(o, lse) on a Hopper GPU; see `reference_paged` for the meaning."""
    T = q_BTNH.shape[1]
    x = pages.of_pages(k_PSKH, v_PSKH, page_table_BJ, lengths_B, T, window, most=KEYS)
    return _attend(q_BTNH, x, sink_N, scale, interpret)


def unsupported(q_BTNH: Any, k_BSKH: Any, *_arrays: Any) -> str | None:
    """Why the kernel cannot run, or None."""
    if not target().hopper:
        return f"it needs a Hopper GPU (wgmma), this is {target().kind}"
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {q_BTNH.dtype} is not bfloat16 or float16"
    if q_BTNH.shape[3] not in (64, 128):
        return f"head size {q_BTNH.shape[3]} is not 64 or 128"
    if q_BTNH.shape[1] > pages.QUERIES:
        return f"{q_BTNH.shape[1]} queries per row are more than {pages.QUERIES}"
    if 0 in (*q_BTNH.shape, *k_BSKH.shape):
        return "there are no queries or no keys"
    return None


def unsupported_paged(q_BTNH: Any, k_PSKH: Any, *_arrays: Any) -> str | None:
    """Why the kernel cannot run, or None."""
    page = k_PSKH.shape[1]
    if page % LEAST_PAGE or (KEYS % page and page % KEYS):
        return f"page size {page} is neither {LEAST_PAGE}, 16, 32 nor a multiple of {KEYS}"
    return unsupported(q_BTNH, k_PSKH)


def tiles_of(T: int, G: int) -> DecodeTiles:
    """One tile with as many rows as needed, or several whole ones."""
    count = -(-T * G // ROWS)
    return DecodeTiles(count, ROWS if count > 1 else -(-T * G // 8) * 8)


def _attend(q_BTNH: Array, x: Pages, sink_N: Array, scale: float, interpret: bool):
    (B, T, N, H), K, dtype = q_BTNH.shape, x.k_PSKH.shape[2], q_BTNH.dtype
    G, split = N // K, min(SPLIT, -(-x.seen_BS.shape[1] // KEYS) * KEYS)  # a short cache is one
    if scale <= 0:  # the kernel scales after taking a maximum
        q_BTNH, scale = q_BTNH * jnp.asarray(-1 if scale else 0, dtype), -scale or 1.0
    tiles = tiles_of(T, G)
    x = pages.in_splits(x, split)
    n = x.seen_BS.shape[1] // split
    # [B, n, 4]: which blocks of each split; [B, 2]: which splits of each row
    blocks = pages.split_runs(x.seen_BS, T, split, KEYS)
    live = (blocks[:, :, 3] > 0)[:, None, :]
    splits = pages.runs(live, live)[:, 0, :][:, jnp.array([0, 3])]

    def by_tile(rows: Array) -> Array:  # [.., T·G, ...] to [.., tiles, ROWS, ...] at axis 2
        pad = [(0, 0)] * rows.ndim
        pad[2] = (0, tiles.count * ROWS - T * G)
        rows = jnp.pad(rows, pad)
        return rows.reshape(*rows.shape[:2], tiles.count, ROWS, *rows.shape[3:])

    q = by_tile(q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H))
    sink_KG = sink_N.astype(jnp.float32).reshape(K, G)
    sinks = by_tile(jnp.tile(sink_KG, (1, T))[None])[0]
    bit = jnp.left_shift(1, jnp.repeat(jnp.arange(T, dtype=jnp.int32), G))
    bits = by_tile(bit[None, None])[0, 0]

    common: dict[str, Any] = dict(
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpreter(interpret),
    )
    per_tile, seen = KEYS // x.page, x.seen_BS.reshape(B, -1, KEYS)
    table = x.table_BJ.reshape(B, n, split // x.page)
    table = jnp.pad(table, ((0, 0), (0, 0), (0, -table.shape[2] % 32)))  # copies are of 128 bytes
    parts, lses = plgpu.kernel(
        partial(_split_kernel, tiles=tiles, page=x.page, factor=scale * LOG2E, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((B, K, n, tiles.count, tiles.rows, H), jnp.float32),
            jax.ShapeDtypeStruct((B, K, n, tiles.count, ROWS), jnp.float32),
        ),
        scratch_types=[dict(
            q_s=plgpu.SMEM((ROWS, H), dtype, transforms=hopper.swizzled()),
            k_s=plgpu.SMEM((STAGES, KEYS, H), dtype, transforms=hopper.swizzled()),
            v_s=plgpu.SMEM((STAGES, KEYS, H), dtype, transforms=hopper.swizzled()),
            o_s=_float_tile(H),
            lse_s=plgpu.SMEM((ROWS,), jnp.float32),
            bits_s=plgpu.SMEM((ROWS,), jnp.int32),
            seen_s=plgpu.SMEM((split // KEYS, KEYS), jnp.int32),
            kept_s=plgpu.SMEM((split // KEYS, KEYS), jnp.int32),
            table_s=plgpu.SMEM((table.shape[2],), jnp.int32),
            start=plgpu.Barrier(num_arrivals=5),
            here=plgpu.Barrier(num_arrivals=2 * per_tile, num_barriers=STAGES),
        )],
        grid=(B, n, K * tiles.count),  # heads fastest: those of a page lie side by side
        grid_names=("row", "split", "head"),
        kernel_name="decode_attention_splits",
        **common,
    )(q, x.k_PSKH, x.v_PSKH, table, seen, bits, blocks, splits)  # fmt: skip
    o, lse = plgpu.kernel(
        partial(_merge_kernel, tiles=tiles, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((B, K, tiles.count, tiles.rows, H), dtype),
            jax.ShapeDtypeStruct((B, K, tiles.count, ROWS), jnp.float32),
        ),
        scratch_types=[dict(
            part_s=_float_tile(H, STAGES),
            lses_s=plgpu.SMEM((STAGES, ROWS), jnp.float32),
            sink_s=plgpu.SMEM((ROWS,), jnp.float32),
            o_s=plgpu.SMEM((ROWS, H), dtype, transforms=hopper.swizzled()),
            lse_s=plgpu.SMEM((ROWS,), jnp.float32),
            start=plgpu.Barrier(),
            here=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        )],
        grid=(B, K * tiles.count),
        grid_names=("row", "head"),
        kernel_name="decode_attention_merge",
        **common,
    )(parts, lses, sinks, splits)  # fmt: skip
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
    at = lax.axis_index("head")
    return lax.div(at, jnp.int32(tiles.count)), lax.rem(at, jnp.int32(tiles.count))


def _split_kernel(
    q_ref, k_ref, v_ref, table_ref, seen_ref, bits_ref, blocks_ref, splits_ref, o_ref, lse_ref, s,
    *, tiles, page, factor, interpret,
):  # fmt: skip
    """One split of one key head of one row: o over its slots alone, and lse without the sink."""
    b, n = lax.axis_index("row"), lax.axis_index("split")
    head, tile = _head_and_tile(tiles)
    H, dtype = q_ref.shape[4], q_ref.dtype
    per_step, scores = KEYS // page, (ROWS, KEYS)
    steps = s["seen_s"].shape[0]  # of a split

    def one_split():
        for source, to in (
            (table_ref.at[b, n], s["table_s"]),
            (seen_ref.at[b, pl.ds(n * steps, steps)], s["seen_s"]),
            # once more: one value cannot lie across the columns of z and down the rows of v
            (seen_ref.at[b, pl.ds(n * steps, steps)], s["kept_s"]),
            (bits_ref.at[tile], s["bits_s"]),
            (q_ref.at[b, head, tile], s["q_s"]),
        ):
            plgpu.copy_gmem_to_smem(source, to, s["start"])
        # Blocks that need a mask come first, then those seen whole.
        first, whole_first, whole_last, last = (blocks_ref[b, n, i] for i in range(4))
        before = whole_first - first
        masked = before + last - whole_last
        count = last - first

        def block_at(i):
            edge = jnp.where(i < before, first + i, whole_last + i - before)
            return jnp.where(i < masked, edge, whole_first + i - masked)

        def fetch(i):
            slot = lax.rem(i, jnp.int32(STAGES))
            block = block_at(i)
            for j in range(per_step):
                at = s["table_s"][block * per_step + j]
                for source, to in ((k_ref, "k_s"), (v_ref, "v_s")):
                    to = s[to].at[slot] if per_step == 1 else s[to].at[slot, pl.ds(j * page, page)]
                    plgpu.copy_gmem_to_smem(source.at[at, :, head], to, s["here"].at[slot])

        plgpu.barrier_wait(s["start"])
        lax.fori_loop(0, jnp.minimum(count, STAGES - 1), lambda i, _: fetch(i), None)

        def one_step(i, carry, is_masked):
            acc, top, total = carry
            slot = lax.rem(i, jnp.int32(STAGES))
            plgpu.barrier_wait(s["here"].at[slot])
            z = hopper.product(s["q_s"], s["k_s"].at[slot], interpret) * factor
            if is_masked:
                seen_by = hopper.load(s["seen_s"].at[block_at(i)], hopper.PER_COLUMN, interpret)
                bit = hopper.load(s["bits_s"], hopper.PER_ROW, interpret)
                both = hopper.spread(seen_by, scores, 1) & hopper.spread(bit, scores, 0)
                z = jnp.where(both != 0, z, UNSEEN)
                # weights of unseen slots are 0, but 0·NaN is NaN: clear what v holds there
                v_s = s["v_s"].at[slot]
                kept = hopper.load(s["kept_s"].at[block_at(i)], hopper.PER_ROW, interpret)
                v = hopper.load(v_s, hopper.TILE, interpret).astype(jnp.float32)
                v = jnp.where(hopper.spread(kept, (KEYS, H), 0) != 0, v, 0.0)
                v_s[...] = v.astype(dtype)
            new = jnp.maximum(top, z.max(axis=1))
            shrink = jnp.exp2(top - new)
            p = jnp.exp2(z - hopper.spread(new, scores, 0))
            total = total * shrink + p.sum(axis=1)
            plgpu.commit_smem()  # and all warps have left the previous step: its stage is free

            @pl.when(i + STAGES - 1 < count)
            def _():
                fetch(i + STAGES - 1)

            acc = acc * hopper.spread(shrink, acc.shape, 0)
            acc = hopper.add_product(acc, p.astype(dtype), s["v_s"].at[slot], interpret)
            return acc, new, total

        carry = (
            hopper.full((ROWS, H), 0.0, hopper.TILE, interpret),
            hopper.full((ROWS,), UNSEEN / 2, hopper.PER_ROW, interpret),
            hopper.full((ROWS,), 0.0, hopper.PER_ROW, interpret),
        )
        carry = lax.fori_loop(0, masked, partial(one_step, is_masked=True), carry)
        carry = lax.fori_loop(masked, count, partial(one_step, is_masked=False), carry)
        acc, top, total = carry
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        s["o_s"][...] = acc * hopper.spread(1.0 / safe, acc.shape, 0)
        s["lse_s"][...] = jnp.where(some, top / LOG2E + jnp.log(safe), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(_kept(s["o_s"], tiles), o_ref.at[b, head, n, tile])
        plgpu.copy_smem_to_gmem(s["lse_s"], lse_ref.at[b, head, n, tile])
        plgpu.wait_smem_to_gmem(0)

    pl.when((n >= splits_ref[b, 0]) & (n < splits_ref[b, 1]))(one_split)


def _merge_kernel(part_ref, lses_ref, sink_ref, splits_ref, o_ref, lse_ref, s, *, tiles, interpret):
    """The splits of one key head of one row, in order, onto the sink."""
    b = lax.axis_index("row")
    head, tile = _head_and_tile(tiles)
    first, last = splits_ref[b, 0], splits_ref[b, 1]
    plgpu.copy_gmem_to_smem(sink_ref.at[head, tile], s["sink_s"], s["start"])

    def fetch(n):
        slot = lax.rem(n - first, jnp.int32(STAGES))
        here = s["here"].at[slot]
        plgpu.copy_gmem_to_smem(
            part_ref.at[b, head, n, tile], _kept(s["part_s"].at[slot], tiles), here
        )
        plgpu.copy_gmem_to_smem(lses_ref.at[b, head, n, tile], s["lses_s"].at[slot], here)

    most = jnp.minimum(last, first + STAGES - 1)
    lax.fori_loop(first, most, lambda n, _: fetch(n), None)
    plgpu.barrier_wait(s["start"])
    sink = hopper.load(s["sink_s"], hopper.PER_ROW, interpret)
    top = jnp.maximum(sink, UNSEEN / 2)  # the sink starts the sum; −inf starts it empty
    total = jnp.exp(sink - top)

    def one_split(n, carry):
        acc, top, total = carry
        slot = lax.rem(n - first, jnp.int32(STAGES))
        plgpu.barrier_wait(s["here"].at[slot])
        lse = hopper.load(s["lses_s"].at[slot], hopper.PER_ROW, interpret)
        part = hopper.load(s["part_s"].at[slot], hopper.TILE, interpret)
        plgpu.commit_smem()  # all have read the previous split's stage

        @pl.when(n + STAGES - 1 < last)
        def _():
            fetch(n + STAGES - 1)

        new = jnp.maximum(top, lse)
        shrink, weight = jnp.exp(top - new), jnp.exp(lse - new)
        acc = acc * hopper.spread(shrink, acc.shape, 0)
        acc = acc + part * hopper.spread(weight, acc.shape, 0)
        return acc, new, total * shrink + weight

    H = part_ref.shape[5]
    carry = (hopper.full((ROWS, H), 0.0, hopper.TILE, interpret), top, total)
    acc, top, total = lax.fori_loop(first, last, one_split, carry)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    s["o_s"][...] = (acc * hopper.spread(1.0 / safe, acc.shape, 0)).astype(o_ref.dtype)
    s["lse_s"][...] = jnp.where(some, top + jnp.log(safe), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(_kept(s["o_s"], tiles), o_ref.at[b, head, tile])
    plgpu.copy_smem_to_gmem(s["lse_s"], lse_ref.at[b, head, tile])
    plgpu.wait_smem_to_gmem(0)


def _kept(ref, tiles: DecodeTiles):
    """The rows of a tile that results have."""
    return ref if tiles.rows == ROWS else ref.at[pl.ds(0, tiles.rows)]
