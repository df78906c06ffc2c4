# SPDX-License-Identifier: Apache-2.0
"""A weight update's manifest, and the checks that run before anything of it is loaded.

An update in files is a directory of *.safetensors and manifest.json; the manifest lists the tensors
and their digests. Next: transfer.py.
"""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmoe.vllm.plugin.names import PACKED_ENDS

# weight_sync/update.py writes the same number. It imports jax, which vLLM's environment may lack,
# so it cannot be imported here.
FORMAT = 1
# Bytes of an element; names as safetensors spells them.
FLOATS = ("F32", "BF16", "F16")
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}


class UpdateRejected(RuntimeError):
    """A weight update that must not be loaded, or failed a check; the message says why."""


@dataclass(frozen=True)
class ManifestTensor:
    """A manifest's entry of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Run, version and tensors of a weight update."""

    run: str
    version: int
    tensors: dict[str, ManifestTensor]

    @property
    def label(self) -> str:
        return f"{self.run}:{self.version}"


@dataclass(frozen=True)
class TensorSpan:
    """Position of a tensor in a file, by the file's header."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse_manifest(raw: Mapping[str, Any], source: str) -> Manifest:
    """Return the manifest from manifest.json's content. Raises UpdateRejected if it is not one."""
    try:
        if raw["format"] != FORMAT:
            raise UpdateRejected(
                f"{source}: format must be {FORMAT}, got {raw['format']!r}. Trainer and vLLM must "
                "have the same jaxmoe: pip install --no-deps -U jaxmoe in both environments."
            )
        tensors = {
            name: ManifestTensor(t["dtype"], tuple(int(n) for n in t["shape"]), t["digest"])
            for name, t in raw["tensors"].items()
        }
        return Manifest(str(raw["run"]), int(raw["version"]), tensors)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UpdateRejected(
            f"{source} must hold format, run, version and tensors; {error!r}."
        ) from error


def read_manifest(directory: Path) -> Manifest:
    """Read DIRECTORY/manifest.json. Raises UpdateRejected if it is absent or incomplete."""
    path = directory / "manifest.json"
    try:
        with open(path, opener=open_without_links) as file:
            return parse_manifest(json.load(file), str(path))
    except (OSError, json.JSONDecodeError) as error:
        raise UpdateRejected(f"{path} must be a weight update's manifest; {error}.") from error


def check_folder_owner(directory: Path) -> None:
    """Raise UpdateRejected if another user could have placed files in the folder.

    The folder and its parent must not be links, must belong to this user (or vLLM runs as root),
    and must not be writable by others.
    """
    for folder in (directory.parent, directory):
        try:
            # stat would follow a link, whose target may belong to the right user.
            status = folder.lstat()
        except OSError as error:
            raise UpdateRejected(f"{folder} must be a folder of weights; {error}.") from error
        if not stat.S_ISDIR(status.st_mode):
            raise UpdateRejected(f"{folder} must be a folder of weights, not a link.")
        if os.geteuid() not in (0, status.st_uid) or status.st_mode & 0o022:
            raise UpdateRejected(
                f"{folder} must belong to the user that vLLM runs as and be writable by no other; "
                f"it belongs to user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}."
            )


def open_without_links(path: str | Path, flags: int) -> int:
    """Opener for open(): a link raises OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def check_tensor_shapes(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UpdateRejected, naming the tensors, if the shapes are not those of the model."""
    reject_problems(manifest.label, list(_find_shape_problems(manifest, shapes)))


def check_file_headers(manifest: Manifest, directory: Path) -> dict[str, TensorSpan]:
    """Return the position of each tensor of a manifest, from the files' headers.

    Raises UpdateRejected, naming the tensors, if they are absent, unknown, truncated or differ from
    the manifest.
    """
    spans: dict[str, TensorSpan] = {}
    problems: list[str] = []
    for path in sorted(directory.glob("*.safetensors")):
        for name, span in _read_header(path):
            if name in spans:
                problems.append(f"{name} is in {spans[name].path.name} and in {path.name}")
            spans[name] = span
            if span.end > path.stat().st_size:
                problems.append(
                    f"{name} ends at byte {span.end} of {path.name}, which has "
                    f"{path.stat().st_size}: cut off"
                )
    reject_problems(
        manifest.label, problems + list(_find_file_problems(manifest, spans, directory))
    )
    return spans


def reject_problems(label: str, problems: list[str]) -> None:
    """Raise UpdateRejected with the first six problems, if there are any."""
    if problems:
        remainder = f"; and {len(problems) - 6} more problems" if len(problems) > 6 else ""
        raise UpdateRejected(f"weights {label} are rejected: {'; '.join(problems[:6])}{remainder}.")


def _find_shape_problems(
    manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for name, shape in shapes.items():
        tensor = manifest.tensors.get(name)
        if tensor is None:
            yield f"{name} is missing; the engine's model has it, {list(shape)}"
        elif tensor.shape != shape:
            yield f"{name} must be {list(shape)} for the engine's model, got {list(tensor.shape)}"
        elif tensor.dtype not in (allowed := ("U8",) if name.endswith(PACKED_ENDS) else FLOATS):
            yield f"{name} must be {' or '.join(allowed)}, got {tensor.dtype}"
    for name in manifest.tensors:
        if name not in shapes:
            yield f"{name} is not a tensor of the engine's model"


def _find_file_problems(
    manifest: Manifest, spans: dict[str, TensorSpan], directory: Path
) -> Iterator[str]:
    for name, tensor in manifest.tensors.items():
        span = spans.get(name)
        if span is None:
            yield f"{name} is in no *.safetensors of {directory}"
        elif (span.dtype, span.shape) != (tensor.dtype, tensor.shape):
            yield (
                f"{name} must be {tensor.dtype} {list(tensor.shape)} by the manifest, is "
                f"{span.dtype} {list(span.shape)} in {span.path.name}"
            )
        elif not tensor.digest:
            yield f"{name} has no digest in the manifest"
        elif span.end - span.begin != math.prod(span.shape) * DTYPE_BYTES[span.dtype]:
            yield f"{name} has {span.end - span.begin} bytes in {span.path.name}, a damaged header"
    for name in spans:
        if name not in manifest.tensors:
            yield f"{name} is in {spans[name].path.name} and not in the manifest"


def _read_header(path: Path) -> Iterator[tuple[str, TensorSpan]]:
    """Yield (name, span) of a safetensors file: 8 bytes of length, a JSON header, the data."""
    try:
        with open(path, "rb", opener=open_without_links) as file:
            length = int.from_bytes(file.read(8), "little")
            # A damaged length could make read() allocate exabytes.
            if length > path.stat().st_size - 8:
                raise ValueError(f"a header of {length} bytes, the file has {path.stat().st_size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, TensorSpan(path, entry["dtype"], tuple(entry["shape"]), begin, end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UpdateRejected(f"{path} must be a complete safetensors file; {error}.") from error
