# SPDX-License-Identifier: Apache-2.0
"""One tensor on its way out: gathered on the host, and turned into the checkpoint's rows.

Rows are made in pieces that stay in a core's cache, so that what follows (a checksum, a write)
reads them from there. numpy moves bfloat16 one call per element; hence the views as integers.
Next: jaxmoe/checkpoint/hf.py walks the table of parameters.
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

PIECE_BYTES = 1 << 21
_ALIGNED = 64  # bytes
_BLOCK = 128  # columns transposed at once: what they touch stays in a core's cache


def gather(leaf: Leaf, pair: int | None, *, here: bool = True) -> np.ndarray:
    """A leaf, or one layer pair of it, whole in host memory.

    A view where one CPU device or numpy holds it; else a copy of this one tensor. Over several
    processes it is a collective: all must ask for the same tensors in the same order, and a
    process that it is not to be `here` for takes part and gets nothing.
    """
    if isinstance(leaf, np.ndarray):
        return leaf if pair is None else leaf[pair]
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        part = leaf if pair is None else leaf[pair]
        whole = jax.device_put(part, NamedSharding(leaf.sharding.mesh, PartitionSpec()))
        return np.asarray(whole.addressable_data(0)) if here else np.empty(0, whole.dtype)
    shards = leaf.addressable_shards
    shards = shards[:1] if leaf.is_fully_replicated else [s for s in shards if s.replica_id == 0]
    if len(shards) == 1:
        return on_host(shards[0].data, pair)
    whole = np.empty(leaf.shape if pair is None else leaf.shape[1:], leaf.dtype)
    for shard in shards:
        if pair is None:
            whole[shard.index] = on_host(shard.data, None)
            continue
        first, *rest = shard.index
        held = range(leaf.shape[0])[first]
        if pair in held:
            whole[tuple(rest)] = on_host(shard.data, held.index(pair))
    return whole


def on_host(data: jax.Array, pair: int | None) -> np.ndarray:
    """Of one device. jax keeps the host copy with the array it is of, so that is a passing one."""
    (device,) = data.devices()
    if device.platform == "cpu":  # the host copy is the array's own memory
        array = np.asarray(data)
        return array if pair is None else array[pair]
    return np.asarray(jnp.array(data, copy=True) if pair is None else data[pair])


def zeros_to_share(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that `jax.device_put` takes for its own on a CPU: it copies what begins elsewhere."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    pages = np.zeros(nbytes + _ALIGNED, np.uint8)
    begin = -pages.ctypes.data % _ALIGNED
    return pages[begin : begin + nbytes].view(dtype).reshape(shape)


def row_pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of rows of the tensor flattened to [rows, last dimension].

    Each but the last holds a multiple of eight rows, hence of eight bytes.
    """
    rows, width = flat_shape(shape)
    step = max(8, PIECE_BYTES // (width * itemsize) // 8 * 8)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def flat_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    *rows, width = shape if len(shape) > 1 else (*shape, 1)
    return math.prod(rows), width


def checkpoint_rows(
    ours: np.ndarray, layout: Layout, span: tuple[int, int], shape: tuple[int, ...],
    dtype: np.dtype, out: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Rows first…last + 1 of the checkpoint's tensor of that shape, flattened: [rows, width].

    In `out` where it is given, else a view where nothing changes.
    Numerics: float32 to bfloat16 rounds to nearest, even.
    """
    start, stop = span
    width = flat_shape(shape)[1]
    transposed = layout in ("transpose", "transpose_pad")
    rows = ours[:, start:stop] if transposed else ours.reshape(-1, width)[start:stop]
    moved = transposed or layout in ("gate_up", "gate_up_bias")
    # one pass in order first: what is then moved about lies in the cache
    rows = rows.astype(dtype, copy=moved)
    if out is None and not moved:
        return rows
    out = np.empty((stop - start, width), dtype) if out is None else out
    move = _transpose if transposed else _interleave if moved else _copy
    move(_bits(rows), _bits(out))
    return out


def checkpoint_tensor(
    ours: np.ndarray, layout: Layout, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """All of a checkpoint's tensor, in memory of its own."""
    flat = np.empty(flat_shape(shape), dtype)
    for start, stop in row_pieces(shape, flat.itemsize):
        checkpoint_rows(ours, layout, (start, stop), shape, dtype, flat[start:stop])
    return flat.reshape(shape)


def device_tensor(
    leaf: Leaf, pair: int | None, layout: Layout, shape: tuple[int, ...], dtype: str,
    device: Any,
) -> jax.Array:  # fmt: skip
    """All of a checkpoint's tensor on one device, which holds a copy of it on the way.

    Packed experts are decoded there. Over several processes a collective, as `gather` is.
    """
    if isinstance(leaf, Mxfp4):
        parts = (part if pair is None else part[pair] for part in leaf)
        leaf, pair = decode_on_device(jax.device_put(Mxfp4(*parts), device), dtype), None
    if isinstance(leaf, np.ndarray) or not leaf.is_fully_addressable:
        ours = jax.device_put(gather(leaf, pair), device)
    else:
        ours = jax.device_put(leaf if pair is None else leaf[pair], device)
    ours = ours.astype(dtype)
    if layout in ("transpose", "transpose_pad"):
        ours = ours.T
    if layout in ("gate_up", "gate_up_bias"):
        half = ours.shape[-1] // 2
        ours = jnp.stack([ours[..., :half], ours[..., half:]], -1)
        return ours.reshape(shape)
    return ours[: shape[0]]


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.dtype(f"u{array.itemsize}"))


def _copy(rows: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, rows)


def _transpose(columns: np.ndarray, out: np.ndarray) -> None:
    for i in range(0, len(columns), _BLOCK):
        out[:, i : i + _BLOCK] = columns[i : i + _BLOCK].T


def _interleave(halves: np.ndarray, out: np.ndarray) -> None:
    """[gate | up] to gate, up, gate, up: the even ones in pairs with what is then overwritten."""
    half = halves.shape[1] // 2
    wide = np.dtype(f"<u{2 * out.itemsize}")
    np.copyto(out.view(wide), halves[:, :half])
    out[:, 1::2] = halves[:, half:]
