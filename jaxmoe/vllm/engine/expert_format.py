# SPDX-License-Identifier: Apache-2.0
"""How experts in four bits reach a vLLM: as such, where it computes with them, else as values.

On CUDA vLLM has kernels that read MXFP4; on a CPU (without AMX) it has none for GPT-OSS, and gets
the same values in bfloat16 or float32, which hold them exactly. Next: vllm_engine.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxmoe.checkpoint.hf import QUANTIZATION
from jaxmoe.config import ConfigError, EngineError, ModelConfig
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.model.config import to_hf
from jaxmoe.model.rounded import round_experts
from jaxmoe.run_files import make_folder, replace_text
from jaxmoe.shapes import Leaf, Params
from jaxmoe.vllm.client.backend import VllmBackend
from jaxmoe.weight_sync.files import WeightFile
from jaxmoe.weight_sync.sent_tensors import Experts
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense

EXACT_DTYPES = ("bfloat16", "float32")  # hold every value of MXFP4, up to 6 · 2^125
PACKED_DTYPE = "bfloat16"  # of the arithmetic of vLLM's kernels that read MXFP4

MIXED = (
    "all servers of rollout.vllm.url must hold experts in the same form, got {}. Start all of them "
    "from the same export."
)


def starts_packed(four_bits: bool, dtype: str, cpu: bool) -> bool:
    """Return True if a vLLM that a run starts is to hold experts in four bits."""
    return four_bits and not cpu and dtype == PACKED_DTYPE


@dataclass(frozen=True)
class FullWeights:
    """Weights that are sent in full. `ServedAdapter` has the same methods for adapters."""

    four_bits: bool = False  # load() gets experts whose values MXFP4 holds
    served_name: str = ""  # of the model in a request; "": the only one
    are_adapters: bool = False

    def vllm_options(self, cpu: bool) -> dict[str, Any]:
        return {}

    def prepare_model(self, cfg: ModelConfig, dtype: str, work: Path, cpu: bool) -> Path:
        """Write a checkpoint folder with a config.json and no weights."""
        folder, packed = work / "model", starts_packed(self.four_bits, dtype, cpu)
        make_folder(folder)
        config = to_hf(cfg, dtype=dtype) | ({"quantization_config": QUANTIZATION} if packed else {})
        replace_text(folder / "config.json", json.dumps(config, indent=2))
        return folder

    def write_start_files(self, cfg: ModelConfig, scratch: Path) -> list[str]:
        return []

    def write_file(self, *_: Any, **__: Any) -> None:
        """Write nothing: the transport does."""

    def keep_file(self, previous: WeightFile | None) -> WeightFile | None:
        """Return the file of an older version, whose pages the next one reuses."""
        return previous

    def check_applied(self, *_: Any) -> None:
        """Check nothing: what vLLM loaded shows in the digests."""


def choose_sent_experts(backends: Sequence[VllmBackend], four_bits: bool) -> Experts:
    """Return the form in which these vLLMs take experts, of a run with or without `four_bits`.

    Raises ConfigError if they differ, hold four bits that the run does not train, or compute in a
    dtype that does not hold the values.
    """
    forms: dict[str, str] = {}
    for backend in backends:
        try:
            workers = backend.loaded_state()
        except RequestFailed:  # checked again with the first weights
            continue
        for worker in workers:
            form = forms[backend.name] = str(worker.get("experts") or "dense")
            dtype = str((worker.get("model") or {}).get("dtype") or "")
            if four_bits and dtype and dtype not in EXACT_DTYPES:
                raise ConfigError(
                    "quant.experts=mxfp4 needs a vLLM in bfloat16 or float32, since values "
                    f"reach 6 · 2^125; {backend.name} computes in {dtype}. Start it with --dtype "
                    "bfloat16."
                )
            if form == "mxfp4" and not four_bits:
                raise ConfigError(
                    f"{backend.name} holds experts in four bits, and this run trains dense ones. "
                    "Start it from an export in bfloat16, or try --set quant.experts=mxfp4."
                )
    if len(set(forms.values())) > 1:
        raise ConfigError(MIXED.format(", ".join(f"{n}: {form}" for n, form in forms.items())))
    return "packed" if "mxfp4" in forms.values() else "dense"


def pack_for_sync(params: Params) -> Params:
    """Return params whose experts are packed; dense ones must have values of MXFP4.

    Raises EngineError for values that four bits do not hold, and for NaN and infinity.
    """
    packed = round_experts(params) if not _is_packed(params) else params
    for kind, layer in params["layers"].items():
        for name, leaf in layer.items():
            actual: Leaf = packed["layers"][kind][name]
            if isinstance(leaf, Mxfp4) or not isinstance(actual, Mxfp4):
                continue
            if not bool(jnp.isfinite(leaf).all()):
                raise EngineError(
                    f"layers/{kind}/{name} must have finite values, and has NaN or infinity: these "
                    "weights broke in training. Load an earlier checkpoint."
                )
            if not bool((mxfp4_to_dense(actual, leaf.dtype) == leaf).all()):
                raise EngineError(
                    f"layers/{kind}/{name} has values that MXFP4 does not hold, and vLLM takes "
                    "four bits only. Round them first, with quant.experts=mxfp4."
                )
    return packed


def _is_packed(params: Params) -> bool:
    return any(isinstance(x, Mxfp4) for layer in params["layers"].values() for x in layer.values())
