# SPDX-License-Identifier: Apache-2.0
"""Which key a query may read: THE predicate, used by the reference and by every kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

NOBODY = jnp.iinfo(jnp.int32).min  # a segment without queries


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
    back = q_positions - k_positions
    return back >= 0 if window == 0 else (back >= 0) & (back < window)
