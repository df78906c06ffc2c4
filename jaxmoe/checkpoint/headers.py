# SPDX-License-Identifier: Apache-2.0
"""Check from its headers, before data is read, that a checkpoint has the tensors of a model.

Next: jaxmoe/checkpoint/hf.py reads the data.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from jaxmoe.checkpoint import mxfp4
from jaxmoe.checkpoint.entries import Entry, list_entries, plan_entry
from jaxmoe.checkpoint.tensor_files import FLOATS, StoredTensor, find_tensors, format_dtype_error
from jaxmoe.config import ConfigError, ModelConfig
from pallas_kernels.grouped_matmul.mxfp4 import GROUP


def read_headers(
    directory: Path, cfg: ModelConfig, experts: Literal["dense", "packed"] = "dense"
) -> tuple[list[Entry], dict[str, StoredTensor]]:
    """The tensors of a model, and where a folder stores them, without reading their data.

    Raises ConfigError for a damaged or missing file, and for tensors that are not the model's.
    """
    if experts == "packed":
        check_packable(cfg)
    table, tensors = list_entries(cfg), find_tensors(directory)
    if experts == "packed":
        _check_packed(directory, table, tensors)
    problems = list(_find_problems(table, tensors))
    if problems:
        note = f" ({len(problems) - 1} more like it.)" if len(problems) > 1 else ""
        raise ConfigError(
            f"{directory}: {problems[0]}{note} Compare config.json with the *.safetensors."
        )
    return table, tensors


def _check_packed(directory: Path, table: list[Entry], tensors: dict[str, StoredTensor]) -> None:
    """Raise ConfigError if an expert matrix is stored dense, not in four bits."""
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


def check_packable(cfg: ModelConfig) -> None:
    """Raise ConfigError if a model's experts cannot be stored in four bits."""
    if cfg.d_model % (2 * GROUP) or cfg.d_expert % (2 * GROUP):
        raise ConfigError(
            f"packed experts need model.d_model ({cfg.d_model}) and model.d_expert "
            f"({cfg.d_expert}) to be multiples of 64: a byte holds rows d and d + D/2, and each "
            "half must consist of complete groups of 32. Use dense experts for this model."
        )


def _find_problems(table: list[Entry], tensors: dict[str, StoredTensor]) -> Iterator[str]:
    expected = set[str]()
    for entry in table:
        stored = any(entry.name + end in tensors for end in ("_blocks", "_scales"))
        packed = entry.is_packable and entry.name not in tensors and stored
        if packed and entry.shape[1] % mxfp4.GROUP:
            yield f"{entry.name} has {entry.shape[1]} rows; MXFP4 needs a multiple of 32."
        for name, dtype, shape in plan_entry(entry, "mxfp4" if packed else "bfloat16"):
            expected.add(name)
            if name not in tensors:
                yield f"{name} is missing; it must have shape {shape}."
                continue
            tensor, kinds = tensors[name], ("U8",) if dtype == "U8" else FLOATS
            if tensor.shape != shape:
                yield f"{name} must have shape {shape}, got {tensor.shape}."
            elif tensor.dtype not in kinds:
                yield format_dtype_error(tensor.path, name, tensor.dtype, kinds)
    for name in sorted(set(tensors) - expected):
        yield f"{name} is not a tensor of this model."
