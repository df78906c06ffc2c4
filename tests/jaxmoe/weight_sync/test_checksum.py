# SPDX-License-Identifier: Apache-2.0
"""The digest is the sums that its docstring says, however they are added up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.weight_sync.checksum import (
    ROWS_PER_CHUNK,
    WORDS_PER_ROW,
    digest_array,
    join_digests,
)


def plainly(raw: bytes) -> str:
    raw += bytes(-len(raw) % 8)
    words = [int.from_bytes(raw[offset : offset + 8], "little") for offset in range(0, len(raw), 8)]
    sums = sum(words), sum((2 * i + 1) * word for i, word in enumerate(words))
    return "".join(f"{x % 2**64:016x}" for x in sums)


@pytest.mark.parametrize(
    "nbytes",
    [
        0,
        1,
        7,
        8,
        9,
        8 * WORDS_PER_ROW - 1,
        8 * WORDS_PER_ROW,
        8 * WORDS_PER_ROW + 3,
        24 * WORDS_PER_ROW + 8,
        8 * WORDS_PER_ROW * ROWS_PER_CHUNK,
        8 * WORDS_PER_ROW * (2 * ROWS_PER_CHUNK + 3) + 8_005,
    ],
)
def test_the_digest_is_two_sums_over_words(nbytes):
    raw = np.random.default_rng(nbytes).bytes(nbytes)
    assert digest_array(np.frombuffer(raw, np.uint8)) == plainly(raw)


def test_arrays_of_any_strides_have_c_order():
    array = np.random.default_rng(0).standard_normal((37, 58), np.float32)
    assert digest_array(array.T) == plainly(array.T.tobytes()) != digest_array(array)
    assert digest_array(array[:, ::3]) == plainly(array[:, ::3].tobytes())


@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 2**32))
def test_digests_of_pieces_give_the_arrays_digest(length, step, seed):
    array = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    cuts = range(0, max(length, 1), 8 * step)
    pieces = [(start, digest_array(array[start : start + 8 * step])) for start in cuts]
    assert join_digests(pieces) == digest_array(array)
    if len(pieces) > 1 and pieces[0][1] != pieces[1][1]:
        swapped = [(0, pieces[1][1]), (8 * step, pieces[0][1]), *pieces[2:]]
        assert join_digests(swapped) != digest_array(array)
