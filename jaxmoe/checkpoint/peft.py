# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as PEFT spells them, which vLLM serves beside the unchanged base weights.

An adapter adds (alpha / rank)·B·A to a module's weight; A is [rank, in], B is [out, rank], and the
module goes by its name in a checkpoint, "model.layers.3.self_attn.q_proj".
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxmoe.checkpoint.tensor_files import DTYPES, FLOATS, write_shard
from jaxmoe.config import ConfigError
from jaxmoe.shapes import Leaf

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(
    adapter: Mapping[str, tuple[Leaf, Leaf]], directory: str | Path, *, rank: int, alpha: float
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, aside and then renamed.

    Raises ValueError for matrices of another rank or dtype, ConfigError where the directory
    cannot be written or holds something.
    """
    directory = Path(directory)
    if directory.exists():
        raise ConfigError(f"{directory} must be new for an adapter. Name another one.")
    if not adapter or rank < 1:
        raise ValueError(f"an adapter must have modules and a rank above 0, got rank {rank}.")
    arrays: dict[str, np.ndarray] = {}
    spelt = {DTYPES[name]: name for name in FLOATS}
    for module, pair in sorted(adapter.items()):
        a, b = (np.ascontiguousarray(np.asarray(matrix)) for matrix in pair)
        if a.ndim != 2 or b.ndim != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
            raise ValueError(
                f"{module} must have A [{rank}, in] and B [out, {rank}], got {a.shape}, {b.shape}."
            )
        if not {a.dtype, b.dtype} <= spelt.keys():
            raise ValueError(
                f"{module} must have matrices of {', '.join(map(str, spelt))}, got {a.dtype} and "
                f"{b.dtype}."
            )
        arrays[f"base_model.model.{module}.lora_A.weight"] = a
        arrays[f"base_model.model.{module}.lora_B.weight"] = b
    planned = [(name, spelt[array.dtype], array.shape) for name, array in arrays.items()]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter}),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    aside = directory.with_name(directory.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write_shard(aside / FILE, planned, iter(arrays.items()))
        (aside / CONFIG).write_text(json.dumps(config, indent=2))
        aside.replace(directory)
    except OSError as error:
        raise ConfigError(f"{directory} must take the adapter; {error}.") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
