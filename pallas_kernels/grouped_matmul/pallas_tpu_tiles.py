# SPDX-License-Identifier: Apache-2.0
"""How the TPU kernels cut matrices up: what fits in VMEM, and which slices the chip can copy; and
which group and which tile of rows each step of a grid works on, computed from the group sizes.

A copy between HBM and VMEM moves whole lanes of 128 columns, or all columns. Half of GPT-OSS's
5760 gate and up columns is 22.5 × 128, so the up columns' windows start 64 columns early and the
kernel rotates them into place. Where all columns fit, those 64 are the last gate columns, and none
is multiplied twice.

Tiles of rows lie at multiples of their size, so a tile shared by several groups is visited once for
each, one right after the other, and each visit says which of its rows it may touch. Group sizes are
data: a table has as many entries as could be needed, and those left over touch no rows.
Next: `pallas_tpu_rows.py`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Int

from pallas_kernels.tpu import has_wide_mxu, vmem_bytes

LANES = 128  # columns in a vector register, the least a copy moves
COLUMNS = 256  # of tiles a multiple: what v6e's and 7x's matrix units are wide, v5's twice
ROWS = 512  # rows of an input tile: their products take longer than a step costs
ALIGNED = 16  # rows that start a product are a multiple of this: a register of bfloat16


def pieces() -> tuple[int, ...]:
    """Rows per product, the most first: for most of a group, and for its end.

    A matrix unit 256 wide takes as long for 64 rows as for 128, and nearly so for 256: libtpu's
    schedule, `python -m pallas_kernels.bench grouped_swiglu --compile v6e --schedule`.
    """
    return (512, 256, 128) if has_wide_mxu() else (256, 64)


def columns_at_once(dtype: DTypeLike) -> int:
    """Columns per product. On v6e a product waits some 280 cycles for its first and last sums.

    Exact products of float32 spill: twice as wide, v6e's weight gradient would not fit VMEM.
    """
    return COLUMNS * (2 if has_wide_mxu() and jnp.dtype(dtype).itemsize < 4 else 1)


def counts(rows: Any, largest: int, some: tuple[int, ...] = ()) -> list[tuple[int, Any]]:
    """(size, how many) of the pieces of at most `largest` that cover `rows`, in their order.

    One piece that is nearly full is better than several small ones. `some` are the sizes to take,
    those of `pieces` if none are given.
    """
    sizes = [size for size in some or pieces() if size <= largest]
    found = []
    for size in sizes:
        count = (rows + sizes[-1] - 1) // size
        found.append((size, count))
        rows = rows - count * size
    return found


def window_bytes(itemsize: int) -> int:
    """Of each of two buffers of weights; tiles of rows, results and sums get the other half.

    Exact products of float32 do not fit the registers: their spills take a third of VMEM more.
    """
    return vmem_bytes() // (4 if itemsize < 4 else 8)


class Window(NamedTuple):
    """The part of each matrix that one tile of the output needs; spans[n] is (start, size)."""

    spans: tuple[tuple[int, int], ...]
    size: int  # of the buffer in VMEM: the largest span


class TpuPlan(NamedTuple):
    """Tiles of the output's columns and the windows on the matrices that make them."""

    tile: int  # columns of the output in each tile but the last
    windows: tuple[Window, ...]
    shift: int  # columns that the last window starts too early

    @property
    def tiles(self) -> int:
        return len(self.windows[0].spans)


def up(x: int, multiple: int) -> int:
    """x rounded up."""
    return -(-x // multiple) * multiple


def plan(columns: int, rows: int, itemsize: int, *, lanes: bool, halves: bool) -> TpuPlan | None:
    """The fewest tiles whose windows fit twice in VMEM; None where no tiles will do.

    rows: numbers in a column. lanes: the windows cut the matrix's columns, else its rows.
    halves: a tile needs the window's columns in either half of a matrix of twice as many.
    """
    shift = columns % LANES if halves else 0
    extra = LANES if shift else 0
    for tiles in range(1, -(-columns // COLUMNS) + 1):
        tile = columns if tiles == 1 else up(-(-columns // tiles), COLUMNS)
        width = tile
        if halves:
            width = 2 * columns if tiles == 1 else 2 * up(tile, LANES) + extra
        if width * rows * itemsize <= window_bytes(itemsize):
            break
    else:
        return None
    if lanes and not halves and tile < columns and columns % LANES:
        return None  # the last window would end inside a register
    if not halves:
        return TpuPlan(tile, (_window(columns, tile, 0, 0, columns),), 0)
    if tile == columns:
        return TpuPlan(tile, (_window(2 * columns, 2 * columns, 0, 0, 2 * columns),), shift)
    whole = up(columns, LANES)  # the last tile of gate columns ends in up columns, unused
    gate = _window(whole, tile, 0, 0, whole)
    return TpuPlan(tile, (gate, _window(whole, tile, columns - shift, extra, 2 * columns)), shift)


def _window(columns: int, tile: int, first: int, extra: int, end: int) -> Window:
    """Each tile's columns from `first` on, and `extra` more but not past `end`."""
    starts = range(first, first + columns, tile)
    stops = (min(start + tile, first + columns) + extra for start in starts)
    pairs = zip(starts, stops, strict=True)
    spans = tuple((start, min(stop, end) - start) for start, stop in pairs)
    return Window(spans, max(size for _, size in spans))


def row_tile(n_rows: int, bytes_per_row: int) -> int:
    """Rows of a tile: ROWS, or as many as a tenth of VMEM holds, or all there are."""
    rows, least = ROWS, pieces()[-1]
    while rows > least and rows * bytes_per_row > vmem_bytes() // 10:
        rows //= 2
    return max(least, min(rows, up(n_rows, least)))


class TileVisits(NamedTuple):
    """One entry a step; rows low … high − 1 of tile belong to group."""

    group_V: Int[Array, " V"]
    tile_V: Int[Array, " V"]
    low_V: Int[Array, " V"]
    high_V: Int[Array, " V"]
    next_V: Int[Array, " V"]  # the next group with rows, which may be fetched already; −1: none
    slot_V: Int[Array, " V"]  # 0 or 1, not that of the next group


def row_visits(
    sizes_E: Int[Array, " E"], n_rows: int, rows: int, parts: int = 1
) -> tuple[TileVisits, int]:
    """Every row is visited exactly once; the rows past the sum as those of group E.

    The tables of `parts` independent walks stand one after the other. Tiles with rows of groups are
    shared out evenly, and so are those past the sum, the odd one to a later walk: a buffer with
    room to spare, as tokens come to cut experts, has its rows at its beginning.
    Returns: the table and the length of one part's.
    """
    n_groups, n_tiles = sizes_E.shape[0], -(-n_rows // rows)
    end_E = jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), n_rows)
    end_G = jnp.concatenate([end_E, jnp.full((1,), n_rows, jnp.int32)])
    start_G = jnp.concatenate([jnp.zeros((1,), jnp.int32), end_E])
    group_V, tile_V = _walk(start_G, end_G, rows, n_tiles, n_tiles + n_groups, 0)
    length = -(-n_tiles // parts) + n_groups
    share_P, used = jnp.arange(parts + 1, dtype=jnp.int32), -(-end_E[-1] // rows)
    edge_P = (share_P * used + parts - 1) // parts
    blank_P = used + share_P * (n_tiles - used) // parts
    # Part p's visits stand together in the one walk, from first_P on; after them, of each tile past
    # the sum the one.
    first_P = jnp.sum(
        (tile_V[None, :] < edge_P[:, None]) & (group_V <= n_groups)[None, :], 1, dtype=jnp.int32
    )
    at_L = jnp.arange(length, dtype=jnp.int32)
    own_P1, blank_P1 = (x[1:, None] - x[:-1, None] for x in (first_P, blank_P))
    at_PV = jnp.minimum(first_P[:-1, None] + at_L[None, :], group_V.shape[0] - 1)
    owns_PV = at_L[None, :] < own_P1
    real_PV = at_L[None, :] < own_P1 + blank_P1
    group_PV = jnp.where(owns_PV, group_V[at_PV], n_groups)
    past_PV = blank_P[:-1, None] + jnp.minimum(at_L[None, :] - own_P1, blank_P1 - 1)
    idle_P1 = jnp.where(blank_P1 > 0, blank_P[1:, None], edge_P[1:, None]) - 1  # the last one again
    tile_PV = jnp.where(owns_PV, tile_V[at_PV], jnp.where(real_PV, past_PV, idle_P1))
    low_PV, high_PV = _bounds(start_G[group_PV], end_G[group_PV], tile_PV, rows, real_PV)
    some_G = end_G > start_G
    at_G = jnp.arange(n_groups + 1, dtype=jnp.int32)
    later_G = lax.cummin(jnp.where(some_G, at_G, n_groups), axis=0, reverse=True)
    later_G = jnp.concatenate([later_G[1:], jnp.full((1,), n_groups, jnp.int32)])
    next_PV = later_G[group_PV]
    here_PV = (next_PV < n_groups) & (start_G[next_PV] < edge_P[1:, None] * rows)
    slot_PV = ((jnp.cumsum(some_G.astype(jnp.int32)) - 1) % 2)[group_PV]
    table = (group_PV, tile_PV, low_PV, high_PV, jnp.where(here_PV, next_PV, -1), slot_PV)
    return TileVisits(*(x.reshape(-1) for x in table)), length


def group_visits(sizes_E: Int[Array, " E"], n_rows: int, rows: int) -> TileVisits:
    """Every group is visited, empty ones too; the rows past the sum are not."""
    n_groups, n_tiles = sizes_E.shape[0], -(-n_rows // rows)
    end_E = jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), n_rows)
    start_E = jnp.concatenate([jnp.zeros((1,), jnp.int32), end_E[:-1]])
    group_V, tile_V = _walk(start_E, end_E, rows, n_tiles, n_tiles + n_groups, 1)
    real_V, group_V = group_V < n_groups, jnp.minimum(group_V, n_groups - 1)
    low_V, high_V = _bounds(start_E[group_V], end_E[group_V], tile_V, rows, real_V)
    return TileVisits(group_V, tile_V, low_V, high_V, jnp.full_like(group_V, -1), group_V % 2)


def _walk(start_G, end_G, rows, n_tiles, length, least):
    """Group (G past the end) and tile of each step, groups in order and tiles in order."""
    n_groups = start_G.shape[0]
    count_G = jnp.where(end_G > start_G, (end_G - 1) // rows - start_G // rows + 1, least)
    last_G = jnp.cumsum(count_G)
    at_V = jnp.arange(length, dtype=jnp.int32)
    group_V = jnp.sum(last_G[None, :] <= at_V[:, None], axis=1, dtype=jnp.int32)
    inside_V = jnp.minimum(group_V, n_groups - 1)
    tile_V = start_G[inside_V] // rows + at_V - (last_G - count_G)[inside_V]
    return group_V, jnp.where(group_V < n_groups, jnp.minimum(tile_V, n_tiles - 1), n_tiles - 1)


def _bounds(start_V, end_V, tile_V, rows, real_V):
    low_V = jnp.clip(start_V - tile_V * rows, 0, rows)
    high_V = jnp.clip(end_V - tile_V * rows, 0, rows)
    used_V = real_V & (low_V < high_V)
    return jnp.where(used_V, low_V, 0), jnp.where(used_V, high_V, 0)
