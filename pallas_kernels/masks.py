# SPDX-License-Identifier: Apache-2.0
"""The visibility predicate of attention, used by the reference and by every kernel."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

SHARED_KEYS_UNSUPPORTED = "it cannot share keys between segments (k_last_segment_ids_BS)"
PADDING_KEY_SEGMENT = jnp.iinfo(jnp.int32).min  # the segment of padding keys, which no query has


class Layout(NamedTuple):
    """Positions of queries and keys, and the segments to which they belong (0: padding).

    A key is seen by the segments from its own to `k_last_segment_ids_BS`; None: by its own alone.
    So several sequences can share the keys of one prompt. In general segments are the nodes of a
    tree, numbered in preorder, and the last one that sees a key is the last one below its node.
    """

    q_positions_BT: Int[Array, "B T"]
    k_positions_BS: Int[Array, "B S"]
    q_segment_ids_BT: Int[Array, "B T"]
    k_segment_ids_BS: Int[Array, "B S"]
    k_last_segment_ids_BS: Int[Array, "B S"] | None = None

    def with_padding(self, queries: int, keys: int) -> "Layout":
        """The layout with these numbers of padding queries and keys appended."""

        def pad_axis(x: Array, n_padding: int) -> Array:
            return jnp.pad(x, ((0, 0), (0, n_padding)))

        q_pos, k_pos, q_seg, k_seg, k_last = self
        return Layout(
            pad_axis(q_pos, queries),
            pad_axis(k_pos, keys),
            pad_axis(q_seg, queries),
            pad_axis(k_seg, keys),
            None if k_last is None else pad_axis(k_last, keys),
        )

    def unshared_arrays(self) -> tuple[Any, Any, Any, Any]:
        """The four arrays, for a kernel that does not know shared keys.

        Raises NotImplementedError if keys are shared: such a kernel would compute other numbers.
        """
        if self.k_last_segment_ids_BS is not None:
            raise NotImplementedError(f"{SHARED_KEYS_UNSUPPORTED}. Use impl='xla'.")
        return self[:4]

    def repeat_queries(self, heads: int) -> "Layout":
        """The layout with each query repeated `heads` times, next to each other."""
        q_pos, q_seg = (
            jnp.repeat(x, heads, axis=1) for x in (self.q_positions_BT, self.q_segment_ids_BT)
        )
        return self._replace(q_positions_BT=q_pos, q_segment_ids_BT=q_seg)

    def visible_mask(self, window: int) -> Bool[Array, "B T S"]:
        """The predicate for every query (axis 1) and every key (axis 2)."""
        q_pos, k_pos, q_seg, k_seg, k_last = self
        return is_visible(
            q_pos[:, :, None],
            k_pos[:, None, :],
            window,
            q_seg[:, :, None],
            k_seg[:, None, :],
            None if k_last is None else k_last[:, None, :],
        )


def is_visible(
    q_positions: Int[Array, "*q"],
    k_positions: Int[Array, "*k"],
    window: int,
    q_segments: Int[Array, "*q"],
    k_segments: Int[Array, "*k"],
    k_last_segments: Int[Array, "*last"] | None = None,
) -> Bool[Array, "*s"]:
    """True where a query reads a key; the arguments broadcast against each other.

    Same segment, not padding (segment 0), not later, and within the window: the window counts
    positions, the query's own included, so 128 means 128; 0 means no window. With
    `k_last_segments` a key is seen by all segments from its own to that one.
    """
    in_window = is_in_window(q_positions, k_positions, window)
    if k_last_segments is None:
        return (q_segments == mark_key_padding(k_segments)) & in_window
    # No query's segment is as low as the last one that sees padding. This depends on keys alone.
    k_last_segments = jnp.where(k_segments > 0, k_last_segments, PADDING_KEY_SEGMENT)
    return (k_segments <= q_segments) & (q_segments <= k_last_segments) & in_window


def mark_key_padding(k_segments: Int[Array, "*k"]) -> Int[Array, "*k"]:
    """Segments of keys, with padding's 0 replaced by a segment that no query has.

    It depends on keys alone, so kernels compute it once for all queries.
    """
    return jnp.where(k_segments > 0, k_segments, PADDING_KEY_SEGMENT)


def is_in_window(
    q_positions: Int[Array, "*q"], k_positions: Int[Array, "*k"], window: int
) -> Bool[Array, "*s"]:
    """True where a key is neither later than the query nor outside its window."""
    if window == 0:
        return k_positions <= q_positions
    distance = q_positions - k_positions
    return (distance >= 0) & (distance < window)  # compilers turn this into one unsigned comparison
