# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: headers checked without reading data, rows read and shards streamed.

A file is eight bytes of length, a JSON header, and the tensors' bytes. It is read and written
here, without the library, since numpy has no bfloat16 there and a shard must not be held whole.
Next: jaxmoe/checkpoint/hf.py says which tensors a model has.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxmoe.config import ConfigError

Planned = tuple[str, str, tuple[int, ...]]  # name, dtype as the format spells it, shape

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
}
FLOATS = ("BF16", "F16", "F32")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies on disk."""

    path: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def find_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a folder's model.safetensors or indexed shards, from the headers.

    Raises ConfigError for a missing or truncated file, or an index that its shards contradict.
    """
    index = directory / INDEX
    if not index.is_file():
        return _read_header(directory / SINGLE)
    try:
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{index} must be JSON with a weight_map; {error}.") from error
    found: dict[str, Stored] = {}
    for shard in sorted(set(where.values())):
        if Path(shard).name != shard:
            raise ConfigError(f"{index} must name files beside it, got {shard!r}.")
        for name, tensor in _read_header(directory / shard).items():
            if where.get(name) != shard:
                raise ConfigError(f"{index} must list every tensor; {shard} also holds {name}.")
            found[name] = tensor
    lost = sorted(set(where) - set(found))
    if lost:
        raise ConfigError(f"{directory / where[lost[0]]} must hold {lost[0]}, as {INDEX} says.")
    return found


def _read_header(path: Path) -> dict[str, Stored]:
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: a checkpoint holds {SINGLE}, or {INDEX} and its shards. "
            "Fetch it, or point init.checkpoint at another directory."
        )
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            raise ConfigError(_truncated(path, 8 + length, size))
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ConfigError(f"{path} must be a safetensors file; {error}.") from error
    header.pop("__metadata__", None)
    first, end, found = 8 + length, 8 + length, {}
    for name, entry in header.items():
        begin, stop = entry["data_offsets"]
        end = max(end, first + stop)
        if entry["dtype"] not in DTYPES:
            raise ConfigError(mistyped(path, name, entry["dtype"], FLOATS))
        found[name] = Stored(path, entry["dtype"], tuple(entry["shape"]), first + begin)
        if found[name].nbytes != stop - begin:
            raise ConfigError(
                f"{path}: {name} must have {found[name].nbytes} bytes, got {stop - begin}; the "
                "header is damaged. Fetch it again."
            )
    if end != size:
        raise ConfigError(_truncated(path, end, size))
    return found


def _truncated(path: Path, want: int, size: int) -> str:
    return f"{path} must have {want} bytes by its header, got {size}: truncated? Fetch it again."


def mistyped(where: Path, name: str, got: str, want: tuple[str, ...]) -> str:
    return f"{where}: {name} must be {' or '.join(want)}, got {got}."


def read_rows(tensor: Stored, rows: int) -> Iterator[tuple[int, np.ndarray]]:
    dtype, width = DTYPES[tensor.dtype], math.prod(tensor.shape[1:])
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        for start in range(0, tensor.shape[0], rows):
            shape = (min(rows, tensor.shape[0] - start), *tensor.shape[1:])
            raw = np.fromfile(file, np.uint8, shape[0] * width * dtype.itemsize)
            yield start, raw.view(dtype).reshape(shape)


def plan_shards(planned: list[Planned], limit: int) -> list[list[Planned]]:
    """Tensors in order, cut where the next one would pass the limit."""
    shards, filled = list[list[Planned]](), 0
    for item in planned:
        nbytes = planned_bytes(item)
        if not shards or filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += nbytes
    return shards


def planned_bytes(item: Planned) -> int:
    return math.prod(item[2]) * DTYPES[item[1]].itemsize


def header(planned: list[Planned]) -> bytes:
    """What stands before the tensors' bytes, which follow in this order without gaps."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in planned:
        begin, end = end, end + planned_bytes(item)
        entries[item[0]] = {"dtype": item[1], "shape": item[2], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    path: Path, planned: list[Planned], stream: Iterator[tuple[str, np.ndarray]]
) -> int:
    """Header first, then the tensors as they come; returns their bytes."""
    with open(path, "wb") as file:
        file.write(header(planned))
        for (name, dtype, shape), (got, array) in zip(planned, stream, strict=False):
            if (got, array.shape, array.dtype) != (name, shape, DTYPES[dtype]):
                raise RuntimeError(f"export planned {name} {shape}, made {got} {array.shape}")
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
    return sum(map(planned_bytes, planned))
