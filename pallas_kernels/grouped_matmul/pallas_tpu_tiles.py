# SPDX-License-Identifier: Apache-2.0
"""How the TPU kernels cut matrices up: what fits in VMEM, and which slices the chip can copy.

A copy between HBM and VMEM moves whole lanes of 128 columns, or all columns. Half of GPT-OSS's
5760 gate and up columns is 22.5 × 128, so the up columns' windows start 64 columns early and the
kernel rotates them into place. Next: `pallas_tpu_rows.py`.
"""

from typing import Any, NamedTuple

from pallas_kernels.tpu import vmem_bytes, wide

LANES = 128  # columns in a vector register, the least a copy moves
COLUMNS = 256  # per product: what v6e's and 7x's matrix units are wide, twice what v5's are
ROWS = 512  # rows of an input tile: their products take longer than a step costs
ALIGNED = 16  # rows that start a product are a multiple of this: a register of bfloat16


def pieces() -> tuple[int, ...]:
    """Rows per product, the most first: for most of a group, and for its end.

    A matrix unit 256 wide takes as long for 64 rows as for 128, and nearly so for 256: libtpu's
    schedule, `python -m pallas_kernels.bench grouped_swiglu --compile v6e --schedule`.
    """
    return (512, 256, 128) if wide() else (256, 64)


def counts(rows: Any, largest: int) -> list[tuple[int, Any]]:
    """(size, how many) of the pieces of at most `largest` that cover `rows`, in their order.

    One piece that is nearly full is better than several small ones.
    """
    sizes = [size for size in pieces() if size <= largest]
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
        width = 2 * up(tile, LANES) + extra if halves else tile
        if width * rows * itemsize <= window_bytes(itemsize):
            break
    else:
        return None
    if lanes and not halves and tile < columns and columns % LANES:
        return None  # the last window would end inside a register
    if not halves:
        return TpuPlan(tile, (_window(columns, tile, 0, 0, columns),), 0)
    whole = up(columns, LANES)  # the last tile of gate columns ends in up columns, unused
    step = up(tile, LANES)
    gate = _window(whole, step, 0, 0, whole)
    return TpuPlan(tile, (gate, _window(whole, step, columns - shift, extra, 2 * columns)), shift)


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
