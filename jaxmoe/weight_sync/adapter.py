# SPDX-License-Identifier: Apache-2.0
"""A run's adapters as an update of their own: PEFT's two files and a manifest, no base.

Next: jaxmoe/vllm_plugin/adapter.py takes them.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.checkpoint.peft import FILE, save_adapter
from jaxmoe.checkpoint.tensor_files import read_header, read_rows
from jaxmoe.config import LoraConfig, ModelConfig
from jaxmoe.model.lora import Adapted, Pair
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.checksum import digest
from jaxmoe.weight_sync.files import WeightFile, new_version, remove
from jaxmoe.weight_sync.update import empty_manifest


def write_adapter(
    adapters: Params, cfg: ModelConfig, lora: LoraConfig, directory: str | Path, *, run: str,
    version: int,
) -> WeightFile:  # fmt: skip
    """Write `directory`/jaxmoe-<run>/<version>/ with adapters, as `save_adapter` takes them.

    Written beside it and renamed; an older one of the same version is replaced.
    Numerics: nothing is rounded. vLLM holds an adapter in the dtype of its arithmetic.
    Raises ConfigError where the directory is full or cannot be written.
    """
    with new_version(directory, run, version) as (partial_dir, final):
        save_adapter(adapters, cfg, lora, partial_dir)
        stored = read_header(partial_dir / FILE)
        planned = [(name, x.dtype, x.shape) for name, x in stored.items()]
        manifest = empty_manifest(planned, run, version)
        for name, x in stored.items():
            whole = np.concatenate([rows for _, rows in read_rows(x, x.shape[0])])
            manifest["tensors"][name]["digest"] = digest(whole)
        (partial_dir / "manifest.json").write_text(json.dumps(manifest))
    return WeightFile(manifest, {"adapter": str(final)}, close=partial(remove, final))


def adapters_in(params: Params) -> Params:
    """The adapters that `with_adapters` put beside their base."""

    def of(layer: Params) -> dict[str, Any]:
        return {n: Pair(x.a, x.b) for n, x in layer.items() if isinstance(x, Adapted)}

    return {"layers": {kind: of(layer) for kind, layer in params["layers"].items()}}
