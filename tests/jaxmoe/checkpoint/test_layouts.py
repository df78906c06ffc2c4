# SPDX-License-Identifier: Apache-2.0
"""Tensors on their way out, in pieces. What they hold is tested where they are published."""

from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.checkpoint import layouts


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from([2, 4]))
def test_pieces_cover_a_tensor_once_at_word_boundaries(shape, itemsize):
    rows, width = layouts.flat_shape(tuple(shape))
    spans = list(layouts.row_chunks(tuple(shape), itemsize))
    assert [s for s, _ in spans] == [0, *(e for _, e in spans[:-1])] and spans[-1][1] == rows
    assert all(start * width * itemsize % 8 == 0 for start, _ in spans)
