# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters out as PEFT's files, which others train on, merge and serve.

The base stays where it is: an adapter is adapter_config.json and adapter_model.safetensors.
Next: jaxmoe/checkpoint/peft_layout.py, how PEFT lays the matrices out; peft_read.py, the way back.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.checkpoint.entries import entries, leaf_of
from jaxmoe.checkpoint.layouts import checkpoint_tensor, gather
from jaxmoe.checkpoint.peft_layout import (
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

# as PEFT finds them, by the ends of modules' names; "norm" alone would end all three norms
_MODULES = {
    "w_router": "mlp.router", "attn_norm": "input_layernorm",
    "moe_norm": "post_attention_layernorm", "final_norm": "model.norm", "embed": "embed_tokens",
    "head": "lm_head",
}  # fmt: skip
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
    """Write adapters, {"layers": {"sliding" | "full": {name: Pair}}}, aside and then renamed.

    Both kinds of layers have the same names, some of lora's. The experts' A is over the inputs, as
    PEFT 0.18 and, for transformers 5, PEFT from 0.19.1 have it. Ranks and alphas that differ go
    into rank_pattern and alpha_pattern, those of attention. `base` is base_model_name_or_path;
    `add_files` adds files of its own to the folder.
    Modules trained whole (router, norms, embedding, head) go into modules_to_save; of parameters
    alone, sinks and biases, PEFT keeps none.
    Numerics: nothing is rounded; dtypes stay.
    Raises ValueError for other names or shapes than the model's, ConfigError where the directory
    cannot be written or holds something, and for sinks and biases.
    """
    directory = Path(directory)
    if kept_out := sorted(
        lora.fully_trained & {*MODULES_TO_SAVE["sinks"], *MODULES_TO_SAVE["biases"]}
    ):
        raise ConfigError(
            f"an adapter's files must hold modules, and {kept_out[0]} is a parameter within one "
            f"(lora.modules_to_save={lora.modules_to_save}). Export whole weights: --merge."
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} must be new or empty for an adapter. Name another one.")
    ranks = _ranks(adapters, cfg, lora)
    alphas = {n: lora.expert_alpha if n in EXPERTS else lora.attention_alpha for n in ranks}
    spelt = {DTYPES[name]: name for name in FLOATS}
    arrays: dict[str, np.ndarray] = {}
    for matrix in adapted_matrices(cfg):
        if matrix.name in ranks:
            pair = (np.asarray(x[matrix.pair]) for x in _leaf(adapters, matrix)[:2])
            for letter, x in zip("AB", to_peft(matrix, *pair), strict=True):
                if x.dtype not in spelt:
                    raise ValueError(f"{matrix.target} must be of {', '.join(FLOATS)}: {x.dtype}.")
                arrays[tensor_of(matrix, letter, list(ranks))] = np.ascontiguousarray(x)
    arrays |= _whole_modules(adapters, cfg, lora)
    planned = [(name, spelt[array.dtype], array.shape) for name, array in arrays.items()]
    config = _config(ranks, alphas, lora.rank_stabilized) | {
        "base_model_name_or_path": base,
        "modules_to_save": [_MODULES[name] for name in _MODULES if name in lora.fully_trained]
        or None,
    }
    aside = directory.with_name(directory.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write_shard(aside / FILE, planned, iter(arrays.items()))
        (aside / CONFIG).write_text(json.dumps(config, indent=2))
        add_files(aside)
        aside.replace(directory)
    except OSError as error:
        raise ConfigError(f"{directory} must take the adapter; {error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _whole_modules(adapters: Params, cfg: ModelConfig, lora: LoraConfig) -> dict[str, np.ndarray]:
    """Tensors of what is trained whole, named and laid out as in a checkpoint."""
    return {
        f"base_model.model.{entry.name}": checkpoint_tensor(
            gather(leaf_of(adapters, entry), entry.pair), entry.layout, entry.shape,
            np.dtype(np.float32),
        )
        for entry in entries(cfg)
        if entry.keys[-1] in lora.fully_trained
    }  # fmt: skip


def _leaf(adapters: Params, matrix: AdaptedMatrix) -> Any:
    return adapters["layers"][matrix.keys[1]][matrix.name]


def _ranks(adapters: Params, cfg: ModelConfig, lora: LoraConfig) -> dict[str, int]:
    """The rank of each name, experts first. Raises ValueError where the tree is not the model's."""
    layers = adapters.get("layers", {})
    trained = [x for of in layers.values() for x in of.items() if x[0] not in lora.fully_trained]
    others = sorted(adapters.keys() - {"layers", *lora.fully_trained})
    others += sorted(n for n, x in trained if n not in TARGETS or not isinstance(x, tuple))
    if others:
        raise ValueError(
            f"an adapter's files hold low-rank matrices of {', '.join(TARGETS)}; {others[0]} is "
            "none of them. Export merged weights."
        )
    names = {kind: set(layers.get(kind, {})) - lora.fully_trained for kind in ("sliding", "full")}
    if names["sliding"] != names["full"] or not names["full"]:
        raise ValueError(f"an adapter must be of some, and the same, names in all layers: {names}.")
    ranks: dict[str, int] = {}
    for matrix in adapted_matrices(cfg):
        if matrix.name in names["full"]:
            a, b = (x.shape for x in _leaf(adapters, matrix)[:2])
            rank = ranks.setdefault(matrix.name, lora.ranks.get(matrix.name, 0))
            stack = (cfg.n_layers // 2, *([] if matrix.experts is None else [matrix.experts]))
            want = (*stack, rank, matrix.inputs), (*stack, rank, matrix.outputs)
            if (a, b) != want or rank < 1:
                raise ValueError(
                    f"{'/'.join(matrix.keys)} must have a {want[0]} and b {want[1]} for its rank "
                    f"{rank} of lora, got {a} and {b}."
                )
    return {name: ranks[name] for name in (*EXPERTS, *ATTENTION) if name in ranks}


def _config(ranks: dict[str, int], alphas: dict[str, float], stabilized: bool) -> dict[str, Any]:
    first = next(iter(ranks))  # of experts where there are: PEFT 0.21 warns of patterns for those
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
