# SPDX-License-Identifier: Apache-2.0
"""What the Hopper kernels of sink attention share: tiles, padding, and the order of blocks.

A block of threads visits first the blocks where segments meet, then those at a border of causality
or of the window, then those seen whole: three loops, and the last has no comparison in it.
Next: pallas_gpu.py and pallas_gpu_backward.py.
"""

import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels import hopper
from pallas_kernels.blocks import block_table
from pallas_kernels.masks import Layout, in_reach, of_keys

BEFORE = -(2**30)  # a position so far before all keys that even their distance is a number
LOG2E = math.log2(math.e)  # the hardware's exponential has base 2


class MosaicTiles(NamedTuple):
    """How one block of threads works."""

    consumers: int  # warpgroups that compute, each 64 rows of one head
    step: int  # rows of the other side per step
    stages: int  # steps held in shared memory at once
    heads: int = 1  # of queries, that share keys: so many consumers have the same rows

    @property
    def rows(self) -> int:
        """Of the whole block."""
        return self.consumers // self.heads * hopper.WARPGROUP_ROWS

    def own(self, group: Any, pair: Any) -> tuple[Any, Any]:
        """A consumer's first row in the block, and its head: of the block's `heads` heads, which
        are those from pair · heads on."""
        heads = jnp.int32(self.heads)
        return lax.div(group, heads) * hopper.WARPGROUP_ROWS, pair * heads + lax.rem(group, heads)


class Padded(NamedTuple):
    """A layout, padded, positions and segments in one array each: one copy fetches both."""

    q_B2T: Int[Array, "B 2 T"]
    k_B2S: Int[Array, "B 2 S"]  # padding's segment is one that no query is in
    needed_Bnm: Bool[Array, "B n m"]
    whole_Bnm: Bool[Array, "B n m"]
    single_Bm: Bool[Array, "B m"]  # blocks of keys of one segment, and no padding beside it

    def table(self) -> Array:
        """The blocks of keys that each block of queries visits."""
        return table(self.needed_Bnm, self.whole_Bnm, self.single_Bm)

    def table_of_some(self) -> Array:
        """The same, and where queries need no block they visit the first, of which they see
        nothing: for a kernel that reads ahead and must find a block for each."""
        first_Bn = self.needed_Bnm[:, :, 0] | ~self.needed_Bnm.any(2)
        return table(self.needed_Bnm.at[:, :, 0].set(first_Bn), self.whole_Bnm, self.single_Bm)

    def table_in_order(self) -> Array:
        """`table_of_some` whose blocks come by their place alone, all with every test: the others
        that share a block with a query change neither what it adds up nor in which order."""
        mixed = jnp.zeros_like(self.whole_Bnm), jnp.zeros_like(self.single_Bm)
        return self._replace(whole_Bnm=mixed[0], single_Bm=mixed[1]).table_of_some()

    def table_of_keys(self) -> Array:
        """The blocks of queries that each block of keys visits: all that are masked are mixed."""
        needed, whole = (x.transpose(0, 2, 1) for x in (self.needed_Bnm, self.whole_Bnm))
        return table(needed, whole, jnp.zeros(whole.shape[::2], bool))


def pad(x: Array, multiple: int, axis: int = 1) -> Array:
    """Zeros at the end of an axis; nothing where it is a multiple already."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def padded(layout: Layout, q_block: int, k_block: int, window: int) -> Padded:
    """Padding gets segment 0, which nobody sees."""
    T, S = layout.q_positions_BT.shape[1], layout.k_positions_BS.shape[1]
    layout = layout.padded(-T % q_block, -S % k_block)
    q_pos, k_pos, q_seg, k_seg = layout
    tables = block_table(layout, q_block, k_block, window)
    k_seg = of_keys(k_seg)
    k_seg_BmS = k_seg.reshape(k_seg.shape[0], -1, k_block)
    single_Bm = (k_seg_BmS == k_seg_BmS[:, :, :1]).all(2) & (window <= -BEFORE)
    return Padded(jnp.stack([q_pos, q_seg], 1), jnp.stack([k_pos, k_seg], 1), *tables, single_Bm)


class Mask(Enum):
    """What must be asked of the pairs in a block."""

    ALL = 0
    REACH = 1  # the keys have one segment: its number is compared with rows', not pair by pair
    NONE = 2


class Visits(NamedTuple):
    """What one block of threads visits, in this order: blocks that need every test, those that
    need none of segments, those that need none at all."""

    mixed: Any
    masked: Any
    count: Any
    at: Callable[[Any], Any]  # which block is visited as number n

    @property
    def loops(self) -> tuple[tuple[Mask, Any], ...]:
        """For `in_turn`."""
        return tuple(zip(Mask, self[:3], strict=True))


def visits(table_ref: Any, b: Any, i: Any) -> Visits:
    """Read from what `table` made."""
    mixed, masked, count = (table_ref[b, i, n] for n in range(3))
    return Visits(mixed, masked, count, lambda n: table_ref[b, i, 3 + n])


def table(
    needed_Bnm: Bool[Array, "B n m"], whole_Bnm: Bool[Array, "B n m"], single_Bm: Bool[Array, "B m"]
) -> Int[Array, "B n m+3"]:
    """The table that `visits` reads, for each block along n: how many blocks along m are mixed,
    how many of those and the masked, how many of all; then their numbers in this order.
    """
    kind = jnp.where(whole_Bnm, 2, jnp.where(single_Bm[:, None, :], 1, 0))
    kind = jnp.where(needed_Bnm, kind, 3)
    counts = ((kind <= n).sum(2) for n in range(3))
    return jnp.concatenate([jnp.stack([*counts], 2), jnp.argsort(kind, axis=2)], 2, jnp.int32)


def in_turn(loops: Sequence[tuple[Mask, Any]], step: Callable[..., Any], carry: Any) -> Any:
    """carry = step(n, carry, mask) in a loop for each mask, up to its end."""
    start = 0
    for mask, end in loops:
        carry = lax.fori_loop(start, end, partial(step, mask=mask), carry)
        start = end
    return carry


def split_index(index: Any, *sizes: int) -> list[Any]:
    """A flat index as one per size, the last fastest."""
    parts = []
    for size in reversed(sizes):
        size = jnp.int32(size)
        parts.append(lax.rem(index, size))
        index = lax.div(index, size)
    return parts[::-1]


def this_core(blocks: int, B: int, pairs: int) -> tuple[Any, Callable[[Any], list[Any]]]:
    """How many tiles are this core's, and of its tile number n: block, row of the batch, heads.

    Late queries, which see most, go first; heads that share keys run side by side.
    """
    core, cores = lax.axis_index("core"), lax.axis_size("core")

    def place(n: Any) -> list[Any]:
        i, b, pair = split_index(core + n * cores, blocks, B, pairs)
        return [blocks - 1 - i, b, pair]

    return lax.div(blocks * B * pairs - core + cores - 1, jnp.int32(cores)), place


def only_seen(
    z: Array, mask: Mask, rows_at: Any, columns_at: Any, axis_of_q: int, window: int,
    interpret: bool,
) -> Array:  # fmt: skip
    """Scores, −∞ where THE predicate is false; refs to the (positions, segments) of both axes."""
    if mask is Mask.NONE:
        return z
    pos, seg = hopper.load_two(rows_at, hopper.PER_ROW, interpret)
    if mask is Mask.ALL:
        columns = hopper.load_two(columns_at, hopper.PER_COLUMN, interpret)
        column_pos, column_seg = (hopper.spread(x, z.shape, 1) for x in columns)
        same = hopper.spread(seg, z.shape, 0) == column_seg
    else:  # queries of other segments come before all keys
        column_pos = hopper.load(columns_at.at[0], hopper.PER_COLUMN, interpret)
        column_pos = hopper.spread(column_pos, z.shape, 1)
        pos, same = jnp.where(seg == columns_at[1, 0], pos, BEFORE), None
    row_pos = hopper.spread(pos, z.shape, 0)
    q_pos, k_pos = (column_pos, row_pos) if axis_of_q else (row_pos, column_pos)
    reached = in_reach(q_pos, k_pos, window)
    return jnp.where(reached if same is None else same & reached, z, -jnp.inf)


def tile_refs(count: int, rows: int, width: int, dtype: Any) -> Any:
    """Shared memory for `count` tiles."""
    return plgpu.SMEM((count, rows, width), dtype, transforms=hopper.swizzled())
