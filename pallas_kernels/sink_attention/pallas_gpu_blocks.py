# SPDX-License-Identifier: Apache-2.0
"""What the Hopper kernels of sink attention share: tiles, padding, and the order of blocks.

A block of threads visits first the blocks that need a mask, then those seen whole: two loops, and
the second has no comparison in it. Next: pallas_gpu.py and pallas_gpu_backward.py.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Int

from pallas_kernels import hopper
from pallas_kernels.blocks import block_table, runs
from pallas_kernels.masks import Layout, in_reach, of_keys

LOG2E = math.log2(math.e)  # the hardware's exponential has base 2


class MosaicTiles(NamedTuple):
    """How one block of threads works."""

    consumers: int  # warpgroups that compute, each with its own 64 rows
    step: int  # rows of the other side per step
    stages: int  # steps held in shared memory at once

    @property
    def rows(self) -> int:
        """Of the whole block."""
        return self.consumers * hopper.WARPGROUP_ROWS


class Padded(NamedTuple):
    """A layout, padded, positions and segments in one array each: one copy fetches both."""

    q_B2T: Int[Array, "B 2 T"]
    k_B2S: Int[Array, "B 2 S"]
    needed_Bnm: Bool[Array, "B n m"]
    whole_Bnm: Bool[Array, "B n m"]


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
    return Padded(jnp.stack([q_pos, q_seg], 1), jnp.stack([k_pos, k_seg], 1), *tables)


class BlockVisits(NamedTuple):
    """The blocks that one block of threads visits: how many, how many with a mask, and which."""

    first: Any
    whole_first: Any
    whole_last: Any
    last: Any

    @property
    def count(self) -> Any:
        """All of them."""
        return self.last - self.first

    @property
    def masked(self) -> Any:
        """Those before and after the whole ones."""
        return self.count - (self.whole_last - self.whole_first)

    def at(self, i: Any) -> Any:
        """Block number i in the order of visits: masked ones first."""
        before = self.whole_first - self.first
        after = self.whole_last - before + i
        masked = jnp.where(i < before, self.first + i, after)
        return jnp.where(i < self.masked, masked, self.whole_first + i - self.masked)


def visits(runs_ref: Any, b: Any, i: Any) -> BlockVisits:
    """Read from the table of `runs`."""
    return BlockVisits(*(runs_ref[b, i, n] for n in range(4)))


def table(needed_Bnm: Bool[Array, "B n m"], whole_Bnm: Bool[Array, "B n m"]) -> Array:
    """The table that `visits` reads."""
    return runs(needed_Bnm, whole_Bnm)


def split_index(index: Any, *sizes: int) -> list[Any]:
    """A flat index as one per size, the last fastest."""
    parts = []
    for size in reversed(sizes):
        size = jnp.int32(size)
        parts.append(lax.rem(index, size))
        index = lax.div(index, size)
    return parts[::-1]


def seen(q_places: Any, k_places: Any, axis_of_q: int, shape: Any, window: int) -> Array:
    """THE predicate over a tile; places are (positions, segments) in registers."""
    (q_pos, q_seg), (k_pos, k_seg) = q_places, k_places
    # What depends on keys alone is computed before it is spread over the tile.
    q_pos, q_seg = (hopper.spread(x, shape, axis_of_q) for x in (q_pos, q_seg))
    k_pos, k_seg = (hopper.spread(x, shape, 1 - axis_of_q) for x in (k_pos, of_keys(k_seg)))
    return (q_seg == k_seg) & in_reach(q_pos, k_pos, window)


def tile_refs(count: int, rows: int, width: int, dtype: Any) -> Any:
    """Shared memory for `count` tiles."""
    return plgpu.SMEM((count, rows, width), dtype, transforms=hopper.swizzled())


def fetch(pairs: Any, barrier: Any) -> None:
    """Copies into shared memory that one barrier waits for."""
    for source, destination in pairs:
        plgpu.copy_gmem_to_smem(source, destination, barrier)


def slot_of(n: Any, stages: int) -> Any:
    """Where in the ring step n lies."""
    return lax.rem(n, jnp.int32(stages))


def fill_ring(count: Any, stages: int, put: Any, *free: Any) -> None:
    """The fetching warpgroup: put(n, slot, wait) for every step, then see all slots emptied.

    `wait(barrier)` returns when the consumers have left what lay in the slot before.
    """

    @pl.loop(0, count)
    def _(n):
        slot = slot_of(n, stages)

        def wait(barrier):
            @pl.when(n >= stages)
            def _():
                plgpu.barrier_wait(barrier.at[slot])

        put(n, slot, wait)

    @pl.loop(jnp.maximum(count, stages), count + stages)
    def _(n):
        for barrier in free:
            plgpu.barrier_wait(barrier.at[slot_of(n, stages)])
