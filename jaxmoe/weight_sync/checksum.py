# SPDX-License-Identifier: Apache-2.0
"""A checksum of a tensor's bytes that trainer and engine both compute, with numpy alone.

It detects accidents (a tensor that is stale, truncated, torn or swapped), not forgeries. It costs
about as much as reading the bytes once.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

WORDS_PER_ROW, ROWS_PER_CHUNK = (1024, 256)  # words summed at once: 2 MiB, one chunk of a tensor
# Odd weights are invertible modulo 2^64, so a change of one word changes the second sum too.
_COLUMN_WEIGHTS = 2 * np.arange(WORDS_PER_ROW, dtype=np.uint64) + np.uint64(1)
_ROW_OFFSETS = 2 * WORDS_PER_ROW * np.arange(ROWS_PER_CHUNK, dtype=np.uint64)


def digest_array(array: NDArray) -> str:
    """Return 32 hex digits: Σ w_i and Σ (2i+1)·w_i modulo 2^64 over little-endian words.

    The array is read in C order, and its last word is padded with zeros. Any change of one word
    changes the first sum; swapping two neighbours changes the second. Not detected: changes of only
    the highest bit in an even number of words (for example the signs of every second float32).
    Numerics: exact. With i = 1024·r + c the second sum needs only the sums of rows and columns,
    which are fast.
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    row_bytes = 8 * WORDS_PER_ROW
    n_full_bytes = raw.size // row_bytes * row_bytes
    parts = [
        raw[start_byte : min(start_byte + ROWS_PER_CHUNK * row_bytes, n_full_bytes)]
        for start_byte in range(0, n_full_bytes, ROWS_PER_CHUNK * row_bytes)
    ]
    if n_full_bytes < raw.size:
        parts.append(np.zeros(row_bytes, np.uint8))
        parts[-1][: raw.size - n_full_bytes] = raw[n_full_bytes:]
    plain, weighted, offset = 0, 0, 0
    for part in parts:
        total, moment = _sum_words(part.view(np.uint64).reshape(-1, WORDS_PER_ROW))
        plain += total
        # A word's index grows by offset / 8, and its weight, 2i + 1, by twice that.
        weighted += moment + offset // 4 * total
        offset += part.size
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"


def _sum_words(words_RC: NDArray[np.uint64]) -> tuple[int, int]:
    """Return Σ w and Σ (2·(1024·r + c) + 1)·w."""
    # Sums of uint64 wrap, as arithmetic modulo 2^64 does.
    rows_R, columns_C = np.add.reduce(words_RC, axis=1), np.add.reduce(words_RC, axis=0)
    weighted = int(np.dot(columns_C, _COLUMN_WEIGHTS)) + int(
        np.dot(rows_R, _ROW_OFFSETS[: len(rows_R)])
    )
    return int(np.add.reduce(rows_R)), weighted


def join_digests(chunks: Iterable[tuple[int, str]]) -> str:
    """Return an array's digest from those of its chunks: (first byte of a chunk, its digest).

    Each chunk but the last must have a multiple of eight bytes.
    """
    plain, weighted = 0, 0
    for start, hexes in chunks:
        total = int(hexes[:16], 16)
        plain += total
        weighted += int(hexes[16:], 16) + start // 4 * total
    return f"{plain % 2**64:016x}{weighted % 2**64:016x}"
