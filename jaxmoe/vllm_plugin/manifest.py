# SPDX-License-Identifier: Apache-2.0
"""A weight update's manifest, and the checks that come before anything of it is loaded.

An update in files is a directory of *.safetensors and manifest.json; the manifest says which
tensors it must hold, with which bytes. Next: transfer.py.
"""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
WIDTH = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of an element; names as safetensors spells them


class UpdateRejected(RuntimeError):
    """A weight update that must not be loaded, or was found wrong while loading; names why."""


@dataclass(frozen=True)
class Tensor:
    """What a manifest says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Which version of which run, and every tensor of it."""

    run: str
    version: int
    tensors: dict[str, Tensor]

    @property
    def label(self) -> str:
        return f"{self.run}:{self.version}"


@dataclass(frozen=True)
class TensorSpan:
    """Where a tensor lies, by a file's header."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def parse(raw: Mapping[str, Any], where: str) -> Manifest:
    """The manifest of manifest.json's content. Raises UpdateRejected where it is not one."""
    try:
        if raw["format"] != FORMAT:
            raise UpdateRejected(
                f"{where}: format must be {FORMAT}, got {raw['format']!r}. Trainer and vLLM must "
                "have the same jaxmoe: pip install --no-deps -U jaxmoe in both."
            )
        tensors = {
            name: Tensor(t["dtype"], tuple(int(n) for n in t["shape"]), t["digest"])
            for name, t in raw["tensors"].items()
        }
        return Manifest(str(raw["run"]), int(raw["version"]), tensors)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UpdateRejected(
            f"{where} must hold format, run, version and tensors; {error!r}."
        ) from error


def read(directory: Path) -> Manifest:
    """DIRECTORY/manifest.json. Raises UpdateRejected where there is none or it is not whole."""
    path = directory / "manifest.json"
    try:
        with open(path, opener=no_links) as file:
            return parse(json.load(file), str(path))
    except (OSError, json.JSONDecodeError) as error:
        raise UpdateRejected(f"{path} must be a weight update's manifest; {error}.") from error


def check_folder(directory: Path) -> None:
    """Raises UpdateRejected where another user could have put something else there.

    Of the folder and the one it is in: no links, nobody else's, and nobody else may write.
    """
    for folder in (directory.parent, directory):
        try:
            found = folder.lstat()
        except OSError as error:
            raise UpdateRejected(f"{folder} must be a folder of weights; {error}.") from error
        if not stat.S_ISDIR(found.st_mode):
            raise UpdateRejected(f"{folder} must be a folder of weights, and no link to one.")
        if os.geteuid() not in (0, found.st_uid) or found.st_mode & 0o022:
            raise UpdateRejected(
                f"{folder} must be of the user that vLLM runs as, and only that user may write "
                f"there; it is of user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}."
            )


def no_links(path: str | Path, flags: int) -> int:
    """An opener for open(): a link is an OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def check_model(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UpdateRejected, naming them, for tensors that are not of a model of these shapes."""
    reject(manifest.label, list(_against_model(manifest, shapes)))


def check_files(manifest: Manifest, directory: Path) -> dict[str, TensorSpan]:
    """Where each tensor of a manifest lies, from the files' headers.

    Raises UpdateRejected, naming them, for tensors that are absent, unknown, cut off or unlike the
    manifest.
    """
    found: dict[str, TensorSpan] = {}
    problems: list[str] = []
    for path in sorted(directory.glob("*.safetensors")):
        for name, span in _header(path):
            if name in found:
                problems.append(f"{name} is in {found[name].path.name} and in {path.name}")
            found[name] = span
            if span.end > path.stat().st_size:
                problems.append(
                    f"{name} ends at byte {span.end} of {path.name}, which has "
                    f"{path.stat().st_size}: cut off"
                )
    reject(manifest.label, problems + list(_against_files(manifest, found, directory)))
    return found


def reject(label: str, problems: list[str]) -> None:
    """Raises UpdateRejected with the first few problems, where there are any."""
    if problems:
        more = f"; and {len(problems) - 6} more like these" if len(problems) > 6 else ""
        raise UpdateRejected(f"weights {label} are rejected: {'; '.join(problems[:6])}{more}.")


def _against_model(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, shape in shapes.items():
        tensor = manifest.tensors.get(name)
        if tensor is None:
            yield f"{name} is missing; the engine's model has it, {list(shape)}"
        elif tensor.shape != shape:
            yield f"{name} must be {list(shape)} for the engine's model, got {list(tensor.shape)}"
        elif tensor.dtype not in WIDTH:
            yield f"{name} must be {' or '.join(WIDTH)}, got {tensor.dtype}"
    for name in manifest.tensors:
        if name not in shapes:
            yield f"{name} is no tensor of the engine's model"


def _against_files(
    manifest: Manifest, found: dict[str, TensorSpan], directory: Path
) -> Iterator[str]:
    for name, tensor in manifest.tensors.items():
        span = found.get(name)
        if span is None:
            yield f"{name} is in no *.safetensors of {directory}"
        elif (span.dtype, span.shape) != (tensor.dtype, tensor.shape):
            yield (
                f"{name} must be {tensor.dtype} {list(tensor.shape)} by the manifest, is "
                f"{span.dtype} {list(span.shape)} in {span.path.name}"
            )
        elif not tensor.digest:
            yield f"{name} has no digest in the manifest"
        elif span.end - span.begin != math.prod(span.shape) * WIDTH[span.dtype]:
            yield f"{name} has {span.end - span.begin} bytes in {span.path.name}, a damaged header"
    for name in found:
        if name not in manifest.tensors:
            yield f"{name} is in {found[name].path.name} and not in the manifest"


def _header(path: Path) -> Iterator[tuple[str, TensorSpan]]:
    """A safetensors file: eight bytes of length, a JSON header, the tensors' bytes."""
    try:
        with open(path, "rb", opener=no_links) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size - 8:
                raise ValueError(f"a header of {length} bytes, the file has {path.stat().st_size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, TensorSpan(path, entry["dtype"], tuple(entry["shape"]), begin, end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UpdateRejected(f"{path} must be a whole safetensors file; {error}.") from error
