# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in from PEFT's files; whatever of them is not read is refused, never dropped.

Next: jaxmoe/checkpoint/peft_config.py, what its config may say; peft_layout.py, how PEFT lays the
matrices out.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmoe.checkpoint.peft import CONFIG, FILE
from jaxmoe.checkpoint.peft_config import read_config, scale_of
from jaxmoe.checkpoint.peft_layout import (
    ATTENTION,
    EXPERTS,
    TARGETS,
    AdaptedMatrix,
    Over,
    adapted_matrices,
    from_peft,
    tensor_of,
)
from jaxmoe.checkpoint.tensor_files import (
    FLOATS,
    Stored,
    mistyped,
    not_finite,
    read_header,
    read_rows,
)
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.model.lora import Pair
from jaxmoe.shapes import Params


class PeftAdapter(NamedTuple):
    """An adapter that was read."""

    adapters: Params  # {"layers": {"sliding" | "full": {name: Pair}}}, numpy float32
    scales: dict[str, float]  # by name: W' = W + scale · aᵀ b
    over: Over | None  # the experts' axis that A was over in the file; None without experts


def read_adapter(
    directory: str | Path, cfg: ModelConfig, *, over: Over | None = None
) -> PeftAdapter:
    """A PEFT adapter of this model, in our layout.

    Args:
        over: the experts' axis that A is over, where the files cannot tell (`peft_layout`): w_down
            alone with D = F, of PEFT 0.19.1 or newer, or of one that does not say its version.
    Numerics: to float32; nothing is rounded but what was wider.
    Raises ConfigError, naming the tensor or the key: where something else than low-rank matrices of
    attention and experts was trained, for another model or rank than the config says, for layers
    that were left out, damaged files, and NaN or infinity.
    """
    directory = Path(directory)
    config = read_config(directory)
    found = _parse(directory, config, cfg)
    names = [name for name in TARGETS if name in {matrix.name for matrix, _ in found}]
    over = _over(directory, config, found, over)
    adapters: dict[str, Any] = {"layers": {"sliding": {}, "full": {}}}
    scales: dict[str, float] = {}
    for matrix, (a, b) in found:
        rank = a.shape[0] // (matrix.experts or 1)
        scale = scale_of(directory, config, matrix.target, rank)
        if scales.setdefault(matrix.name, scale) != scale:
            raise ConfigError(
                f"{directory}: {matrix.target} must have the alpha of its namesakes in the other "
                f"layers; scale {scale:g} is not {scales[matrix.name]:g}. Train it with one alpha."
            )
        ours = from_peft(matrix, over or "in", _read(a), _read(b))
        room = adapters["layers"][matrix.keys[1]].setdefault(
            matrix.name, Pair(*(np.empty((cfg.n_layers // 2, *x.shape), np.float32) for x in ours))
        )
        for whole, x in zip(room, ours, strict=True):
            if whole.shape[1:] != x.shape:
                raise ConfigError(
                    f"{directory}: {matrix.target} must have the rank of its namesakes in the "
                    f"other layers, {whole.shape[-2]}, got {rank}. Train it with one rank."
                )
            whole[matrix.pair] = x
    return PeftAdapter(adapters, {n: scales[n] for n in names}, over)


def _parse(
    directory: Path, config: Mapping[str, Any], cfg: ModelConfig
) -> list[tuple[AdaptedMatrix, tuple[Stored, Stored]]]:
    """Each adapted matrix with its A and B, from the header; every tensor is one of them."""
    path = directory / FILE
    if not path.is_file():
        raise ConfigError(f"{path} is missing: an adapter is {CONFIG} and {FILE}. Fetch it again.")
    tensors = read_header(path)
    adapted = _adapted(directory, config, tensors)
    found, expected = [], set[str]()
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
                raise ConfigError(mistyped(path, name, tensors[name].dtype, FLOATS))
            expected.add(name)
            pair.append(tensors[name])
        found.append((matrix, tuple(pair)))
    if others := sorted(tensors.keys() - expected):
        raise ConfigError(
            f"{directory}: {others[0]} is no low-rank matrix of this model's attention or experts "
            f"({len(others)} such tensors). Is it of another model?"
        )
    return found


def _adapted(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored]
) -> list[str]:
    """Our names of what a file adapts, by its tensors; experts also by what its config says."""
    modules = {name.partition(".lora_")[0] for name in tensors}
    adapted = [n for n, end in ATTENTION.items() if any(m.endswith("." + end) for m in modules)]
    both = any(m.endswith("mlp.experts.base_layer") for m in modules)
    held = 2 if both else int(any(m.endswith("mlp.experts") for m in modules))
    told = config.get("target_parameters") or []
    ours = {n for n, end in EXPERTS.items() for t in told if f".{end}".endswith(f".{t}")}
    if len(told) != len(ours) or len(ours) != held:
        raise ConfigError(
            f"{directory}: target_parameters must be of {', '.join(EXPERTS.values())} and in the "
            f"file; it says {told}, and the file adapts {held} of the experts' matrices. Save the "
            "adapter again."
        )
    if not adapted and not ours:
        raise ConfigError(
            f"{directory} must adapt {', '.join(TARGETS.values())}, or some of them; it adapts "
            f"{', '.join(sorted(modules)[:1]) or 'nothing'}. Is it of another model?"
        )
    return adapted + [name for name in EXPERTS if name in ours]


def _over(
    directory: Path, config: Mapping[str, Any],
    found: list[tuple[AdaptedMatrix, tuple[Stored, Stored]]], said: Over | None,
) -> Over | None:  # fmt: skip
    """The axis that the experts' A is over; checks all shapes."""
    possible: Sequence[Over] = ("in", "out")
    for matrix, (a, b) in found:
        rank = a.shape[0] // (matrix.experts or 1) if a.shape else 0
        shapes = a.shape, b.shape
        fit = list[Over]()
        if matrix.experts is not None:
            fit.extend(x for x in possible if shapes == matrix.shapes(rank, x))
        elif shapes == matrix.shapes(rank):
            fit += possible
        if not fit or rank < 1:
            want = " and ".join(map(str, matrix.shapes(rank or 1)))
            raise ConfigError(
                f"{directory}: {a.name} and B must be {want} for this model, got {a.shape} and "
                f"{b.shape}: an adapter of another model or layout."
            )
        possible = fit
    experts = [a for matrix, (a, _) in found if matrix.experts is not None]
    if not experts:
        return None
    if said is not None and said not in possible:
        raise ConfigError(
            f"{directory}: the experts' A must be over {said!r}, as was said; its shapes are "
            f"those of {possible[0]!r}."
        )
    version = str(config.get("peft_version") or "")
    if said is not None or len(possible) == 1:
        return said or possible[0]
    if experts[0].digest is not None or re.match(r"0\.18\.", version):  # ours have digests
        return "in"
    if version == "0.19.0":
        return "out"
    raise ConfigError(
        f"{directory}: the experts' A may be over the inputs or the outputs of "
        f"{experts[0].name}, which have one size; PEFT {version or 'of no version'} writes either. "
        'Pass over="in" if transformers 5 and PEFT other than 0.19.0 made it.'
    )


def _read(tensor: Stored) -> np.ndarray:
    whole = np.empty(tensor.shape, np.float32)
    for start, rows in read_rows(tensor, tensor.shape[0]):
        whole[start : start + len(rows)] = rows
    if broken := not_finite(whole):
        raise ConfigError(
            f"{tensor.path}: {tensor.name} must be finite, got {broken} NaN or infinite values."
        )
    return whole
