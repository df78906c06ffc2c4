# SPDX-License-Identifier: Apache-2.0
"""Tiling of the TPU kernels: tiles of the matrices, and the tables of visits to tiles of rows.

Tiles of a matrix must fit in VMEM and must be slices that the chip can copy. A copy between HBM and
VMEM moves complete lanes of 128 columns, or all columns. Half of GPT-OSS's 5760 gate and up columns
is 22.5 × 128, so the up columns' windows start 64 columns early and the kernel rotates them into
place. Where all columns fit, those 64 are the last gate columns, and none is multiplied twice.

The tables state which group and which tile of rows each step of a grid works on. Tiles of rows
begin at multiples of their size, so a tile shared by several groups is visited once for each of
them, in succession, and each visit has the range of rows that it may write. Group sizes are data: a
table has as many entries as the worst case needs, and surplus entries have no rows.
Next: `pallas_tpu_blocks.py`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Int

from pallas_kernels.tpu import has_wide_mxu, vmem_bytes

# Columns in a vector register, and the smallest width of a copy.
LANES = 128
# Tiles have a multiple of this many columns: the matrix unit's width on v6e and 7x, twice v5's.
COLUMNS = 256
# Rows of an input tile: their products take longer than the overhead of a step.
ROWS = 512
# A product starts at a multiple of the rows of a bfloat16 register.
ALIGNED = 16


def product_sizes() -> tuple[int, ...]:
    """Rows per product, largest first: the largest for most of a group, the others for its end.

    A matrix unit 256 wide takes as long for 64 rows as for 128, and nearly as long for 256, by
    libtpu's schedule: `python -m benchmarks.kernels grouped_swiglu --compile v6e --schedule`.
    """
    return (512, 256, 128) if has_wide_mxu() else (256, 64)


def columns_at_once(dtype: DTypeLike) -> int:
    """Columns per product, twice COLUMNS on wide matrix units.

    On v6e a product waits some 280 cycles for its first and last sums, which wider products
    amortise. Exact float32 products spill registers: with twice the width, v6e's weight gradient
    would not fit VMEM.
    """
    return COLUMNS * (2 if has_wide_mxu() and jnp.dtype(dtype).itemsize < 4 else 1)


def count_products(rows: Any, largest: int, allowed: tuple[int, ...] = ()) -> list[tuple[int, Any]]:
    """(size, count) of the products of at most `largest` rows that cover `rows`, in their order.

    One product that is nearly full is better than several small ones. `allowed` are the possible
    sizes, by default those of `product_sizes`.
    """
    sizes = [size for size in allowed or product_sizes() if size <= largest]
    products = []
    for size in sizes:
        count = (rows + sizes[-1] - 1) // size
        products.append((size, count))
        rows = rows - count * size
    return products


def window_bytes(itemsize: int) -> int:
    """Bytes of each of the two weight buffers; tiles of rows, results and sums have the other half.

    Exact float32 products do not fit the registers, and their spills take another third of VMEM.
    """
    return vmem_bytes() // (4 if itemsize < 4 else 8)


class Window(NamedTuple):
    """The part of each matrix that one tile of the output needs; spans[n] is (start, size)."""

    spans: tuple[tuple[int, int], ...]
    size: int  # of the buffer in VMEM: the largest span


class TpuPlan(NamedTuple):
    """Tiles of the output's columns and the windows of the matrices for each of them."""

    tile: int  # columns of the output in each tile but the last
    windows: tuple[Window, ...]
    shift: int  # columns by which the last window starts early

    @property
    def n_tiles(self) -> int:
        return len(self.windows[0].spans)


def round_up(x: int, multiple: int) -> int:
    """x rounded up to a multiple."""
    return -(-x // multiple) * multiple


def plan_tiles(
    columns: int, rows: int, itemsize: int, *, lanes: bool, halves: bool
) -> TpuPlan | None:
    """The fewest tiles whose windows fit twice in VMEM, or None.

    rows: numbers in a column. lanes: the windows are slices of the matrix's columns, else of its
    rows. halves: a tile needs its columns in both halves of a matrix with twice as many columns.
    """
    shift = columns % LANES if halves else 0
    extra = LANES if shift else 0
    for tiles in range(1, -(-columns // COLUMNS) + 1):
        tile = columns if tiles == 1 else round_up(-(-columns // tiles), COLUMNS)
        width = tile
        if halves:
            width = 2 * columns if tiles == 1 else 2 * round_up(tile, LANES) + extra
        if width * rows * itemsize <= window_bytes(itemsize):
            break
    else:
        return None
    if lanes and not halves and tile < columns and columns % LANES:
        return None  # the last window would end inside a register
    if not halves:
        return TpuPlan(tile, (_column_windows(columns, tile, 0, 0, columns),), 0)
    if tile == columns:
        return TpuPlan(tile, (_column_windows(2 * columns, 2 * columns, 0, 0, 2 * columns),), shift)
    # A copy moves complete lanes, so the last tile of gate columns ends in up columns, unused.
    padded_columns = round_up(columns, LANES)
    gate = _column_windows(padded_columns, tile, 0, 0, padded_columns)
    return TpuPlan(
        tile,
        (gate, _column_windows(padded_columns, tile, columns - shift, extra, 2 * columns)),
        shift,
    )


def _column_windows(columns: int, tile: int, first: int, extra: int, end: int) -> Window:
    """The window with each tile's columns, from `first` on, and `extra` more, ending at `end`."""
    starts = range(first, first + columns, tile)
    stops = (min(start + tile, first + columns) + extra for start in starts)
    pairs = zip(starts, stops, strict=True)
    spans = tuple((start, min(stop, end) - start) for start, stop in pairs)
    return Window(spans, max(size for _, size in spans))


def row_tile(n_rows: int, bytes_per_row: int) -> int:
    """Rows of a tile: ROWS, but at most a tenth of VMEM and no more than n_rows rounded up."""
    rows, min_rows = ROWS, product_sizes()[-1]
    while rows > min_rows and rows * bytes_per_row > vmem_bytes() // 10:
        rows //= 2
    return max(min_rows, min(rows, round_up(n_rows, min_rows)))


class TileVisits(NamedTuple):
    """A table with one entry a step: rows low … high − 1 of the tile belong to the group."""

    group_V: Int[Array, " V"]
    tile_V: Int[Array, " V"]
    low_V: Int[Array, " V"]
    high_V: Int[Array, " V"]
    next_V: Int[Array, " V"]  # the next group with rows, which may be prefetched; −1: none
    slot_V: Int[Array, " V"]  # buffer of the group, 0 or 1; the next group has the other


def row_visits(
    sizes_E: Int[Array, " E"], n_rows: int, rows: int, parts: int = 1
) -> tuple[TileVisits, int]:
    """Visits in which every row occurs exactly once; rows past the sum of the sizes are group E's.

    The table is that of `parts` cores, one part after the other. Tiles with rows of groups are
    divided evenly among the parts, and so are the tiles past the sum, because a buffer with spare
    room (as for sharded experts) has its rows at the beginning. Later parts get the remainders.
    Returns: the table, and the length of one part.
    """
    n_groups, n_tiles = sizes_E.shape[0], -(-n_rows // rows)
    end_E = jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), n_rows)
    end_G = jnp.concatenate([end_E, jnp.full((1,), n_rows, jnp.int32)])
    start_G = jnp.concatenate([jnp.zeros((1,), jnp.int32), end_E])
    group_V, tile_V = _list_visits(start_G, end_G, rows, n_tiles, n_tiles + n_groups, 0)
    length = -(-n_tiles // parts) + n_groups
    share_P, used = jnp.arange(parts + 1, dtype=jnp.int32), -(-end_E[-1] // rows)
    edge_P = (share_P * used + parts - 1) // parts
    blank_P = used + share_P * (n_tiles - used) // parts
    # Part p's visits are consecutive in the list of all visits, from first_P on. They are followed
    # by one visit to each of its tiles past the sum.
    first_P = jnp.sum(
        (tile_V[None, :] < edge_P[:, None]) & (group_V <= n_groups)[None, :], 1, dtype=jnp.int32
    )
    position_L = jnp.arange(length, dtype=jnp.int32)
    n_owned_P1, blank_P1 = (x[1:, None] - x[:-1, None] for x in (first_P, blank_P))
    visit_PV = jnp.minimum(first_P[:-1, None] + position_L[None, :], group_V.shape[0] - 1)
    owned_PV = position_L[None, :] < n_owned_P1
    real_PV = position_L[None, :] < n_owned_P1 + blank_P1
    group_PV = jnp.where(owned_PV, group_V[visit_PV], n_groups)
    past_PV = blank_P[:-1, None] + jnp.minimum(position_L[None, :] - n_owned_P1, blank_P1 - 1)
    # Surplus visits repeat the last tile, so that no other tile is copied for them.
    idle_P1 = jnp.where(blank_P1 > 0, blank_P[1:, None], edge_P[1:, None]) - 1
    tile_PV = jnp.where(owned_PV, tile_V[visit_PV], jnp.where(real_PV, past_PV, idle_P1))
    low_PV, high_PV = _row_bounds(start_G[group_PV], end_G[group_PV], tile_PV, rows, real_PV)
    nonempty_G = end_G > start_G
    index_G = jnp.arange(n_groups + 1, dtype=jnp.int32)
    next_G = lax.cummin(jnp.where(nonempty_G, index_G, n_groups), axis=0, reverse=True)
    next_G = jnp.concatenate([next_G[1:], jnp.full((1,), n_groups, jnp.int32)])
    next_PV = next_G[group_PV]
    in_part_PV = (next_PV < n_groups) & (start_G[next_PV] < edge_P[1:, None] * rows)
    slot_PV = ((jnp.cumsum(nonempty_G.astype(jnp.int32)) - 1) % 2)[group_PV]
    table = (group_PV, tile_PV, low_PV, high_PV, jnp.where(in_part_PV, next_PV, -1), slot_PV)
    return TileVisits(*(x.reshape(-1) for x in table)), length


def group_visits(sizes_E: Int[Array, " E"], n_rows: int, rows: int) -> TileVisits:
    """Visits to every group, empty ones included; rows past the sum of the sizes have none."""
    n_groups, n_tiles = sizes_E.shape[0], -(-n_rows // rows)
    end_E = jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), n_rows)
    start_E = jnp.concatenate([jnp.zeros((1,), jnp.int32), end_E[:-1]])
    group_V, tile_V = _list_visits(start_E, end_E, rows, n_tiles, n_tiles + n_groups, 1)
    real_V, group_V = group_V < n_groups, jnp.minimum(group_V, n_groups - 1)
    low_V, high_V = _row_bounds(start_E[group_V], end_E[group_V], tile_V, rows, real_V)
    return TileVisits(group_V, tile_V, low_V, high_V, jnp.full_like(group_V, -1), group_V % 2)


def _list_visits(start_G, end_G, rows, n_tiles, length, min_visits):
    """Group and tile of each step, in the order of groups, then tiles; group G past the end."""
    n_groups = start_G.shape[0]
    count_G = jnp.where(end_G > start_G, (end_G - 1) // rows - start_G // rows + 1, min_visits)
    last_G = jnp.cumsum(count_G)
    step_V = jnp.arange(length, dtype=jnp.int32)
    group_V = jnp.sum(last_G[None, :] <= step_V[:, None], axis=1, dtype=jnp.int32)
    inside_V = jnp.minimum(group_V, n_groups - 1)
    tile_V = start_G[inside_V] // rows + step_V - (last_G - count_G)[inside_V]
    return group_V, jnp.where(group_V < n_groups, jnp.minimum(tile_V, n_tiles - 1), n_tiles - 1)


def _row_bounds(start_V, end_V, tile_V, rows, real_V):
    low_V = jnp.clip(start_V - tile_V * rows, 0, rows)
    high_V = jnp.clip(end_V - tile_V * rows, 0, rows)
    used_V = real_V & (low_V < high_V)
    return jnp.where(used_V, low_V, 0), jnp.where(used_V, high_V, 0)
