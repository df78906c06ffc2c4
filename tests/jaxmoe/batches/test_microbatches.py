# SPDX-License-Identifier: Apache-2.0
"""Packing: where each sequence goes. That updates do not depend on it is in test_update.py."""

import pytest

from jaxmoe.batches.microbatches import pack_sequences

T = 12
LENGTHS = [12, 9, 6, 11, 7, 5, 12, 8]


def test_packing_puts_every_sequence_somewhere_of_its_own():
    packing = pack_sequences(LENGTHS, length=T, rows=2)
    used_places = set()
    for piece, begin, length in zip(packing.microbatch_B, packing.start_B, LENGTHS, strict=True):
        assert begin // T == (begin + length - 1) // T  # inside one row
        places = {(int(piece), int(begin) + i) for i in range(length)}
        assert not places & used_places and max(p for _, p in places) < 2 * T
        used_places |= places
    assert int(packing.count) == max(packing.microbatch_B) + 1 == 4  # 70 tokens in 7 rows of 12
    with pytest.raises(ValueError, match="a row holds 12 tokens, sequence 1 has 13"):
        pack_sequences([3, 13], length=12, rows=1)
