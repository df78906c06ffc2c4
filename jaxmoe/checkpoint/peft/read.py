# SPDX-License-Identifier: Apache-2.0
"""Read LoRA adapters from PEFT's files; unsupported contents are refused, never ignored.

Next: jaxmoe/checkpoint/peft/config.py, the supported settings; layout.py, PEFT's layout of
the matrices.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.checkpoint.peft.config import adapter_scale, read_adapter_config
from jaxmoe.checkpoint.peft.layout import (
    ATTENTION,
    EXPERTS,
    TARGETS,
    AdaptedMatrix,
    ExpertAxis,
    adapted_matrices,
    from_peft,
    tensor_of,
)
from jaxmoe.checkpoint.peft.write import CONFIG, FILE
from jaxmoe.checkpoint.tensor_files import (
    FLOATS,
    StoredTensor,
    count_not_finite,
    format_dtype_error,
    read_header,
    read_tensor_rows,
)
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.lora import Pair
from jaxmoe.shapes import Params


class PeftAdapter(NamedTuple):
    """An adapter in our layout."""

    adapters: Params  # {"layers": {group: {name: Pair}}}, numpy float32
    scales: dict[str, float]  # by name: W' = W + scale · aᵀ b
    # The experts' axis that A spans in the file; None without experts.
    expert_axis: ExpertAxis | None


def read_adapter(
    directory: str | Path, cfg: ModelConfig, *, expert_axis: ExpertAxis | None = None
) -> PeftAdapter:
    """A PEFT adapter of this model, in our layout.

    Args:
        expert_axis: the experts' axis that A spans, needed if the files do not show it
            (`layout`): w_down alone with D = F, by PEFT 0.19.1 or newer, or by an unknown
            version.
    Numerics: converts to float32; only wider values are rounded.
    Raises: ConfigError that names the tensor or key: for trained modules other than low-rank
        matrices of attention and experts, for another model or rank than in the config, for
        missing layers, damaged files, NaN and infinity.
    """
    directory = Path(directory)
    config = read_adapter_config(directory)
    matrices = _find_tensors(directory, config, cfg)
    names = [name for name in TARGETS if name in {matrix.name for matrix, _ in matrices}]
    expert_axis = _find_expert_axis(directory, config, matrices, expert_axis)
    adapters: dict[str, Any] = {"layers": {group: {} for group in cfg.plan.groups}}
    scales: dict[str, float] = {}
    for matrix, (a, b) in matrices:
        rank = a.shape[0] // (matrix.experts or 1)
        scale = adapter_scale(directory, config, matrix.target, rank)
        if scales.setdefault(matrix.name, scale) != scale:
            raise ConfigError(
                f"{directory}: {matrix.target} must have the same alpha in all layers; scale "
                f"{scale:g} is not {scales[matrix.name]:g}. Train it with one alpha."
            )
        pair = from_peft(matrix, expert_axis or "in", _read_tensor(a), _read_tensor(b))
        size = cfg.plan.groups[matrix.keys[1]].size
        stacked = adapters["layers"][matrix.keys[1]].setdefault(
            matrix.name, Pair(*(np.empty((size, *x.shape), np.float32) for x in pair))
        )
        for stacked_array, x in zip(stacked, pair, strict=True):
            if stacked_array.shape[1:] != x.shape:
                raise ConfigError(
                    f"{directory}: {matrix.target} must have the same rank in all layers, "
                    f"{stacked_array.shape[-2]}, got {rank}. Train it with one rank."
                )
            stacked_array[matrix.index] = x
    return PeftAdapter(adapters, {n: scales[n] for n in names}, expert_axis)


def _find_tensors(
    directory: Path, config: Mapping[str, Any], cfg: ModelConfig
) -> list[tuple[AdaptedMatrix, tuple[StoredTensor, StoredTensor]]]:
    """Each adapted matrix with its A and B, from the header; the file has no other tensors."""
    path = directory / FILE
    if not path.is_file():
        raise ConfigError(f"{path} is missing: an adapter is {CONFIG} and {FILE}. Fetch it again.")
    tensors = read_header(path)
    adapted = _find_adapted_names(directory, config, tensors)
    matrices, expected = [], set[str]()
    for matrix in adapted_matrices(cfg):
        if matrix.name not in adapted:
            continue
        pair = []
        for name in (tensor_of(matrix, letter, adapted) for letter in "AB"):
            if name not in tensors:
                raise ConfigError(
                    f"{directory}: {name} is missing; {TARGETS[matrix.name]} must be adapted in "
                    f"each of the model's {cfg.n_layers} layers. Is it of another model?"
                )
            if tensors[name].dtype not in FLOATS:
                raise ConfigError(format_dtype_error(path, name, tensors[name].dtype, FLOATS))
            expected.add(name)
            pair.append(tensors[name])
        matrices.append((matrix, tuple(pair)))
    if unexpected := sorted(tensors.keys() - expected):
        raise ConfigError(
            f"{directory}: {unexpected[0]} is not a low-rank matrix of this model's attention or "
            f"experts ({len(unexpected)} such tensors). Is it of another model?"
        )
    return matrices


def _find_adapted_names(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> list[str]:
    """Our names of the matrices that a file adapts, from its tensors and target_parameters."""
    modules = {name.partition(".lora_")[0] for name in tensors}
    adapted = [n for n, end in ATTENTION.items() if any(m.endswith("." + end) for m in modules)]
    has_both = any(m.endswith("mlp.experts.base_layer") for m in modules)
    n_matrices = 2 if has_both else int(any(m.endswith("mlp.experts") for m in modules))
    targets = config.get("target_parameters") or []
    names = {n for n, end in EXPERTS.items() for t in targets if f".{end}".endswith(f".{t}")}
    if len(targets) != len(names) or len(names) != n_matrices:
        raise ConfigError(
            f"{directory}: target_parameters must list the adapted ones of "
            f"{', '.join(EXPERTS.values())}; it lists {targets}, and the file adapts {n_matrices} "
            "of the experts' matrices. Save the adapter again."
        )
    if not adapted and not names:
        raise ConfigError(
            f"{directory} must adapt some of {', '.join(TARGETS.values())}; it adapts "
            f"{', '.join(sorted(modules)[:1]) or 'nothing'}. Is it of another model?"
        )
    return adapted + [name for name in EXPERTS if name in names]


def _find_expert_axis(
    directory: Path,
    config: Mapping[str, Any],
    matrices: list[tuple[AdaptedMatrix, tuple[StoredTensor, StoredTensor]]],
    chosen: ExpertAxis | None,
) -> ExpertAxis | None:
    """The experts' axis that A spans; None without experts. Checks all shapes.

    chosen: the caller's `expert_axis`.
    """
    possible: Sequence[ExpertAxis] = ("in", "out")
    for matrix, (a, b) in matrices:
        rank = a.shape[0] // (matrix.experts or 1) if a.shape else 0
        shapes = a.shape, b.shape
        fitting = list[ExpertAxis]()
        if matrix.experts is not None:
            fitting.extend(x for x in possible if shapes == matrix.peft_shapes(rank, x))
        elif shapes == matrix.peft_shapes(rank):
            fitting += possible
        if not fitting or rank < 1:
            expected = " and ".join(map(str, matrix.peft_shapes(rank or 1)))
            raise ConfigError(
                f"{directory}: {a.name} and B must be {expected} for this model, got {a.shape} and "
                f"{b.shape}: an adapter of another model or layout."
            )
        possible = fitting
    experts = [a for matrix, (a, _) in matrices if matrix.experts is not None]
    if not experts:
        return None
    if chosen is not None and chosen not in possible:
        raise ConfigError(
            f"{directory}: the experts' A must span {chosen!r}, as in expert_axis; its shapes are "
            f"those of {possible[0]!r}."
        )
    version = str(config.get("peft_version") or "")
    if chosen is not None or len(possible) == 1:
        return chosen or possible[0]
    # Only jaxmoe writes digests, and it writes "in".
    if experts[0].digest is not None or re.match(r"0\.18\.", version):
        return "in"
    if version == "0.19.0":
        return "out"
    raise ConfigError(
        f"{directory}: the experts' A may span the inputs or the outputs of {experts[0].name}, "
        f"which have the same size; PEFT {version or 'of unknown version'} writes either. "
        'Pass expert_axis="in" if transformers 5 and a PEFT other than 0.19.0 wrote it.'
    )


def _read_tensor(tensor: StoredTensor) -> np.ndarray:
    array = np.empty(tensor.shape, np.float32)
    for start, rows in read_tensor_rows(tensor, tensor.shape[0]):
        array[start : start + len(rows)] = rows
    if n_bad := count_not_finite(array):
        raise ConfigError(
            f"{tensor.path}: {tensor.name} must be finite, got {n_bad} NaN or infinite values."
        )
    return array
