# SPDX-License-Identifier: Apache-2.0
"""Which key a query may read: THE predicate, used by the reference and by every kernel."""

from jaxtyping import Array, Bool, Int


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
    seen = (q_segments == k_segments) & (k_segments > 0) & (k_positions <= q_positions)
    return seen if window == 0 else seen & (q_positions - k_positions < window)
