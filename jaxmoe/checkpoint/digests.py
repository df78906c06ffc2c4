# SPDX-License-Identifier: Apache-2.0
"""A digest of every array of a checkpoint, since zstd, ocdbt and orbax do not detect flipped bits.

The digest is a sum over all elements of the full array. Each shard contributes its part, so
nothing is gathered, and a resume on another mesh can compare.
Next: jaxmoe/checkpoint/store.py saves digests with the arrays and compares them after a restore.
"""

import hashlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmoe.checkpoint.layouts import copy_shard_to_host
from jaxmoe.shapes import Leaf

_CHUNK_ELEMENTS = 1 << 16  # elements widened to 64 bits at a time: they fit in a core's cache


def array_digests(tree: Leaf) -> dict[str, str]:
    """16 hex digits for every array, by its path in the tree.

    Σ (2i+1)·w_i modulo 2^64, where w_i are the bits of element i of the full array in C order.
    Any flip of one bit changes it, and any flip of two bits in an array of up to 2^30 elements of
    32 bits; other damage is missed with a probability of about 2^-64. Numerics: exact. With
    several processes, a collective operation.
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(lambda item: _sum_local_shards(item[1]), flat))
    # Sent as 32-bit halves, because jax may have 64-bit types disabled.
    if jax.process_count() > 1:
        halves = np.array([divmod(part, 2**32) for part in parts], np.uint32)
        everywhere = multihost_utils.process_allgather(halves)
        parts = [
            sum(int(hi) * 2**32 + int(lo) for hi, lo in sums_of_processes)
            for sums_of_processes in np.moveaxis(everywhere, 0, 1)
        ]
    return {name: f"{part % 2**64:016x}" for name, part in zip(names, parts, strict=True)}


def json_digest(value: Any) -> str:
    """32 hex digits of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sum_local_shards(leaf: Leaf) -> int:
    if isinstance(leaf, np.ndarray):
        return partial_digest(leaf, (0,) * leaf.ndim, leaf.shape)
    total = 0
    for shard in leaf.addressable_shards:
        # One copy of each shard, over all processes.
        if shard.replica_id == 0:
            start = tuple(index.start or 0 for index in shard.index)
            total += partial_digest(copy_shard_to_host(shard.data, None), start, leaf.shape)
    return total % 2**64


def partial_digest(part: np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The part of `array_digests` that a box `part` of an array contributes, not reduced to hex.

    start: index of the box's first element in the full array. shape: shape of the full array.
    With i = base_r + c, sums over rows and over columns are enough, and those are fast.
    """
    bits = np.ascontiguousarray(part).view(np.dtype(f"u{part.itemsize}"))
    rows_RC = bits.reshape(math.prod(part.shape[:-1]), part.shape[-1] if part.ndim else 1)
    bases_R = np.zeros((1,), np.uint64)
    for first_index, size, stride in zip(
        start[:-1], part.shape[:-1], _row_strides(shape), strict=False
    ):
        steps = np.arange(first_index, first_index + size, dtype=np.uint64) * np.uint64(stride)
        bases_R = np.add.outer(bases_R, steps).reshape(-1)
    rows, columns = rows_RC.shape
    width = max(1, min(columns, _CHUNK_ELEMENTS))
    step = max(1, _CHUNK_ELEMENTS // width)
    words = np.empty((min(step, rows), width), np.uint64)
    sums_R, weighted_sum = np.zeros(rows, np.uint64), 0
    for first_column in range(0, columns, width):
        sums_C = np.zeros(min(width, columns - first_column), np.uint64)
        for top in range(0, rows, step):
            chunk = rows_RC[top : top + step, first_column : first_column + width]
            chunk_words = words[: chunk.shape[0], : chunk.shape[1]]
            chunk_words[...] = chunk
            sums_R[top : top + step] += np.add.reduce(chunk_words, axis=1)
            sums_C += np.add.reduce(chunk_words, axis=0)
        first = first_column + (start[-1] if start else 0)
        # uint64 wraps around, which is the sum modulo 2^64.
        weighted_sum += int(np.dot(sums_C, np.arange(first, first + len(sums_C), dtype=np.uint64)))
    weighted_sum += int(np.dot(sums_R, bases_R))
    # The factors 2i + 1 are odd, so that a flipped bit of any element changes the sum modulo 2^64.
    return (int(np.add.reduce(sums_R)) + 2 * weighted_sum) % 2**64


def _row_strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
