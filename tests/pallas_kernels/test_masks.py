# SPDX-License-Identifier: Apache-2.0
"""The predicate against its definition, pair by pair."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.masks import is_visible

LENGTH = 7  # one shape, so that the examples compile once
position = st.integers(-5, 12)
segment = st.integers(0, 2)


def row(element):
    return st.lists(element, min_size=LENGTH, max_size=LENGTH)


def visible(q_pos, k_pos, window, q_seg, k_seg):
    q_pos, q_seg = (jnp.asarray(x)[:, None] for x in (q_pos, q_seg))
    k_pos, k_seg = (jnp.asarray(x)[None, :] for x in (k_pos, k_seg))
    return np.asarray(is_visible(q_pos, k_pos, window, q_seg, k_seg))


@given(row(position), row(position), st.integers(0, 9), row(segment), row(segment))
def test_keys_are_visible_by_segment_order_window(q_pos, k_pos, window, q_seg, k_seg):
    actual = visible(q_pos, k_pos, window, q_seg, k_seg)
    for t in range(LENGTH):
        for s in range(LENGTH):
            distance = q_pos[t] - k_pos[s]
            in_window = distance >= 0 and (window == 0 or distance < window)
            assert actual[t, s] == (in_window and q_seg[t] == k_seg[s] and q_seg[t] != 0)


def test_a_key_is_visible_to_the_nodes_below():
    """Node 1 has the children 2 and 5; 3 and 4 are children of 2. Each has one key of its own."""
    parents, last = {1: 0, 2: 1, 3: 2, 4: 2, 5: 1}, np.array([5, 4, 3, 4, 5])
    nodes = np.arange(1, 6)
    place = np.array([0, 1, 2, 2, 1])
    queries = (jnp.asarray(x)[:, None] for x in (place, nodes))
    keys = (jnp.asarray(x)[None] for x in (place, nodes, last))
    (q_pos, q_seg), (k_pos, k_seg, k_last) = queries, keys
    actual = np.asarray(is_visible(q_pos, k_pos, 0, q_seg, k_seg, k_last))
    for query in nodes:
        ancestors = {query}
        while parents[min(ancestors)]:
            ancestors.add(parents[min(ancestors)])
        assert set(nodes[actual[query - 1]]) == ancestors
    padding = jnp.zeros_like(q_seg)
    assert not np.asarray(is_visible(q_pos, k_pos, 0, padding, padding[:, 0][None], k_last)).any()
