# SPDX-License-Identifier: Apache-2.0
"""Which blocks of keys a block of queries needs, computed from positions and segments.

So causal, windowed, packed, padded and cached layouts all skip what nobody sees, and nothing is
static but the sizes. Blocks that are seen whole need no mask.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.masks import Layout


def block_table(
    layout: Layout, q_block: int, k_block: int, window: int
) -> tuple[Bool[Array, "B n m"], Bool[Array, "B n m"]]:
    """(needed, whole) for every pair of blocks; lengths must be multiples of their block.

    needed: bounds of positions and segments allow a visible pair. False is certain, True is not.
    whole: every pair is visible, so the block needs no mask. True is certain, False is not.
    """
    big = jnp.iinfo(jnp.int32).max

    def bounds(x: Array, seg: Array, size: int) -> tuple[Array, Array]:
        x, real = (y.reshape(y.shape[0], y.shape[1] // size, size) for y in (x, seg > 0))
        # blocks of padding get empty bounds (low = big, high = −big), which meet no others
        return jnp.where(real, x, big).min(2), jnp.where(real, x, -big).max(2)

    q = layout.q_positions_BT, layout.q_segment_ids_BT, q_block
    k = layout.k_positions_BS, layout.k_segment_ids_BS, k_block
    q_lo, q_hi = (x[:, :, None] for x in bounds(*q))
    k_lo, k_hi = (x[:, None, :] for x in bounds(*k))
    qs_lo, qs_hi = (x[:, :, None] for x in bounds(q[1], *q[1:]))
    ks_lo, ks_hi = (x[:, None, :] for x in bounds(k[1], *k[1:]))
    needed = (k_lo <= q_hi) & (ks_lo <= qs_hi) & (qs_lo <= ks_hi)
    one = (qs_lo == qs_hi) & (ks_lo == ks_hi) & (qs_lo == ks_lo) & (k_hi <= q_lo)
    if window:
        needed &= q_lo - window < k_hi
        one &= q_hi - k_lo < window
    q_real, k_real = (
        (seg > 0).reshape(seg.shape[0], seg.shape[1] // size, size).all(2)
        for _, seg, size in (q, k)
    )
    return needed, one & q_real[:, :, None] & k_real[:, None, :]


def runs(needed_Bnm: Bool[Array, "B n m"], whole_Bnm: Bool[Array, "B n m"]) -> Int[Array, "B n 4"]:
    """first ≤ whole_first ≤ whole_last ≤ last: the blocks along m that each block along n visits.

    [first, last) holds every needed block, [whole_first, whole_last) only whole ones. Transpose
    the tables for what each key block visits. A block without any has first = last = 0.
    """
    m = needed_Bnm.shape[2]
    some = needed_Bnm.any(2)
    first = jnp.where(some, jnp.argmax(needed_Bnm, axis=2), 0)
    last = jnp.where(some, m - jnp.argmax(needed_Bnm[:, :, ::-1], axis=2), 0)
    at = jnp.arange(m)[None, None, :]
    whole_first = jnp.where(whole_Bnm.any(2), jnp.argmax(whole_Bnm, axis=2), last)
    ends = ~whole_Bnm & (at >= whole_first[:, :, None])
    whole_last = jnp.where(ends.any(2), jnp.argmax(ends, axis=2), m)
    whole_last = jnp.where(whole_Bnm.any(2), whole_last, last)
    return jnp.stack([first, whole_first, whole_last, last], axis=2).astype(jnp.int32)
