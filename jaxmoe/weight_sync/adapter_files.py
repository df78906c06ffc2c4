# SPDX-License-Identifier: Apache-2.0
"""A run's LoRA adapters as a weight update: the two files of PEFT and a manifest, without the base.

Next: jaxmoe/vllm/plugin/adapter_loading.py, which loads them into vLLM.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.checkpoint.peft.write import FILE, save_adapter
from jaxmoe.checkpoint.tensor_files import read_header, read_tensor_rows
from jaxmoe.config import LoraConfig, ModelConfig
from jaxmoe.model.lora import Adapted, Pair
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.checksum import digest_array
from jaxmoe.weight_sync.files import WeightFile, remove_version, stage_version
from jaxmoe.weight_sync.update import empty_manifest


def write_adapter(
    adapters: Params,
    cfg: ModelConfig,
    lora: LoraConfig,
    directory: str | Path,
    *,
    run: str,
    version: int,
) -> WeightFile:
    """Write `directory`/jaxmoe-<run>/<version>/ with adapters in `save_adapter`'s form.

    The files are written to a temporary folder that is then renamed; an existing folder of the same
    version is replaced. Numerics: nothing is rounded. vLLM stores an adapter in its compute dtype.
    Raises ConfigError if the directory is full or not writable.
    """
    with stage_version(directory, run, version) as (partial_dir, final):
        save_adapter(adapters, cfg, lora, partial_dir)
        stored = read_header(partial_dir / FILE)
        planned = [(name, tensor.dtype, tensor.shape) for name, tensor in stored.items()]
        manifest = empty_manifest(planned, run, version)
        for name, tensor in stored.items():
            array = np.concatenate([rows for _, rows in read_tensor_rows(tensor, tensor.shape[0])])
            manifest["tensors"][name]["digest"] = digest_array(array)
        (partial_dir / "manifest.json").write_text(json.dumps(manifest))
    return WeightFile(manifest, {"adapter": str(final)}, close=partial(remove_version, final))


def extract_adapters(params: Params) -> Params:
    """Return the adapters that `with_adapters` placed in `params`, without their base weights."""

    def extract_layer(layer: Params) -> dict[str, Any]:
        return {n: Pair(x.a, x.b) for n, x in layer.items() if isinstance(x, Adapted)}

    return {"layers": {kind: extract_layer(layer) for kind, layer in params["layers"].items()}}
