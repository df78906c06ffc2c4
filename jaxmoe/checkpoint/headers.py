# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must hold to be this model's, told from its headers before any data is read.

Next: jaxmoe/checkpoint/hf.py reads the data.
"""

from collections.abc import Iterator
from pathlib import Path

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.entries import Entry, stored
from jaxmoe.checkpoint.tensor_files import FLOATS, Stored, mistyped
from jaxmoe.config import ConfigError, ModelConfig
from pallas_kernels.grouped_matmul.mxfp4 import GROUP


def check_headers(
    directory: Path, table: list[Entry], tensors: dict[str, Stored], experts: str
) -> None:
    """Raises ConfigError where a folder's tensors are not those of the table."""
    if experts == "packed":
        _check_packed(directory, table, tensors)
    problems = list(_problems(table, tensors))
    if problems:
        more = f" ({len(problems) - 1} more like it.)" if len(problems) > 1 else ""
        raise ConfigError(
            f"{directory}: {problems[0]}{more} Compare config.json with the *.safetensors."
        )


def _check_packed(directory: Path, table: list[Entry], tensors: dict[str, Stored]) -> None:
    """Raises ConfigError where an expert matrix is there, but not in four bits."""
    matrices = [entry.name for entry in table if entry.is_packable]
    dense = [name for name in matrices if name in tensors]
    if dense and len(dense) < len(matrices):
        raise ConfigError(
            f"{directory} must hold all expert matrices packed (*_blocks and *_scales), or all "
            f"dense; {len(dense)} of {len(matrices)} are dense, {dense[0]} the first. Export or "
            "fetch it again."
        )
    if dense:
        raise ConfigError(
            f"{directory} must hold packed experts ({dense[0]}_blocks and _scales) to be loaded as "
            f"such; {dense[0]} is {tensors[dense[0]].dtype}. Point init.checkpoint at a folder in "
            "MXFP4, as released or by --set save.export_dtype=mxfp4."
        )


def require_packable(cfg: ModelConfig) -> None:
    """Raises ConfigError where a model's experts cannot be held in four bits."""
    if cfg.d_model % (2 * GROUP) or cfg.d_expert % (2 * GROUP):
        raise ConfigError(
            f"packed experts need model.d_model ({cfg.d_model}) and model.d_expert "
            f"({cfg.d_expert}) to be multiples of 64: a byte holds rows d and d + D/2, and each "
            "half must be whole groups of 32. Take dense experts for this model."
        )


def _problems(table: list[Entry], tensors: dict[str, Stored]) -> Iterator[str]:
    expected = set[str]()
    for entry in table:
        packed = entry.is_packable and entry.name not in tensors
        packed = packed and any(entry.name + end in tensors for end in ("_blocks", "_scales"))
        if packed and entry.shape[1] % mxfp4.GROUP:
            yield f"{entry.name} has {entry.shape[1]} rows; MXFP4 needs a multiple of 32."
        for name, _, shape in stored(entry, "mxfp4" if packed else "bfloat16"):
            expected.add(name)
            if name not in tensors:
                yield f"{name} is missing; it must have shape {shape}."
                continue
            got, kinds = tensors[name], ("U8",) if packed else FLOATS
            if got.shape != shape:
                yield f"{name} must have shape {shape}, got {got.shape}."
            elif got.dtype not in kinds:
                yield mistyped(got.path, name, got.dtype, kinds)
    for name in sorted(set(tensors) - expected):
        yield f"{name} is no tensor of this model."
