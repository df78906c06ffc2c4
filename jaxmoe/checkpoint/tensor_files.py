# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: headers checked without reading data, rows read and shards streamed.

A file is eight bytes of length, a JSON header, and the tensors' bytes. It is read and written
here, without the library, since numpy has no bfloat16 there and a shard must not be held whole.
The files that we write hold a digest of every tensor in their metadata, and a read compares.
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

from jaxmoe.checkpoint.digests import part_digest
from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json_object

Planned = tuple[str, str, tuple[int, ...]]  # name, dtype as the format spells it, shape

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
}
FLOATS = ("BF16", "F16", "F32")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DIGESTS = "digests"  # key of __metadata__: a JSON object of name and digest
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies on disk."""

    name: str
    path: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    digest: str | None  # `array_digests` of it as it lies there; None where the file says none

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def find_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of a folder's model.safetensors or indexed shards, from the headers.

    Raises ConfigError for a missing, truncated or malformed file, or an index that its shards
    contradict.
    """
    index = directory / INDEX
    if not index.is_file():
        return read_header(directory / SINGLE)
    try:
        where = parse_json_object(index.read_bytes())["weight_map"]
        if not isinstance(where, dict) or not all(isinstance(x, str) for x in where.values()):
            raise ValueError("weight_map must be an object of tensor names and file names")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{index} must be JSON with a weight_map; {error}. Fetch it again."
        ) from error
    if (directory / SINGLE).is_file() and set(where.values()) != {SINGLE}:
        raise ConfigError(
            f"{directory} must hold one set of weights; {SINGLE} and {INDEX} are two, and "
            f"transformers would read the first. Keep one of them: mv {directory / INDEX} "
            "elsewhere, with its shards, or the other."
        )
    found: dict[str, Stored] = {}
    for shard in sorted(set(where.values())):
        if Path(shard).name != shard or not shard.isprintable() or len(shard.encode()) > 255:
            raise ConfigError(f"{index} must name files beside it, got {shard!r:.80}.")
        for name, tensor in read_header(directory / shard).items():
            if where.get(name) != shard:
                raise ConfigError(f"{index} must list every tensor; {shard} also holds {name}.")
            found[name] = tensor
    lost = sorted(set(where) - set(found))
    if lost and not lost[0].isprintable():
        raise ConfigError(f"{index} must name tensors, got {lost[0]!r}. Fetch it again.")
    if lost:
        raise ConfigError(f"{directory / where[lost[0]]} must hold {lost[0]}, as {INDEX} says.")
    return found


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises ConfigError as `find_tensors` does."""
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: a checkpoint holds {SINGLE}, or {INDEX} and its shards. "
            "Fetch it, or point init.checkpoint at another directory."
        )
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ConfigError(_truncated(path, 8 + length, size))
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes is no header")
            head = parse_json_object(file.read(length))
        metadata = head.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError("__metadata__ must be an object")
        digests = parse_json_object(metadata.get(_DIGESTS, "{}"))
        found = {name: _stored(name, head[name], path, 8 + length, digests) for name in head}
        if digests and digests.keys() != head.keys():
            raise ValueError(f"digest without tensor: {(digests.keys() ^ head.keys()).pop()!r}")
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} must be a safetensors file; {error}. Fetch it again.") from error
    at = 8 + length
    for tensor in sorted(found.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != at:
            raise ConfigError(
                f"{path}: {tensor.name} must begin where the tensor before it ends (byte "
                f"{at - 8 - length}), got {tensor.offset - 8 - length}; the header is damaged. "
                "Fetch it again."
            )
        at += tensor.nbytes
    if at != size:
        raise ConfigError(_truncated(path, at, size))
    return found


def _stored(name: str, entry: Any, path: Path, first: int, digests: dict[str, str]) -> Stored:
    """A tensor's entry in a header, which may say anything."""
    if not name.isprintable():
        raise ValueError(f"{name!r} is no name")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ConfigError(mistyped(path, name, str(dtype), FLOATS))
    for what, value in ("shape", shape), ("data_offsets", offsets):
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise ValueError(f"{name}: {what} must be integers of 0 or more, got {value}")
    if len(offsets) != 2:
        raise ValueError(f"{name} must have two data_offsets, got {offsets}")
    stored = Stored(name, path, dtype, tuple(shape), first + offsets[0], digests.get(name))
    if stored.nbytes != offsets[1] - offsets[0]:
        raise ConfigError(
            f"{path}: {name} must have {stored.nbytes} bytes, got {offsets[1] - offsets[0]}; the "
            "header is damaged. Fetch it again."
        )
    return stored


def _truncated(path: Path, want: int, size: int) -> str:
    return f"{path} must have {want} bytes by its header, got {size}: truncated? Fetch it again."


def mistyped(where: Path, name: str, got: str, want: tuple[str, ...]) -> str:
    return f"{where}: {name} must be {' or '.join(want)}, got {got}."


def read_rows(tensor: Stored, rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, so many rows) of a tensor.

    Raises ConfigError at its end where it has not the digest that its file says.
    """
    dtype, width, found = DTYPES[tensor.dtype], math.prod(tensor.shape[1:]), 0
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        for start in range(0, tensor.shape[0], rows):
            shape = (min(rows, tensor.shape[0] - start), *tensor.shape[1:])
            raw = np.fromfile(file, np.uint8, shape[0] * width * dtype.itemsize)
            piece = raw.view(dtype).reshape(shape)
            if tensor.digest is not None:
                found += part_digest(piece, (start, *[0] * (len(shape) - 1)), tensor.shape)
            yield start, piece
    if tensor.digest is not None and tensor.digest != f"{found % 2**64:016x}":
        raise ConfigError(
            f"{tensor.path}: {tensor.name} has other bits than were written. Copy or export "
            "it again."
        )


def not_finite(array: np.ndarray) -> int:
    """How many values are NaN or infinite: the bits of their exponent are all ones."""
    ones = np.array(np.inf, array.dtype).view(f"u{array.itemsize}")
    bits = array.view(ones.dtype)
    return int(np.count_nonzero((bits & ones) == ones))


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


def header(planned: list[Planned], digests: dict[str, str] | None = None) -> bytes:
    """What stands before the tensors' bytes, which follow in this order without gaps.

    Its length does not depend on what the digests are.
    """
    metadata = {"format": "pt"} | ({_DIGESTS: json.dumps(digests)} if digests else {})
    entries: dict[str, Any] = {"__metadata__": metadata}
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
    """The tensors as they come, then the header before them; returns their bytes."""
    digests = {name: f"{0:016x}" for name, _, _ in planned}
    with open(path, "wb") as file:
        file.write(header(planned, digests))
        for (name, dtype, shape), (got, array) in zip(planned, stream, strict=False):
            if (got, array.shape, array.dtype) != (name, shape, DTYPES[dtype]):
                raise RuntimeError(f"export planned {name} {shape}, made {got} {array.shape}")
            digests[name] = f"{part_digest(array, (0,) * array.ndim, shape):016x}"
            file.write(array.reshape(-1).view(np.uint8).data)
        file.seek(0)
        file.write(header(planned, digests))
        file.flush()
        os.fsync(file.fileno())
    return sum(map(planned_bytes, planned))
