# SPDX-License-Identifier: Apache-2.0
"""A checksum of a tensor's bytes that trainer and engine both compute; numpy alone.

It tells accidents apart (a tensor that is old, cut, torn or swapped), not forgeries, and costs
about as much as reading the bytes once.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

ROW, ROWS = 1024, 256  # words summed at once: 2 MiB, as large as a piece of a tensor
_ODD = 2 * np.arange(ROW, dtype=np.uint64) + np.uint64(1)
_DOWN = 2 * ROW * np.arange(ROWS, dtype=np.uint64)


def digest(array: NDArray) -> str:
    """32 hex digits: Σ w_i and Σ (2i+1)·w_i modulo 2^64 over the array's little-endian words.

    The array is read in C order; its last word is filled up with zeros. Any change of one word
    changes the first sum, a swap of two neighbours the second. Not seen: changes of the highest
    bit alone in an even number of words (signs of every second float32, say). Numerics: exact.
    With i = 1024·r + c the second sum needs the sums of rows and columns only, which are fast.
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    size = 8 * ROW
    whole = raw.size // size * size
    parts = [raw[at : min(at + ROWS * size, whole)] for at in range(0, whole, ROWS * size)]
    if whole < raw.size:
        parts.append(np.zeros(size, np.uint8))
        parts[-1][: raw.size - whole] = raw[whole:]
    plain, weighted, start = 0, 0, 0
    for part in parts:
        total, moment = _sums(part.view(np.uint64).reshape(-1, ROW))
        plain += total
        weighted += moment + start // 4 * total
        start += part.size
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"


def _sums(words_RC: NDArray[np.uint64]) -> tuple[int, int]:
    """Σ w and Σ (2·(1024·r + c) + 1)·w."""
    rows_R, columns_C = np.add.reduce(words_RC, axis=1), np.add.reduce(words_RC, axis=0)
    weighted = int(np.dot(columns_C, _ODD)) + int(np.dot(rows_R, _DOWN[: len(rows_R)]))
    return int(np.add.reduce(rows_R)), weighted


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
