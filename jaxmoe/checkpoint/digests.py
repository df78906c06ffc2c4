# SPDX-License-Identifier: Apache-2.0
"""A digest of every array of a checkpoint: zstd, ocdbt and orbax pass on bits that flipped.

It is a sum over the elements of the whole array, so each shard gives its part, nothing is
gathered, and a resume on another mesh can compare.
Next: jaxmoe/checkpoint/store.py writes it beside the arrays and compares after a restore.
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

from jaxmoe.checkpoint.layouts import on_host
from jaxmoe.shapes import Leaf

_PIECE = 1 << 16  # elements widened at once: they stay in a core's cache


def array_digests(tree: Leaf) -> dict[str, str]:
    """16 hex digits for every array, by its path in the tree.

    Σ (2i+1)·w_i modulo 2^64, where w_i are the bits of element i of the whole array in C order.
    Every flip of one bit changes it, and of two in an array of up to 2^30 elements of 32 bits;
    other damage is missed once in about 2^64. Numerics: exact. Over several processes a
    collective.
    """
    flat = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(lambda item: _of_shards(item[1]), flat))
    if jax.process_count() > 1:  # as halves: jax may have no 64 bits
        halves = np.array([divmod(part, 2**32) for part in parts], np.uint32)
        everywhere = multihost_utils.process_allgather(halves)
        parts = [sum(int(hi) * 2**32 + int(lo) for hi, lo in every)
                 for every in np.moveaxis(everywhere, 0, 1)]  # fmt: skip
    return {name: f"{part % 2**64:016x}" for name, part in zip(names, parts, strict=True)}


def json_digest(value: Any) -> str:
    """32 hex digits of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _of_shards(leaf: Leaf) -> int:
    if isinstance(leaf, np.ndarray):
        return part_digest(leaf, (0,) * leaf.ndim, leaf.shape)
    total = 0
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:  # one copy of each shard, over all processes
            start = tuple(at.start or 0 for at in shard.index)
            total += part_digest(on_host(shard.data, None), start, leaf.shape)
    return total % 2**64


def part_digest(part: np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The summands of `array_digests` of a box of an array of that shape, which begins there.

    With i = base_r + c the sum needs those of rows and columns only, which are fast.
    """
    bits = np.ascontiguousarray(part).view(np.dtype(f"u{part.itemsize}"))
    rows_RC = bits.reshape(math.prod(part.shape[:-1]), part.shape[-1] if part.ndim else 1)
    bases_R = np.zeros((1,), np.uint64)
    for at, held, stride in zip(start[:-1], part.shape[:-1], _strides(shape), strict=False):
        steps = np.arange(at, at + held, dtype=np.uint64) * np.uint64(stride)
        bases_R = np.add.outer(bases_R, steps).reshape(-1)
    rows, columns = rows_RC.shape
    width = max(1, min(columns, _PIECE))
    step = max(1, _PIECE // width)
    words = np.empty((min(step, rows), width), np.uint64)
    sums_R, odd = np.zeros(rows, np.uint64), 0
    for left in range(0, columns, width):
        sums_C = np.zeros(min(width, columns - left), np.uint64)
        for top in range(0, rows, step):
            piece = rows_RC[top : top + step, left : left + width]
            here = words[: piece.shape[0], : piece.shape[1]]
            here[...] = piece
            sums_R[top : top + step] += np.add.reduce(here, axis=1)
            sums_C += np.add.reduce(here, axis=0)
        first = left + (start[-1] if start else 0)
        odd += int(np.dot(sums_C, np.arange(first, first + len(sums_C), dtype=np.uint64)))
    odd += int(np.dot(sums_R, bases_R))
    return (int(np.add.reduce(sums_R)) + 2 * odd) % 2**64


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
