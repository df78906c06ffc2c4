# SPDX-License-Identifier: Apache-2.0
"""What the Hopper kernels of the grouped matmul share: sizes, tables of tiles, and stores.

Every kernel stays on its core and walks over tiles. One warpgroup fetches operands into a ring in
shared memory and runs ahead into the next tile while the others, with 64 rows each, still write
this one. Next: pallas_gpu_rows.py (out and dlhs), pallas_gpu_weights.py (drhs and dbias),
pallas_gpu_mxfp4.py (out and dlhs of four-bit weights).
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
STEP = 64  # of the contraction: one 128-byte swizzle
STAGES = 3  # 48 KiB each: two in flight cover 2300 cycles, more than a trip to memory
PIECE = 64  # columns that leave at once, through 8 KiB of shared memory
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = {2: 232, 3: 152}  # by the number of warpgroups that multiply
ALIGN = 8  # rows of a swizzled tile: where a copy may start
# Row tiles taken together through all columns: with 132 cores at work, 8 x 16 tiles share reads.
CHUNK = 8


def width_of(columns: int) -> int:
    """Columns of a tile: the widest that divides all columns."""
    return next(width for width in WIDTHS if columns % width == 0)


def pad_rows(x: Array, tile: int) -> Array:
    """Zero rows up to a whole tile and a multiple of ALIGN; free where M is one."""
    rows = max(tile, x.shape[0] + -x.shape[0] % ALIGN)
    return x if rows == x.shape[0] else jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))


def row_tiles(
    group_sizes_E: Int[Array, " E"], n_rows: int, padded: int, size: int
) -> tuple[Int32[Array, "n 4"], Int32[Array, " 1"]]:
    """For every tile of `size` rows: its group, its start, and from and to which row it counts.

    Rows past the sum are group E. A tile starts at its group's first row rounded down to ALIGN, the
    last of all where a whole one still fits: rows of others in it are masked. Half a tile per group
    is wasted; tiles at multiples of their size would waste a whole one.

    Returns: the table, as long as the worst case needs, and how many of its rows are tiles.
    """
    sizes = group_sizes_E.astype(jnp.int32)
    end = jnp.minimum(jnp.cumsum(sizes), n_rows)
    begin = jnp.append(end - sizes, end[-1])
    end = jnp.append(end, n_rows)
    first = begin - lax.rem(begin, ALIGN)
    tiles = jnp.where(end > begin, (end - first + size - 1) // size, 0)
    after = jnp.cumsum(tiles)
    n_groups = min(sizes.shape[0] + 1, n_rows)  # those with rows
    most = (n_rows + n_groups * (size + ALIGN - 2)) // size
    tile = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= after[None, :], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, sizes.shape[0])
    wanted = first[group] + (tile - (after - tiles)[group]) * size
    start = jnp.minimum(wanted, padded - size)
    lo = jnp.maximum(begin[group], wanted) - start
    hi = jnp.minimum(end[group], wanted + size) - start
    return jnp.stack([group, start, lo, hi], 1).astype(jnp.int32), after[-1:].astype(jnp.int32)


def each_tile(count: Any, body: Callable[[Any, Any], Any]) -> Any:
    """body(tile, steps done so far) → steps done, for this core's tiles of `count`."""
    core, stride = lax.axis_index("core"), lax.axis_size("core")
    mine = lax.div(count - core + stride - 1, jnp.int32(stride))
    return lax.fori_loop(0, mine, lambda i, done: body(core + i * stride, done), jnp.int32(0))


def in_chunks(tile: Any, n_rows: Any, n_columns: int) -> tuple[Any, Any]:
    """The row tile and column tile of a flat index; CHUNK rows at a time, rows fastest."""
    size = jnp.int32(CHUNK * n_columns)
    before = lax.div(tile, size) * CHUNK
    height = jnp.minimum(n_rows - before, CHUNK)
    column = lax.div(lax.rem(tile, size), height)
    return before + lax.rem(lax.rem(tile, size), height), column


def ring_of(s: Any) -> hopper.Ring:
    """Of a kernel's operands."""
    return hopper.Ring(s["lhs"].shape[0], s["here"], s["free"])


def produce(ring: hopper.Ring, done: Any, steps: Any, fetch: Callable[[Any, Any], None]) -> Any:
    """Fetch `steps` steps into the ring, fetch(step, slot) one of them → steps done."""

    @pl.loop(0, steps)
    def _(k):
        ring.wait_free(done + k)
        fetch(k, ring.slot_of(done + k))

    return done + steps


def store_whole(s: Any, out_ref: Any, value: Array, start: Any, first: Any, piece: int) -> None:
    """Write a warpgroup's 64 x 64 piece to rows from `start` and columns from `first`."""
    slots = s["whole"].shape[0]
    staging = s["whole"].at[piece % slots, lax.axis_index("warpgroup")]
    # The tile before may have ended in this very slot: its first piece waits for all.
    plgpu.wait_smem_to_gmem(slots - 1 if piece else 0, wait_read_only=True)
    staging[...] = value
    plgpu.commit_smem()
    place = out_ref.at[pl.ds(start, hopper.WARPGROUP_ROWS), pl.ds(first, PIECE)]
    plgpu.copy_smem_to_gmem(staging, place)
