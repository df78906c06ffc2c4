# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the Hopper kernels of sink attention: tiles, padding, and the order of blocks.

A block of threads visits first blocks of several segments, then blocks at the border of causality
or of the window, then full blocks. These are three loops; the last one has no mask.
Next: pallas_gpu.py and pallas_gpu_backward.py.
"""

import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels import hopper
from pallas_kernels.blocks import block_table
from pallas_kernels.dispatch import target_device
from pallas_kernels.masks import PADDING_KEY_SEGMENT, Layout, is_in_window, mark_key_padding

BEFORE_ALL_KEYS = -(2**30)  # a position before all keys; distances from it do not overflow
LOG2E = math.log2(math.e)  # the hardware's exponential has base 2


class MosaicTiles(NamedTuple):
    """Tile sizes of one block of threads."""

    consumers: int  # warpgroups that compute, each 64 rows of one head
    step: int  # keys (or queries, for dk and dv) per step
    stages: int  # steps held in shared memory at once
    heads: int = 1  # query heads of one key head; so many consumers have the same rows

    @property
    def rows(self) -> int:
        """Rows of the block of threads."""
        return self.consumers // self.heads * hopper.WARPGROUP_ROWS

    def locate_consumer(self, group: Any, pair: Any) -> tuple[Any, Any]:
        """(first row in the block, head) of a consumer; the block's heads start at pair · heads."""
        heads = jnp.int32(self.heads)
        return lax.div(group, heads) * hopper.WARPGROUP_ROWS, pair * heads + lax.rem(group, heads)


class Padded(NamedTuple):
    """A padded layout; positions and segments are in one array, so that one copy fetches both."""

    q_B2T: Int[Array, "B 2 T"]
    # The third row, of shared keys alone: the last segments that see them. No query sees padding.
    k_BRS: Int[Array, "B R S"]
    needed_Bnm: Bool[Array, "B n m"]
    full_Bnm: Bool[Array, "B n m"]
    # key blocks of one segment, which the same queries see, without padding among it
    single_Bm: Bool[Array, "B m"]

    def key_block_table(self) -> Array:
        """The key blocks that each block of queries visits."""
        return visit_table(self.needed_Bnm, self.full_Bnm, self.single_Bm)

    def nonempty_key_block_table(self) -> Array:
        """`key_block_table` with at least one key block for each block of queries.

        The forward kernel prefetches the first block of each tile, so there must be one. It is
        completely masked.
        """
        first_Bn = self.needed_Bnm[:, :, 0] | ~self.needed_Bnm.any(2)
        return visit_table(self.needed_Bnm.at[:, :, 0].set(first_Bn), self.full_Bnm, self.single_Bm)

    def invariant_key_block_table(self) -> Array:
        """`nonempty_key_block_table` with the blocks in order of position, each with every test.

        Other queries of a block then change neither the terms of a query's sums nor their order.
        """
        mixed = jnp.zeros_like(self.full_Bnm), jnp.zeros_like(self.single_Bm)
        return self._replace(full_Bnm=mixed[0], single_Bm=mixed[1]).nonempty_key_block_table()

    def query_block_table(self) -> Array:
        """The query blocks that each key block visits; those that need a mask count as mixed."""
        needed, full = (x.transpose(0, 2, 1) for x in (self.needed_Bnm, self.full_Bnm))
        return visit_table(needed, full, jnp.zeros(full.shape[::2], bool))


def arrays_unsupported(q_BTNH: Any, k_BSKH: Any) -> str | None:
    """The reason why a Hopper kernel of attention cannot take these arrays, or None."""
    if not target_device().is_hopper:
        return f"it needs a Hopper GPU (wgmma), this is {target_device().kind}"
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {q_BTNH.dtype} is not bfloat16 or float16"
    if q_BTNH.shape[3] not in (64, 128):
        return f"head size {q_BTNH.shape[3]} is not 64 or 128"
    if 0 in (*q_BTNH.shape, *k_BSKH.shape):
        return "there are no queries or no keys"
    return None


def pad_to_multiple(x: Array, multiple: int, axis: int = 1) -> Array:
    """Pad an axis with zeros to a multiple of `multiple`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def pad_layout(layout: Layout, q_block: int, k_block: int, window: int) -> Padded:
    """Pad a layout to complete blocks and compute its tables. Padding has segment 0."""
    T, S = layout.q_positions_BT.shape[1], layout.k_positions_BS.shape[1]
    layout = layout.with_padding(-T % q_block, -S % k_block)
    q_pos, k_pos, q_seg, k_seg, k_last = layout
    tables = block_table(layout, q_block, k_block, window)
    k_places = [k_pos, mark_key_padding(k_seg)]
    if k_last is not None:
        k_places.append(jnp.where(k_seg > 0, k_last, PADDING_KEY_SEGMENT))
    k_BRS = jnp.stack(k_places, 1)
    k_BRmS = k_BRS[:, 1:].reshape(*k_BRS[:, 1:].shape[:2], -1, k_block)
    # In a larger window a query at BEFORE_ALL_KEYS could see keys.
    single_Bm = (k_BRmS == k_BRmS[..., :1]).all((1, 3)) & (window <= -BEFORE_ALL_KEYS)
    return Padded(jnp.stack([q_pos, q_seg], 1), k_BRS, *tables, single_Bm)


class Mask(Enum):
    """The tests that the pairs of a block need."""

    ALL = 0
    REACH = 1  # the keys have one segment, which is compared once for each row
    NONE = 2


class Visits(NamedTuple):
    """The blocks that one block of threads visits: those with Mask.ALL, then REACH, then NONE.

    mixed, masked and count are the ends of these three ranges.
    """

    mixed: Any
    masked: Any
    count: Any
    block: Callable[[Any], Any]  # number of the block of visit n

    @property
    def loops(self) -> tuple[tuple[Mask, Any], ...]:
        """(mask, end) of each loop, for `loop_by_mask`."""
        return tuple(zip(Mask, self[:3], strict=True))


def read_visits(table_ref: Any, b: Any, i: Any) -> Visits:
    """The visits of block i of batch row b, read from a table of `visit_table`."""
    mixed, masked, count = (table_ref[b, i, n] for n in range(3))
    return Visits(mixed, masked, count, lambda n: table_ref[b, i, 3 + n])


def visit_table(
    needed_Bnm: Bool[Array, "B n m"], full_Bnm: Bool[Array, "B n m"], single_Bm: Bool[Array, "B m"]
) -> Int[Array, "B n m+3"]:
    """The table that `read_visits` reads: one row for each block along n.

    A row holds three counts, of the mixed blocks along m, of mixed and masked, and of all to visit;
    then the numbers of the blocks in this order.
    """
    kind = jnp.where(full_Bnm, 2, jnp.where(single_Bm[:, None, :], 1, 0))
    kind = jnp.where(needed_Bnm, kind, 3)
    counts = ((kind <= n).sum(2) for n in range(3))
    # The sort is stable: blocks of one kind stay in order of position, which makes sums repeatable.
    return jnp.concatenate([jnp.stack([*counts], 2), jnp.argsort(kind, axis=2)], 2, jnp.int32)


def loop_by_mask(loops: Sequence[tuple[Mask, Any]], step: Callable[..., Any], carry: Any) -> Any:
    """Run carry = step(n, carry, mask) in one loop for each (mask, end)."""
    start = 0
    for mask, end in loops:
        carry = lax.fori_loop(start, end, partial(step, mask=mask), carry)
        start = end
    return carry


def split_index(index: Any, *sizes: int) -> list[Any]:
    """Split a flat index into one per size; the last varies fastest."""
    parts = []
    for size in reversed(sizes):
        size = jnp.int32(size)
        parts.append(lax.rem(index, size))
        index = lax.div(index, size)
    return parts[::-1]


def tiles_of_core(blocks: int, B: int, pairs: int) -> tuple[Any, Callable[[Any], list[Any]]]:
    """(number of this core's tiles, function from n to [block, batch row, heads] of its tile n).

    Late queries go first, as they see the most keys; heads that share keys run concurrently.
    """
    core, cores = lax.axis_index("core"), lax.axis_size("core")

    def locate_tile(n: Any) -> list[Any]:
        i, b, pair = split_index(core + n * cores, blocks, B, pairs)
        return [blocks - 1 - i, b, pair]

    return lax.div(blocks * B * pairs - core + cores - 1, jnp.int32(cores)), locate_tile


def fetch_key_blocks(
    n_tiles: Any,
    locate_tile: Callable[[Any], list[Any]],
    table_ref: Any,
    pairs_per_key_head: int,
    step: int,
    fetch: Callable[[Any, Any, Any, Any], None],
) -> Any:
    """Run fetch(visit, batch row, slice of keys, key head) for all visits of a core's tiles.

    Visits are numbered across tiles. Returns their number.
    """

    def one_tile(n, offset):
        i, b, pair = locate_tile(n)
        visit, key_head = read_visits(table_ref, b, i), lax.div(pair, jnp.int32(pairs_per_key_head))

        @pl.loop(0, visit.count)
        def _(k):
            fetch(offset + k, b, pl.ds(visit.block(k) * step, step), key_head)

        return offset + visit.count

    return lax.fori_loop(0, n_tiles, one_tile, jnp.int32(0))


def mask_scores(
    z: Array,
    mask: Mask,
    row_places: Any,
    column_places: Any,
    q_axis: int,
    window: int,
    interpret: bool,
) -> Array:
    """Scores with −∞ where the visibility predicate is false.

    The refs hold (positions, segments) of rows and columns, those of shared keys also their last
    segments; q_axis is the axis of the queries.
    """
    if mask is Mask.NONE:
        return z
    pos, seg = hopper.load_two_rows(row_places, hopper.PER_ROW, interpret)
    key_places, key_axis = (row_places, 0) if q_axis else (column_places, 1)
    shares = key_places.shape[0] == 3
    if mask is Mask.ALL:
        columns = hopper.load_two_rows(column_places, hopper.PER_COLUMN, interpret)
        column_pos, column_seg = (hopper.broadcast_along(x, z.shape, 1) for x in columns)
        row_seg = hopper.broadcast_along(seg, z.shape, 0)
        is_seen = row_seg == column_seg
        if shares:
            layout = hopper.PER_COLUMN if key_axis else hopper.PER_ROW
            last = hopper.load_registers(key_places.at[2], layout, interpret)
            last = hopper.broadcast_along(last, z.shape, key_axis)
            q_seg, k_seg = (column_seg, row_seg) if q_axis else (row_seg, column_seg)
            is_seen = (k_seg <= q_seg) & (q_seg <= last)
    else:  # queries that see none of the keys get a position before all keys
        column_pos = hopper.load_registers(column_places.at[0], hopper.PER_COLUMN, interpret)
        column_pos = hopper.broadcast_along(column_pos, z.shape, 1)
        first = column_places[1, 0]
        is_seen = (first <= seg) & (seg <= column_places[2, 0]) if shares else seg == first
        pos, is_seen = jnp.where(is_seen, pos, BEFORE_ALL_KEYS), None
    row_pos = hopper.broadcast_along(pos, z.shape, 0)
    q_pos, k_pos = (column_pos, row_pos) if q_axis else (row_pos, column_pos)
    in_window = is_in_window(q_pos, k_pos, window)
    return jnp.where(in_window if is_seen is None else is_seen & in_window, z, -jnp.inf)


def tile_refs(count: int, rows: int, width: int, dtype: Any) -> Any:
    """Shared memory for `count` swizzled tiles."""
    return plgpu.SMEM((count, rows, width), dtype, transforms=hopper.swizzle_transforms())
