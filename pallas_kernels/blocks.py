# SPDX-License-Identifier: Apache-2.0
"""The blocks of keys that each block of queries needs, computed from positions and segments.

Thus causal, windowed, packed, padded and cached layouts all skip blocks without a visible pair,
and only the sizes are static. A block is full if all its pairs are visible: it needs no mask.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.masks import Layout


def block_table(
    layout: Layout, q_block: int, k_block: int, window: int
) -> tuple[Bool[Array, "B n m"], Bool[Array, "B n m"]]:
    """(needed, full) for every pair of blocks; lengths must be multiples of their block.

    needed: the bounds of positions and segments allow a visible pair. False is exact; True may
        be a false alarm.
    full: every pair is visible, so the block needs no mask. True is exact; False may not be.
    """
    big = jnp.iinfo(jnp.int32).max

    def block_bounds(x: Array, seg: Array, size: int) -> tuple[Array, Array]:
        x, real = (y.reshape(y.shape[0], y.shape[1] // size, size) for y in (x, seg > 0))
        # blocks of padding get empty bounds (low = big, high = −big), which overlap no others
        return jnp.where(real, x, big).min(2), jnp.where(real, x, -big).max(2)

    q = layout.q_positions_BT, layout.q_segment_ids_BT, q_block
    k = layout.k_positions_BS, layout.k_segment_ids_BS, k_block
    q_lo, q_hi = (x[:, :, None] for x in block_bounds(*q))
    k_lo, k_hi = (x[:, None, :] for x in block_bounds(*k))
    qs_lo, qs_hi = (x[:, :, None] for x in block_bounds(q[1], *q[1:]))
    ks_lo, ks_max = (x[:, None, :] for x in block_bounds(k[1], *k[1:]))
    # The last segments that see the keys; without shared keys they are the keys' own.
    last = k[1] if layout.k_last_segment_ids_BS is None else layout.k_last_segment_ids_BS
    last_min, ks_hi = (x[:, None, :] for x in block_bounds(last, *k[1:]))
    # Bounds of whole blocks cost one comparison a pair of blocks, where the exact test would cost
    # one a pair of tokens.
    needed = (k_lo <= q_hi) & (ks_lo <= qs_hi) & (qs_lo <= ks_hi)
    uniform = (ks_max <= qs_lo) & (qs_hi <= last_min) & (k_hi <= q_lo)
    if window:
        needed &= q_lo - window < k_hi
        uniform &= q_hi - k_lo < window
    q_real, k_real = (
        (seg > 0).reshape(seg.shape[0], seg.shape[1] // size, size).all(2)
        for _, seg, size in (q, k)
    )
    return needed, uniform & q_real[:, :, None] & k_real[:, None, :]


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
