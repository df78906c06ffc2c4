# SPDX-License-Identifier: Apache-2.0
"""Gather one tensor on the host and convert it to the checkpoint's layout, for an export.

Rows are converted in chunks that fit in a core's cache, so that the next pass (a checksum, a
write) reads them from there. numpy copies bfloat16 element by element, so arrays are viewed as
integers. Next: jaxmoe/checkpoint/hf.py walks the table of parameters.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.model.params import Layout
from jaxmoe.shapes import Leaf
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4
from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense as decode_on_device

CHUNK_BYTES = 1 << 21
_ALIGNMENT_BYTES = 64  # bytes
_BLOCK_COLUMNS = 128  # transposed at a time: their source and target fit in a core's cache


def gather_leaf(leaf: Leaf, index: int | None, *, receives: bool = True) -> np.ndarray:
    """A leaf, or one layer of it, unsharded in host memory.

    Returns a view if one CPU device or numpy holds the tensor, else a copy. With several
    processes, a collective operation: all must call it for the same tensors in the same order.
    receives: False for a process that takes part and gets an empty array.
    """
    if isinstance(leaf, np.ndarray):
        return leaf if index is None else leaf[index]
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        part = leaf if index is None else leaf[index]
        full = jax.device_put(part, NamedSharding(leaf.sharding.mesh, PartitionSpec()))
        return np.asarray(full.addressable_data(0)) if receives else np.empty(0, full.dtype)
    shards = leaf.addressable_shards
    shards = shards[:1] if leaf.is_fully_replicated else [s for s in shards if s.replica_id == 0]
    if len(shards) == 1:
        return copy_shard_to_host(shards[0].data, index)
    full = np.empty(leaf.shape if index is None else leaf.shape[1:], leaf.dtype)
    for shard in shards:
        if index is None:
            full[shard.index] = copy_shard_to_host(shard.data, None)
            continue
        first, *other_axes = shard.index
        layers_of_shard = range(leaf.shape[0])[first]
        if index in layers_of_shard:
            full[tuple(other_axes)] = copy_shard_to_host(shard.data, layers_of_shard.index(index))
    return full


def copy_shard_to_host(data: jax.Array, index: int | None) -> np.ndarray:
    """A host array of one device's shard.

    jax caches the host copy of an array inside it. To free that copy with the result, this copies
    the shard on the device first.
    """
    (device,) = data.devices()
    # The host copy is the array's own memory, so there is nothing to free.
    if device.platform == "cpu":
        array = np.asarray(data)
        return array if index is None else array[index]
    return np.asarray(jnp.array(data, copy=True) if index is None else data[index])


def zeros_to_share(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros at an aligned address, which `jax.device_put` on a CPU adopts without a copy."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    pages = np.zeros(nbytes + _ALIGNMENT_BYTES, np.uint8)
    begin = -pages.ctypes.data % _ALIGNMENT_BYTES
    return pages[begin : begin + nbytes].view(dtype).reshape(shape)


def row_chunks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) row of each chunk of a tensor flattened to [rows, last dimension].

    All chunks but the last have a multiple of eight rows, hence of eight bytes.
    """
    rows, width = flat_shape(shape)
    step = max(8, CHUNK_BYTES // (width * itemsize) // 8 * 8)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def flat_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    *rows, width = shape if len(shape) > 1 else (*shape, 1)
    return math.prod(rows), width


def checkpoint_rows(
    param: np.ndarray,
    layout: Layout,
    span: tuple[int, int],
    shape: tuple[int, ...],
    dtype: np.dtype,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Rows span[0]…span[1] − 1 of a checkpoint's tensor, flattened to [rows, width].

    param: the parameter in our layout. shape: the checkpoint's shape.
    Written to `out` if given; else a view of `param` if layout and dtype are the same.
    Numerics: float32 to bfloat16 rounds to nearest, even.
    """
    start, stop = span
    width = flat_shape(shape)[1]
    transposed = layout in ("transpose", "transpose_pad")
    rows = param[:, start:stop] if transposed else param.reshape(-1, width)[start:stop]
    moved = transposed or layout in ("gate_up", "gate_up_bias")
    # Convert in a sequential pass first: the transposition then reads from the cache.
    rows = rows.astype(dtype, copy=moved)
    if out is None and not moved:
        return rows
    out = np.empty((stop - start, width), dtype) if out is None else out
    move = _transpose_columns if transposed else _interleave_halves if moved else _copy_rows
    move(_view_bits(rows), _view_bits(out))
    return out


def checkpoint_tensor(
    param: np.ndarray, layout: Layout, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """The full tensor in the checkpoint's layout, as a new array."""
    flat = np.empty(flat_shape(shape), dtype)
    for start, stop in row_chunks(shape, flat.itemsize):
        checkpoint_rows(param, layout, (start, stop), shape, dtype, flat[start:stop])
    return flat.reshape(shape)


def device_tensor(
    leaf: Leaf,
    index: int | None,
    layout: Layout,
    shape: tuple[int, ...],
    dtype: str,
    device: Any,
) -> jax.Array:
    """The full tensor in the checkpoint's layout on one device, which needs room for two copies.

    Packed experts are decoded on the device. With several processes, a collective operation.
    """
    if isinstance(leaf, Mxfp4):
        parts = (part if index is None else part[index] for part in leaf.codes)
        leaf, index = decode_on_device(jax.device_put(Mxfp4(*parts), device), dtype), None
    if isinstance(leaf, np.ndarray) or not leaf.is_fully_addressable:
        array = jax.device_put(gather_leaf(leaf, index), device)
    else:
        array = jax.device_put(leaf if index is None else leaf[index], device)
    array = array.astype(dtype)
    if layout in ("transpose", "transpose_pad"):
        array = array.T
    if layout in ("gate_up", "gate_up_bias"):
        half = array.shape[-1] // 2
        array = jnp.stack([array[..., :half], array[..., half:]], -1)
        return array.reshape(shape)
    return array[: shape[0]]


def _view_bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.itemsize}"))


def _copy_rows(rows: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, rows)


def _transpose_columns(columns: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, len(columns), _BLOCK_COLUMNS):
        out[:, i : i + _BLOCK_COLUMNS] = columns[i : i + _BLOCK_COLUMNS].T


def _interleave_halves(halves: np.ndarray, out: np.ndarray) -> None:
    """Convert [gate | up] to gate, up, gate, up, ….

    Gate values are written as double-width words; up values then overwrite the upper halves.
    """
    half = halves.shape[1] // 2
    wide = np.dtype(f"<u{2 * out.itemsize}")
    np.copyto(out.view(wide), halves[:, :half])
    out[:, 1::2] = halves[:, half:]
