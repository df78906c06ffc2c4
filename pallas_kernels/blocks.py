# SPDX-License-Identifier: Apache-2.0
"""The blocks of keys that each block of queries needs, computed from positions and segments.

Thus causal, windowed, packed, padded and cached layouts all skip blocks without a visible pair,
and only the sizes are static. A block is full if all its pairs are visible: it needs no mask.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.masks import Layout

PART = 32  # least tokens of a part of a block, see `_find_visible_parts`
MAX_PAIRS = 2**20  # of parts, for each row


class _Bounds(NamedTuple):
    """Lowest and highest values of blocks; one without tokens has empty bounds (low > high)."""

    position: tuple[Array, Array]
    segment: tuple[Array, Array]
    last_segment: tuple[Array, Array]  # that sees the keys; of queries their own

    def map(self, function: Callable[[Array], Array]) -> "_Bounds":
        """The bounds with `function` applied to each array."""
        return _Bounds(*((function(low), function(high)) for low, high in self))


def block_table(
    layout: Layout, q_block: int, k_block: int, window: int
) -> tuple[Bool[Array, "B n m"], Bool[Array, "B n m"]]:
    """(needed, full) for every pair of blocks; lengths must be multiples of their block.

    needed: the bounds of positions and segments, in parts of the blocks, allow a visible pair.
        False is exact; True may be a false alarm.
    full: every pair is visible, so the block needs no mask. True is exact; False may not be.
    """
    q_pos, k_pos, q_seg, k_seg, k_last = layout
    last = k_seg if k_last is None else k_last
    q = _find_bounds(q_pos, q_seg, q_seg, q_block).map(lambda x: x[:, :, None])
    k = _find_bounds(k_pos, k_seg, last, k_block).map(lambda x: x[:, None, :])
    uniform = (k.segment[1] <= q.segment[0]) & (q.segment[1] <= k.last_segment[0])
    uniform &= k.position[1] <= q.position[0]
    if window:
        uniform &= q.position[1] - k.position[0] < window
    q_real, k_real = (
        (seg > 0).reshape(seg.shape[0], seg.shape[1] // size, size).all(2)
        for seg, size in ((q_seg, q_block), (k_seg, k_block))
    )
    # The exact test would cost one comparison a pair of tokens.
    has_choice = q_seg.shape[1] > q_block or k_seg.shape[1] > k_block
    needed = (
        _find_visible_parts(layout, q_block, k_block, window)
        if has_choice
        else _may_see(q, k, window)
    )
    return needed, uniform & q_real[:, :, None] & k_real[:, None, :]


def _find_visible_parts(
    layout: Layout, q_block: int, k_block: int, window: int
) -> Bool[Array, "B n m"]:
    """True for blocks that have a part whose bounds allow a visible pair.

    A block in which two sequences meet has the last positions of one and the first of the other,
    and its bounds would call many blocks needed: in a packed row twice as many as are, for a short
    window. So it is cut into parts, and each part into the tokens of its lowest segment and the
    others.
    """
    q_pos, k_pos, q_seg, k_seg, k_last = layout
    part = PART
    while q_pos.shape[1] * k_pos.shape[1] > MAX_PAIRS * part**2:
        part *= 2
    # Parts of a few tokens would cost more than they save.
    q_part, k_part = (
        size if math.gcd(size, part) < PART // 4 else math.gcd(size, part)
        for size in (q_block, k_block)
    )
    q = _find_bounds(q_pos, q_seg, q_seg, q_part, cuts=True).map(lambda x: x[:, :, None])
    last = k_seg if k_last is None else k_last
    k = _find_bounds(k_pos, k_seg, last, k_part, cuts=True).map(lambda x: x[:, None, :])
    parts = 2 * q_block // q_part, 2 * k_block // k_part
    visible = _may_see(q, k, window)
    B, n, m = visible.shape
    return visible.reshape(B, n // parts[0], parts[0], m // parts[1], parts[1]).any((2, 4))


def _find_bounds(
    positions: Array, segments: Array, last_segments: Array, size: int, cuts: bool = False
) -> _Bounds:
    """Bounds of blocks of `size` tokens [B, n]; with `cuts` two for each block, [B, 2·n].

    The first of two has the block's lowest segment, the second the others.
    """
    big = jnp.iinfo(jnp.int32).max
    B, T = segments.shape
    positions, segments, last_segments = (
        x.reshape(B, T // size, 1, size) for x in (positions, segments, last_segments)
    )
    real = segments > 0
    if cuts:
        lowest = jnp.where(real, segments, big).min(3, keepdims=True)
        real = jnp.concatenate([real & (segments == lowest), real & (segments != lowest)], axis=2)

    def bound(x: Array) -> tuple[Array, Array]:
        low, high = jnp.where(real, x, big).min(3), jnp.where(real, x, -big).max(3)
        blocks = low.shape[1] * low.shape[2]  # B may be 0
        return low.reshape(B, blocks), high.reshape(B, blocks)

    return _Bounds(bound(positions), bound(segments), bound(last_segments))


def _may_see(q: _Bounds, k: _Bounds, window: int) -> Array:
    """True where the bounds allow that a query sees a key."""
    needed = (
        (k.position[0] <= q.position[1])
        & (k.segment[0] <= q.segment[1])
        & (q.segment[0] <= k.last_segment[1])
    )
    return needed & (q.position[0] - window < k.position[1]) if window else needed


def block_ranges(
    needed_Bnm: Bool[Array, "B n m"], full_Bnm: Bool[Array, "B n m"]
) -> Int[Array, "B n 4"]:
    """(first, full_first, full_last, last): the blocks along m that each block along n visits.

    [first, last) contains every needed block, [full_first, full_last) only full ones; the four are
    in ascending order. Transpose the tables for the blocks of queries that each block of keys
    visits. A block that needs none has first = last = 0.
    """
    m = needed_Bnm.shape[2]
    any_needed = needed_Bnm.any(2)
    first = jnp.where(any_needed, jnp.argmax(needed_Bnm, axis=2), 0)
    # A contiguous range costs four scalars a block; the unneeded blocks inside it are masked.
    last = jnp.where(any_needed, m - jnp.argmax(needed_Bnm[:, :, ::-1], axis=2), 0)
    block_ids = jnp.arange(m)[None, None, :]
    full_first = jnp.where(full_Bnm.any(2), jnp.argmax(full_Bnm, axis=2), last)
    is_after_run = ~full_Bnm & (block_ids >= full_first[:, :, None])
    full_last = jnp.where(is_after_run.any(2), jnp.argmax(is_after_run, axis=2), m)
    full_last = jnp.where(full_Bnm.any(2), full_last, last)
    return jnp.stack([first, full_first, full_last, last], axis=2).astype(jnp.int32)
