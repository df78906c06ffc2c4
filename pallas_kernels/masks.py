# SPDX-License-Identifier: Apache-2.0
"""Which key a query may read: THE predicate, used by the reference and by every kernel."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NOBODY = jnp.iinfo(jnp.int32).min  # a segment without queries


class Layout(NamedTuple):
    """Where queries and keys sit: their positions, and the segments they belong to (0: padding)."""

    q_positions_BT: Int[Array, "B T"]
    k_positions_BS: Int[Array, "B S"]
    q_segment_ids_BT: Int[Array, "B T"]
    k_segment_ids_BS: Int[Array, "B S"]

    def padded(self, queries: int, keys: int) -> "Layout":
        """With so many more queries and keys, all of them padding."""

        def pad(x: Array, more: int) -> Array:
            return jnp.pad(x, ((0, 0), (0, more)))

        q_pos, k_pos, q_seg, k_seg = self
        return Layout(pad(q_pos, queries), pad(k_pos, keys), pad(q_seg, queries), pad(k_seg, keys))

    def folded(self, heads: int) -> "Layout":
        """Each query once for each of so many heads, side by side."""
        q_pos, q_seg = (
            jnp.repeat(x, heads, axis=1) for x in (self.q_positions_BT, self.q_segment_ids_BT)
        )
        return self._replace(q_positions_BT=q_pos, q_segment_ids_BT=q_seg)

    def visible(self, window: int) -> Bool[Array, "B T S"]:
        """`visible` of every query and every key."""
        q_pos, k_pos, q_seg, k_seg = self
        return visible(
            q_pos[:, :, None], k_pos[:, None, :], window, q_seg[:, :, None], k_seg[:, None, :]
        )


def visible(
    q_positions: Int[Array, "*q"],
    k_positions: Int[Array, "*k"],
    window: int,
    q_segments: Int[Array, "*q"],
    k_segments: Int[Array, "*k"],
) -> Bool[Array, "*s"]:
    """True where a query reads a key; the arguments broadcast against each other.

    Same segment, not padding (segment 0), not later, and within the window: the window counts
    keys, the query's own included, so 128 means 128; 0 means no window.
    """
    return (q_segments == of_keys(k_segments)) & in_reach(q_positions, k_positions, window)


def of_keys(k_segments: Int[Array, "*k"]) -> Int[Array, "*k"]:
    """Their segments, padding's being one that no query is in: what depends on keys alone."""
    return jnp.where(k_segments > 0, k_segments, NOBODY)


def in_reach(
    q_positions: Int[Array, "*q"], k_positions: Int[Array, "*k"], window: int
) -> Bool[Array, "*s"]:
    """True where a key is neither later than the query nor out of its window."""
    if window == 0:
        return k_positions <= q_positions
    back = q_positions - k_positions
    return (back >= 0) & (back < window)  # which compilers make one comparison without sign
