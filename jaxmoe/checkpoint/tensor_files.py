# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: check headers without reading data, read rows, stream shards.

A file consists of eight bytes of length, a JSON header, and the tensors' bytes. This module does
not use the safetensors library, whose numpy interface has no bfloat16 and needs a complete shard
in memory. Files written here have a digest of every tensor in their metadata, which a read checks.
Next: jaxmoe/checkpoint/hf.py decides which tensors a model has.
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

from jaxmoe.checkpoint.digests import partial_digest
from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json_object
from jaxmoe.config.lfs_pointer import check_no_lfs_pointer

PlannedTensor = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
}
FLOATS = ("BF16", "F16", "F32")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_DIGESTS = "digests"  # key of __metadata__: a JSON object of name and digest
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format


@dataclass(frozen=True)
class StoredTensor:
    """The location and type of a tensor in a file."""

    name: str
    path: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    digest: str | None  # `array_digests` of the stored array; None if the file has no digests

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's model.safetensors or indexed shards, from the headers.

    Raises: ConfigError for a missing, truncated or malformed file, and for an index that does not
        match its shards.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        return read_header(directory / SINGLE_FILE)
    try:
        file_of_tensor = parse_json_object(index.read_bytes())["weight_map"]
        if not isinstance(file_of_tensor, dict) or not all(
            isinstance(x, str) for x in file_of_tensor.values()
        ):
            raise ValueError("weight_map must be an object of tensor names and file names")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{index} must be JSON with a weight_map; {error}. Fetch it again."
        ) from error
    if (directory / SINGLE_FILE).is_file() and set(file_of_tensor.values()) != {SINGLE_FILE}:
        raise ConfigError(
            f"{directory} must hold one set of weights; {SINGLE_FILE} and {INDEX_FILE} are two, "
            "and transformers would read the first. Move one of them away: "
            f"{directory / INDEX_FILE} with its shards, or the other."
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(file_of_tensor.values())):
        # An index comes from others. A name with a path in it could read any file of this machine.
        if Path(shard).name != shard or not shard.isprintable() or len(shard.encode()) > 255:
            raise ConfigError(f"{index} must name files in its folder, got {shard!r:.80}.")
        for name, tensor in read_header(directory / shard).items():
            if file_of_tensor.get(name) != shard:
                raise ConfigError(f"{index} must list every tensor; {shard} also holds {name}.")
            tensors[name] = tensor
    missing = sorted(set(file_of_tensor) - set(tensors))
    if missing and not missing[0].isprintable():
        raise ConfigError(f"{index} must name tensors, got {missing[0]!r}. Fetch it again.")
    if missing:
        raise ConfigError(
            f"{directory / file_of_tensor[missing[0]]} must hold {missing[0]}, which {INDEX_FILE} "
            "lists. Fetch it again."
        )
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises ConfigError as `find_tensors` does."""
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: a checkpoint holds {SINGLE_FILE}, or {INDEX_FILE} and its shards. "
            "Fetch it, or point init.checkpoint at another directory."
        )
    try:
        check_no_lfs_pointer(path)
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ConfigError(_format_size_error(path, 8 + length, size))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"the header has {length} bytes, which is too long")
            head = parse_json_object(file.read(length))
        metadata = head.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise ValueError("__metadata__ must be an object")
        digests = parse_json_object(metadata.get(_DIGESTS, "{}"))
        tensors = {name: _parse_entry(name, head[name], path, 8 + length, digests) for name in head}
        if digests and digests.keys() != head.keys():
            raise ValueError(f"digest without tensor: {(digests.keys() ^ head.keys()).pop()!r}")
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} must be a safetensors file; {error}. Fetch it again.") from error
    position = 8 + length
    # A damaged header could let tensors overlap, or leave bytes that belong to none.
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != position:
            raise ConfigError(
                f"{path}: {tensor.name} must begin at the end of the tensor before it (byte "
                f"{position - 8 - length}), got {tensor.offset - 8 - length}; the header is "
                "damaged. Fetch it again."
            )
        position += tensor.nbytes
    if position != size:
        raise ConfigError(_format_size_error(path, position, size))
    return tensors


def _parse_entry(
    name: str, entry: Any, path: Path, first: int, digests: dict[str, str]
) -> StoredTensor:
    """Parse and check a tensor's entry in an untrusted header; its data starts at byte `first`."""
    # Names are printed in errors, where control characters could move the cursor.
    if not name.isprintable():
        raise ValueError(f"{name!r} is not a printable name")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ConfigError(format_dtype_error(path, name, str(dtype), FLOATS))
    for field_name, value in ("shape", shape), ("data_offsets", offsets):
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise ValueError(f"{name}: {field_name} must be integers of 0 or more, got {value}")
    if len(offsets) != 2:
        raise ValueError(f"{name} must have two data_offsets, got {offsets}")
    stored = StoredTensor(name, path, dtype, tuple(shape), first + offsets[0], digests.get(name))
    if stored.nbytes != offsets[1] - offsets[0]:
        raise ConfigError(
            f"{path}: {name} must have {stored.nbytes} bytes, got {offsets[1] - offsets[0]}; the "
            "header is damaged. Fetch it again."
        )
    return stored


def _format_size_error(path: Path, expected_bytes: int, size: int) -> str:
    return (
        f"{path} must have {expected_bytes} bytes by its header, got {size}: truncated? "
        "Fetch it again."
    )


def format_dtype_error(path: Path, name: str, dtype: str, allowed: tuple[str, ...]) -> str:
    return f"{path}: {name} must be {' or '.join(allowed)}, got {dtype}."


def read_tensor_rows(tensor: StoredTensor, rows: int) -> Iterator[tuple[int, np.ndarray]]:
    """(index of the first row, up to `rows` rows) of each chunk of a tensor.

    Raises: ConfigError after the last chunk if the digest differs from that in the file.
    """
    dtype, width, digest_sum = DTYPES[tensor.dtype], math.prod(tensor.shape[1:]), 0
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        for start in range(0, tensor.shape[0], rows):
            shape = (min(rows, tensor.shape[0] - start), *tensor.shape[1:])
            raw = np.fromfile(file, np.uint8, shape[0] * width * dtype.itemsize)
            chunk = raw.view(dtype).reshape(shape)
            if tensor.digest is not None:
                digest_sum += partial_digest(chunk, (start, *[0] * (len(shape) - 1)), tensor.shape)
            yield start, chunk
    if tensor.digest is not None and tensor.digest != f"{digest_sum % 2**64:016x}":
        raise ConfigError(
            f"{tensor.path}: {tensor.name} differs from the digest in its file; it is damaged. "
            "Copy or export it again."
        )


def count_not_finite(array: np.ndarray) -> int:
    """Number of values that are NaN or infinite: all bits of their exponent are ones."""
    exponent_bits = np.array(np.inf, array.dtype).view(f"u{array.itemsize}")
    bits = array.view(exponent_bits.dtype)
    return int(np.count_nonzero((bits & exponent_bits) == exponent_bits))


def plan_shards(planned: list[PlannedTensor], limit: int) -> list[list[PlannedTensor]]:
    """Divide tensors, in order, into shards of at most `limit` bytes (or one larger tensor)."""
    shards, filled = list[list[PlannedTensor]](), 0
    for item in planned:
        nbytes = planned_bytes(item)
        if not shards or filled + nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += nbytes
    return shards


def planned_bytes(item: PlannedTensor) -> int:
    return math.prod(item[2]) * DTYPES[item[1]].itemsize


def encode_header(planned: list[PlannedTensor], digests: dict[str, str] | None = None) -> bytes:
    """The length and JSON header of a file whose tensors follow in this order without gaps.

    The length of the result does not depend on the values of the digests.
    """
    metadata = {"format": "pt"} | ({_DIGESTS: json.dumps(digests)} if digests else {})
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for item in planned:
        begin, end = end, end + planned_bytes(item)
        entries[item[0]] = {"dtype": item[1], "shape": item[2], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The data begins at a multiple of eight bytes, as safetensors' own writer has it.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    path: Path, planned: list[PlannedTensor], stream: Iterator[tuple[str, np.ndarray]]
) -> int:
    """Write tensors as they are generated, then the header with their digests.

    Returns the bytes of the tensors.
    """
    digests = {name: f"{0:016x}" for name, _, _ in planned}
    with open(path, "wb") as file:
        file.write(encode_header(planned, digests))
        # The stream goes on with the tensors of the next file. zip asks `planned` first, so it
        # takes none of them from the stream.
        for (name, dtype, shape), (array_name, array) in zip(planned, stream, strict=False):
            if (array_name, array.shape, array.dtype) != (name, shape, DTYPES[dtype]):
                raise RuntimeError(
                    f"export planned {name} {shape}, made {array_name} {array.shape}"
                )
            digests[name] = f"{partial_digest(array, (0,) * array.ndim, shape):016x}"
            file.write(array.reshape(-1).view(np.uint8).data)
        # The digests are known only now. The header with them is as long as the first one.
        file.seek(0)
        file.write(encode_header(planned, digests))
        file.flush()
        # The folder is renamed when all files are written, and a name must not reach the disk
        # before the data.
        os.fsync(file.fileno())
    return sum(map(planned_bytes, planned))
