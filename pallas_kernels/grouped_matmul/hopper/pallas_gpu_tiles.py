# SPDX-License-Identifier: Apache-2.0
"""Code shared by the Hopper kernels of the grouped matmul: sizes, tables of tiles, and stores.

The kernels are persistent: each core loops over tiles. One warpgroup fetches operands into a ring
in shared memory and runs ahead into the next tile while the other warpgroups, with 64 rows each,
still write this one. Next: pallas_gpu_rows.py (out and dlhs), pallas_gpu_weights.py (drhs and
dbias), pallas_gpu_mxfp4.py (out and dlhs of four-bit weights).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int, Int32

from pallas_kernels import hopper

# Three warpgroups of 64 rows against 192 columns: every tile of GPT-OSS' 2880 = 15·192 is full, a
# step reads 43 bytes a cycle out of L2 at the tensor cores' full speed (a 128 x 128 tile: 64), and
# accumulators take 96 of the 152 registers that a thread of three warpgroups can have.
CONSUMERS = 3
WIDTHS = (192, 128, 64)
# Columns of a step of the contraction: one 128-byte swizzle.
STEP = 64
# A stage has 48 KiB, and two in flight cover 2300 cycles, more than the latency of memory.
STAGES = 3
PIECE = 64  # columns stored at once, through 8 KiB of shared memory
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = {2: 232, 3: 152}  # by the number of warpgroups that multiply
# A swizzled tile has 8 rows, and a copy starts at one.
ALIGN = 8
# Rows that are copied of a tile of 64: the fewest of these that hold its group's.
COPIED_ROWS = (16, 32, 64)
# Row tiles that are traversed together through all columns: 132 cores work on 8 x 16 tiles at a
# time, which share their reads.
CHUNK = 8


def tile_width(columns: int) -> int:
    """Columns of a tile: the largest of WIDTHS that divides `columns`."""
    return next(width for width in WIDTHS if columns % width == 0)


def pad_rows(x: Array, tile: int) -> Array:
    """Pad x with zero rows to at least `tile` rows and a multiple of ALIGN; often a no-op."""
    rows = max(tile, x.shape[0] + -x.shape[0] % ALIGN)
    return x if rows == x.shape[0] else jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))


def row_tiles(
    group_sizes_E: Int[Array, " E"], n_rows: int, padded: int, size: int
) -> tuple[Int32[Array, "n 4"], Int32[Array, " 1"]]:
    """A table with a row for every tile of `size` rows: its group, its start, and its valid rows.

    Valid rows are lo … hi − 1, counted from the start; the tile's other rows belong to other groups
    and are masked. Rows past the sum of the sizes are group E. A tile starts at its group's first
    row rounded down to ALIGN; the last tile of all moves back to end within the array. Half a tile
    per group is wasted; tiles at multiples of their size would waste a full one.

    Returns: the table, as long as the worst case needs, and the number of its rows that are tiles.
    """
    sizes = group_sizes_E.astype(jnp.int32)
    end = jnp.minimum(jnp.cumsum(sizes), n_rows)
    begin = jnp.append(end - sizes, end[-1])
    end = jnp.append(end, n_rows)
    first = begin - lax.rem(begin, ALIGN)
    tiles = jnp.where(end > begin, (end - first + size - 1) // size, 0)
    tiles_end = jnp.cumsum(tiles)
    n_groups = min(sizes.shape[0] + 1, n_rows)  # at most so many have rows
    max_tiles = (n_rows + n_groups * (size + ALIGN - 2)) // size
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= tiles_end[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, sizes.shape[0])
    unclamped = first[group] + (tile - (tiles_end - tiles)[group]) * size
    start = jnp.minimum(unclamped, padded - size)
    lo = jnp.maximum(begin[group], unclamped) - start
    hi = jnp.minimum(end[group], unclamped + size) - start
    return jnp.stack([group, start, lo, hi], 1).astype(jnp.int32), tiles_end[-1:].astype(jnp.int32)


def fold_core_tiles(count: Any, body: Callable[[Any, Any], Any]) -> Any:
    """Fold body(tile, n_done) → n_done over those of `count` tiles that are this core's."""
    core, stride = lax.axis_index("core"), lax.axis_size("core")
    n_core_tiles = lax.div(count - core + stride - 1, jnp.int32(stride))
    return lax.fori_loop(
        0, n_core_tiles, lambda i, n_done: body(core + i * stride, n_done), jnp.int32(0)
    )


def split_tile_index(tile: Any, n_rows: Any, n_columns: int) -> tuple[Any, Any]:
    """The row tile and column tile of a flat index: CHUNK row tiles at a time, rows fastest."""
    size = jnp.int32(CHUNK * n_columns)
    before = lax.div(tile, size) * CHUNK
    height = jnp.minimum(n_rows - before, CHUNK)
    column = lax.div(lax.rem(tile, size), height)
    return before + lax.rem(lax.rem(tile, size), height), column


def operand_ring(s: Any) -> hopper.Ring:
    """The ring of a kernel's operands, with the barriers of its scratch memory."""
    return hopper.Ring(s["lhs"].shape[0], s["full"], s["free"])


def fetch_steps(
    ring: hopper.Ring, n_done: Any, steps: Any, fetch: Callable[[Any, Any], None]
) -> Any:
    """Call fetch(step, slot) for `steps` steps, each in a free slot; return the steps done."""

    @pl.loop(0, steps)
    def _(k):
        ring.wait_free(n_done + k)
        fetch(k, ring.slot_of(n_done + k))

    return n_done + steps


def copy_used_rows(ref: Any, span: tuple[Any, ...], destination: Any, barrier: Any) -> None:
    """Copy the rows of warpgroups that have valid rows; small groups need no others."""
    start, lo, hi, inner = span
    for row in range(0, destination.shape[0], hopper.WARPGROUP_ROWS):
        rows, has_rows = (
            pl.ds(row, hopper.WARPGROUP_ROWS),
            (lo < row + hopper.WARPGROUP_ROWS) & (hi > row),
        )

        @pl.when(has_rows)
        def _(row=row, rows=rows):
            source = ref.at[pl.ds(start + row, hopper.WARPGROUP_ROWS), inner]
            plgpu.copy_gmem_to_smem(source, destination.at[rows], barrier)

        # The barrier expects an arrival for the rows of each warpgroup, copied or not.
        @pl.when(jnp.logical_not(has_rows))
        def _():
            plgpu.barrier_arrive(barrier)


def copy_fewest_rows(ref: Any, span: tuple[Any, ...], destination: Any, barrier: Any) -> None:
    """Copy the first rows of a tile of 64, as many of `COPIED_ROWS` as its group ends within."""
    start, hi, inner = span
    for fewer, n_rows in zip((0, *COPIED_ROWS), COPIED_ROWS, strict=False):

        @pl.when((hi > fewer) & (hi <= n_rows))
        def _(n_rows=n_rows):
            source = ref.at[pl.ds(start, n_rows), inner]
            plgpu.copy_gmem_to_smem(source, destination.at[pl.ds(0, n_rows)], barrier)


def store_full_tile(s: Any, out_ref: Any, value: Array, start: Any, first: Any, piece: int) -> None:
    """Write a warpgroup's 64 x 64 piece to rows from `start` and columns from `first`."""
    slots = s["tile"].shape[0]
    staging = s["tile"].at[piece % slots, lax.axis_index("warpgroup")]
    # The previous tile's last store may still read this slot, so a tile's first piece waits for
    # all stores.
    plgpu.wait_smem_to_gmem(slots - 1 if piece else 0, wait_read_only=True)
    staging[...] = value
    plgpu.commit_smem()
    destination = out_ref.at[pl.ds(start, hopper.WARPGROUP_ROWS), pl.ds(first, PIECE)]
    plgpu.copy_smem_to_gmem(staging, destination)
