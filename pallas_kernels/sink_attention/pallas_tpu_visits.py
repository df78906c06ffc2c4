# SPDX-License-Identifier: Apache-2.0
"""The key blocks that a block of queries visits: ranges of them, and a kernel's loop over them.

A range takes four scalars of SMEM. One is enough where segments share no keys. Where they do, a
block of queries needs the keys of the prompt and its own, and none of the answers between them,
which one range would visit; so it has two. Queries of a row that follow each other, of a prompt and
its answers or of several such groups, need no third. Those of a deeper tree may, or queries in
another order: the unneeded blocks of their ranges are masked.

Next: pallas_tpu.py and pallas_tpu_backward.py, the kernels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from pallas_kernels.blocks import block_ranges

ENDS = 4  # scalars of a range, see `block_ranges`


def count_scalars(shares: bool) -> int:
    """Scalars of SMEM for each block of queries."""
    return 2 * ENDS if shares else ENDS


def make_runs(
    needed_Bnm: Bool[Array, "B n m"], full_Bnm: Bool[Array, "B n m"], group: int, shares: bool
) -> Int[Array, " R"]:
    """The ranges that `visit_blocks` reads; `group` is the number of blocks of its steps."""
    if not shares:
        return _visit_ends(*jnp.moveaxis(block_ranges(needed_Bnm, full_Bnm), 2, 0))
    return _visit_two_ranges(_split_ranges(needed_Bnm, full_Bnm, group))


def slice_runs(runs: Int[Array, " R"], low: int, high: int, shares: bool) -> Int[Array, " R"]:
    """`runs` restricted to the key blocks [low, high), numbered from low."""
    ends = jnp.clip(runs.reshape(-1, ENDS), low, high) - low
    if shares:
        return _visit_two_ranges(ends.reshape(-1, 2, ENDS))
    return _visit_ends(*ends.T)


def _visit_ends(first: Array, full_first: Array, full_last: Array, last: Array) -> Array:
    """The ends of each run, interleaved. Every loop visits at least one block, so that the loop
    before it always has a block to prefetch."""
    any_needed = last > first
    first, last = jnp.where(any_needed, first, 0), jnp.where(any_needed, last, 1)
    return jnp.stack([first, full_first, full_last, last], axis=-1).reshape(-1)


def _split_ranges(
    needed_Bnm: Bool[Array, "B n m"], full_Bnm: Bool[Array, "B n m"], group: int
) -> Int[Array, "B n 2 4"]:
    """Two ranges with all needed blocks, split where the most blocks between are unneeded.

    The last step of a range of groups reads up to group − 1 blocks past its end. Where the second
    range is nearer than that it would count their keys twice, so it continues the first one.
    """
    ids_11m = jnp.arange(needed_Bnm.shape[2], dtype=jnp.int32)[None, None, :]
    latest_Bnm = lax.cummax(jnp.where(needed_Bnm, ids_11m, -1), axis=2)
    previous_Bnm = jnp.pad(latest_Bnm[:, :, :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    gap_Bnm = jnp.where(needed_Bnm & (previous_Bnm >= 0), ids_11m - previous_Bnm - 1, 0)
    is_split_Bn1 = jnp.max(gap_Bnm, axis=2, keepdims=True) >= max(1, group - 1)
    is_upper_Bnm = is_split_Bn1 & (ids_11m >= jnp.argmax(gap_Bnm, axis=2)[:, :, None])
    parts = (block_ranges(needed_Bnm & x, full_Bnm & x) for x in (~is_upper_Bnm, is_upper_Bnm))
    return jnp.stack([*parts], axis=2)


def _visit_two_ranges(ends: Int[Array, "*n 2 4"]) -> Array:
    """The ends of both ranges, interleaved. A lower range without blocks is replaced by the upper
    one, so that the first block of a loop is always that of its lower range."""
    lower, upper = ends[..., 0, :], ends[..., 1, :]
    is_empty = lower[..., 3:] <= lower[..., :1]
    lower, upper = jnp.where(is_empty, upper, lower), jnp.where(is_empty, 0, upper)
    lower = _visit_ends(*jnp.moveaxis(lower, -1, 0)).reshape(upper.shape)
    return jnp.concatenate([lower, upper], axis=-1).reshape(-1)


# The rest is called inside kernels.


class BlockRange(NamedTuple):
    """One range, as scalars of a kernel; a loop over it counts its iterations from 0."""

    first: Any
    full_first: Any
    full_last: Any
    last: Any

    def count_steps(self, group: int) -> Any:
        """Iterations of the loop."""
        return (self.last - self.first + group - 1) // group

    def locate_block(self, iteration: Any, group: int) -> Any:
        """The first block of an iteration."""
        return self.first + iteration * group

    def has_next(self, _: Any, block: Any, group: int) -> Any:
        """True if an iteration follows that of this block."""
        return block + group < self.last

    def next_block(self, _: Any, block: Any, group: int) -> Any:
        """The first block of the next iteration."""
        return block + group

    def is_full(self, block: Any) -> Any:
        """True if every pair of the block is visible."""
        return (block >= self.full_first) & (block < self.full_last)


class TwoRanges(NamedTuple):
    """Two ranges, which one loop visits in turn."""

    lower: BlockRange
    upper: BlockRange
    lower_steps: Any

    @property
    def first(self) -> Any:
        """The first block of the loop."""
        return self.lower.first

    def count_steps(self, group: int) -> Any:
        """Iterations of the loop."""
        return self.lower_steps + self.upper.count_steps(group)

    def locate_block(self, iteration: Any, group: int) -> Any:
        """The first block of an iteration."""
        return jnp.where(
            iteration < self.lower_steps,
            self.lower.locate_block(iteration, group),
            self.upper.locate_block(iteration - self.lower_steps, group),
        )

    def has_next(self, iteration: Any, _: Any, group: int) -> Any:
        """True if an iteration follows this one."""
        return iteration + 1 < self.count_steps(group)

    def next_block(self, iteration: Any, _: Any, group: int) -> Any:
        """The first block of the next iteration."""
        return self.locate_block(iteration + 1, group)

    def is_full(self, block: Any) -> Any:
        """True if every pair of the block is visible; the ranges have no block in common."""
        return self.lower.is_full(block) | self.upper.is_full(block)


def read_ranges(runs_ref: Any, row: Any, group: int, shares: bool) -> BlockRange | TwoRanges:
    """The ranges of one block of queries, whose scalars begin at `row`."""
    lower = BlockRange(*(runs_ref[row + j] for j in range(ENDS)))
    if not shares:
        return lower
    upper = BlockRange(*(runs_ref[row + ENDS + j] for j in range(ENDS)))
    return TwoRanges(lower, upper, lower.count_steps(group))


def visit_blocks(
    runs_ref: Any,
    slot_ref: Any,
    copies: Callable[..., tuple],
    body: Callable[[Any, Any, bool], None],
    group: int,
    shares: bool,
) -> None:
    """Call body(block, buffer, full) for all blocks that this step of the grid (B, K, blocks)
    needs, `group` blocks at a time, of which `block` is the first.

    `copies(block, buffer)` returns the copies of a group. `slot_ref` holds the buffer, 0 or 1, into
    which the first blocks of the next step are being copied. Groups of several blocks, which only
    windows have, are always masked.
    """
    b, i, n = pl.program_id(0), pl.program_id(2), pl.num_programs(2)
    row = count_scalars(shares) * (b * n + i)
    ranges = read_ranges(runs_ref, row, group, shares)
    next_row = row + count_scalars(shares) * jnp.where(i + 1 < n, 1, 0)

    def start_fetch(block: Any, buffer: Any) -> None:
        for copy in copies(block, buffer):
            copy.start()

    # Nothing before this step could prefetch for it: its batch row and head may begin on another
    # core.
    @pl.when(i == 0)
    def _():
        slot_ref[0] = 0
        start_fetch(ranges.first, 0)

    def visit_iteration(iteration: Any, buffer: Any) -> Any:
        block = ranges.locate_block(iteration, group)
        has_next = ranges.has_next(iteration, block, group)

        # The last visit of a step fetches the first block of the next step.
        @pl.when(has_next | (i + 1 < n))
        def _():
            next_block = ranges.next_block(iteration, block, group)
            start_fetch(jnp.where(has_next, next_block, runs_ref[next_row]), 1 - buffer)

        for copy in copies(block, buffer):
            copy.wait()
        if group > 1:
            body(block, buffer, False)
            return 1 - buffer
        full = ranges.is_full(block)
        pl.when(full)(lambda: body(block, buffer, True))
        pl.when(~full)(lambda: body(block, buffer, False))
        return 1 - buffer

    slot_ref[0] = lax.fori_loop(0, ranges.count_steps(group), visit_iteration, slot_ref[0])
