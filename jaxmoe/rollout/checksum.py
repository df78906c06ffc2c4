# SPDX-License-Identifier: Apache-2.0
"""A checksum of a tensor's bytes that trainer and engine both compute; numpy alone.

It tells accidents apart (a tensor that is old, cut, torn or swapped), not forgeries, and costs
about as much as reading the bytes once.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 15  # words summed at once: 256 KiB stay in a core's cache
_ODD = 2 * np.arange(CHUNK, dtype=np.uint64) + np.uint64(1)


def digest(array: NDArray) -> str:
    """32 hex digits: Σ w_i and Σ (2i+1)·w_i modulo 2^64 over the array's little-endian words.

    The array is read in C order; its last word is filled up with zeros. Any change of one word
    changes the first sum, any swap of two unequal neighbours the second.
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = raw.size // 8 * 8
    tail = np.zeros(8, np.uint8)
    tail[: raw.size - whole] = raw[whole:]
    plain, weighted = 0, 0
    for start, words in _chunks(raw[:whole].view(np.uint64), tail.view(np.uint64)):
        total = int(np.add.reduce(words))
        plain += total
        weighted += 2 * start * total + int(np.dot(words, _ODD[: words.size]))
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"


def _chunks(words: NDArray[np.uint64], last: NDArray[np.uint64]):
    for start in range(0, words.size, CHUNK):
        yield start, words[start : start + CHUNK]
    yield words.size, last


def joined(pieces: Iterable[tuple[int, str]]) -> str:
    """The digest of an array from those of its pieces: (its first byte, its digest).

    Each piece but the last must hold a multiple of eight bytes.
    """
    plain, weighted = 0, 0
    for start, hexes in pieces:
        total = int(hexes[:16], 16)
        plain += total
        weighted += int(hexes[16:], 16) + start // 4 * total
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"
