# SPDX-License-Identifier: Apache-2.0
"""Write LoRA adapters in PEFT's format, which other programs train, merge and serve.

An adapter consists of adapter_config.json and adapter_model.safetensors, without the base.
Next: jaxmoe/checkpoint/peft/layout.py, PEFT's layout of the matrices; read.py reads adapters.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.checkpoint.entries import leaf_of, list_entries
from jaxmoe.checkpoint.layouts import checkpoint_tensor, gather_leaf
from jaxmoe.checkpoint.peft.layout import (
    ATTENTION,
    EXPERTS,
    TARGETS,
    AdaptedMatrix,
    adapted_matrices,
    tensor_of,
    to_peft,
)
from jaxmoe.checkpoint.tensor_files import DTYPES, FLOATS, write_shard
from jaxmoe.config import ConfigError, LoraConfig, ModelConfig
from jaxmoe.config.lora import MODULES_TO_SAVE
from jaxmoe.shapes import Params

# PEFT matches modules by the end of their names; "norm" alone would match all three norms.
_MODULES = {
    "w_router": "mlp.router",
    "attn_norm": "input_layernorm",
    "moe_norm": "post_attention_layernorm",
    "final_norm": "model.norm",
    "embed": "embed_tokens",
    "head": "lm_head",
}
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(
    adapters: Params,
    cfg: ModelConfig,
    lora: LoraConfig,
    directory: str | Path,
    *,
    base: str | None = None,
    add_files: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write an adapter folder; it is written to DIRECTORY.partial and then renamed.

    adapters: {"layers": {group: {name: Pair}}}; all groups of layers have the same names, a
        subset of lora's. Fully trained modules (router, norms, embedding, head) go into
        modules_to_save. PEFT cannot store fully trained sinks and biases.
    base: base_model_name_or_path.
    add_files: writes more files into the folder.
    The experts' A is over the inputs, as in PEFT 0.18 and, for transformers 5, from PEFT 0.19.1.
    If attention has another rank or alpha than the experts, it goes into rank_pattern and
    alpha_pattern.
    Numerics: nothing is rounded; dtypes are unchanged.
    Raises: ValueError for names or shapes that are not the model's; ConfigError if the directory
        cannot be written or is not empty, and for sinks and biases.
    """
    directory = Path(directory)
    if unsupported := sorted(
        lora.fully_trained & {*MODULES_TO_SAVE["sinks"], *MODULES_TO_SAVE["biases"]}
    ):
        raise ConfigError(
            f"a PEFT adapter can only store complete modules; {unsupported[0]} is a parameter of "
            f"one (lora.modules_to_save={lora.modules_to_save}). Export merged weights: --merge."
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} must be new or empty for an adapter. Name another one.")
    ranks = _read_ranks(adapters, cfg, lora)
    alphas = {n: lora.expert_alpha if n in EXPERTS else lora.attention_alpha for n in ranks}
    format_names = {DTYPES[name]: name for name in FLOATS}
    arrays: dict[str, np.ndarray] = {}
    for matrix in adapted_matrices(cfg):
        if matrix.name in ranks:
            pair = (np.asarray(x[matrix.index]) for x in _adapter_leaf(adapters, matrix)[:2])
            for letter, x in zip("AB", to_peft(matrix, *pair), strict=True):
                if x.dtype not in format_names:
                    raise ValueError(f"{matrix.target} must be of {', '.join(FLOATS)}: {x.dtype}.")
                arrays[tensor_of(matrix, letter, list(ranks))] = np.ascontiguousarray(x)
    arrays |= _whole_modules(adapters, cfg, lora)
    planned = [(name, format_names[array.dtype], array.shape) for name, array in arrays.items()]
    config = _adapter_config(ranks, alphas, lora.rank_stabilized) | {
        "base_model_name_or_path": base,
        "modules_to_save": [_MODULES[name] for name in _MODULES if name in lora.fully_trained]
        or None,
    }
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_shard(partial / FILE, planned, iter(arrays.items()))
        (partial / CONFIG).write_text(json.dumps(config, indent=2))
        add_files(partial)
        partial.replace(directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} must be writable for the adapter; {error}. Name another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _whole_modules(adapters: Params, cfg: ModelConfig, lora: LoraConfig) -> dict[str, np.ndarray]:
    """Tensors of fully trained modules, in a checkpoint's names and layout."""
    return {
        f"base_model.model.{entry.name}": checkpoint_tensor(
            gather_leaf(leaf_of(adapters, entry), entry.index),
            entry.layout,
            entry.shape,
            np.dtype(np.float32),
        )
        for entry in list_entries(cfg)
        if entry.keys[-1] in lora.fully_trained
    }


def _adapter_leaf(adapters: Params, matrix: AdaptedMatrix) -> Any:
    return adapters["layers"][matrix.keys[1]][matrix.name]


def _read_ranks(adapters: Params, cfg: ModelConfig, lora: LoraConfig) -> dict[str, int]:
    """The rank of each name, experts first. Raises ValueError if the tree is not the model's."""
    layers = adapters.get("layers", {})
    trained = [
        x for leaves in layers.values() for x in leaves.items() if x[0] not in lora.fully_trained
    ]
    unknown_names = sorted(adapters.keys() - {"layers", *lora.fully_trained})
    unknown_names += sorted(n for n, x in trained if n not in TARGETS or not isinstance(x, tuple))
    if unknown_names:
        raise ValueError(
            f"a PEFT adapter stores low-rank matrices of {', '.join(TARGETS)}; "
            f"{unknown_names[0]} is none of them. Export merged weights."
        )
    groups = cfg.plan.groups
    names = {group: set(layers.get(group, {})) - lora.fully_trained for group in groups}
    adapted = set[str]().union(*names.values())
    if any(x != adapted for x in names.values()) or not adapted:
        raise ValueError(f"an adapter must have the same names in all layers, got {names}.")
    ranks: dict[str, int] = {}
    for matrix in adapted_matrices(cfg):
        if matrix.name in adapted:
            a, b = (x.shape for x in _adapter_leaf(adapters, matrix)[:2])
            rank = ranks.setdefault(matrix.name, lora.ranks.get(matrix.name, 0))
            stack = (
                groups[matrix.keys[1]].size,
                *([] if matrix.experts is None else [matrix.experts]),
            )
            expected = (*stack, rank, matrix.inputs), (*stack, rank, matrix.outputs)
            if (a, b) != expected or rank < 1:
                raise ValueError(
                    f"{'/'.join(matrix.keys)} must have a {expected[0]} and b {expected[1]} for "
                    f"its rank {rank} in lora, got {a} and {b}."
                )
    return {name: ranks[name] for name in (*EXPERTS, *ATTENTION) if name in ranks}


def _adapter_config(
    ranks: dict[str, int], alphas: dict[str, float], stabilized: bool
) -> dict[str, Any]:
    # The experts' rank if they are adapted: PEFT 0.21 warns about patterns for experts.
    first = next(iter(ranks))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ranks[first],
        "lora_alpha": alphas[first],
        "rank_pattern": {TARGETS[n]: r for n, r in ranks.items() if r != ranks[first]},
        "alpha_pattern": {TARGETS[n]: x for n, x in alphas.items() if x != alphas[first]},
        "target_modules": sorted(ATTENTION[n].rpartition(".")[2] for n in ranks if n in ATTENTION),
        "target_parameters": [EXPERTS[n] for n in ranks if n in EXPERTS] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": stabilized,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
