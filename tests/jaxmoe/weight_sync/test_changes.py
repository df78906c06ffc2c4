# SPDX-License-Identifier: Apache-2.0
"""Blocks of changed values: they give the new bytes, or say that they are damaged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.weight_sync.changes import apply_block, encode_block


def random_block(seed, n_words, itemsize, frac):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, n_words * itemsize, np.uint8)
    new = old.copy()
    rows = rng.random(n_words) < frac
    new.reshape(n_words, itemsize)[rows] = rng.integers(0, 256, (rows.sum(), itemsize), np.uint8)
    return old, new


@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]),
)
def test_applied_changes_give_the_new_bytes(seed, n_words, itemsize, frac):
    old, new = random_block(seed, n_words, itemsize, frac)
    mask, changed = encode_block(old, new, itemsize)
    assert len(mask) + changed.size <= new.size
    if changed.size:
        apply_block(old, mask, changed.copy(), itemsize)
    np.testing.assert_array_equal(old, new)


def test_equal_blocks_need_no_bytes():
    old, _ = random_block(0, 1001, 2, 0.0)
    mask, changed = encode_block(old, old.copy(), 2)
    assert mask == b"" and changed.size == 0


def test_few_changes_take_few_bytes():
    """One bfloat16 in fifty: the words, and the entropy of where they are."""
    old, new = random_block(3, 1 << 20, 2, 0.02)
    mask, changed = encode_block(old, new, 2)
    assert changed.size <= 0.021 * new.size
    assert len(mask) + changed.size < 0.04 * new.size


def test_damaged_bitmaps_and_words_are_refused():
    old, new = random_block(5, 4096, 2, 0.02)
    mask, changed = encode_block(old, new, 2)
    for bad_mask, bad_changed in (
        (mask[:-9], changed),
        (b"\x00" + mask[1:], changed),
        (encode_block(old[:4096], new[:4096], 2)[0], changed),
        (mask, changed[:-2]),
        (b"", changed),
    ):
        with pytest.raises(ValueError):
            apply_block(old.copy(), bad_mask, bad_changed, 2)
