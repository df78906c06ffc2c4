# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters served by vLLM: vLLM loads the base weights itself, and only an adapter is synced.

    vllm_options    options that such a vLLM is started with
    check_applied   before sampling: an adapter of each single matrix must change log-probs

vLLM ignores a matrix that it has no layer for, and its kernels, the base's quantisation and the
layout of the experts' matrices all decide whether an adapter is applied; so each adapted matrix is
tried. Next: jaxmoe/vllm/client/sync.py, which compares every version with the trainer.
"""

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint.base import base_folder
from jaxmoe.checkpoint.hf import load_params, save_params
from jaxmoe.checkpoint.peft.layout import AdaptedMatrix, adapted_matrices
from jaxmoe.checkpoint.peft.write import save_adapter
from jaxmoe.config import Config, ConfigError, LoraConfig, ModelConfig
from jaxmoe.config.lora import ATTENTION, EXPERTS, VLLM_RANKS
from jaxmoe.http_engine.probe import WeightSyncError
from jaxmoe.model.lora import Pair, adapter_shapes
from jaxmoe.observe.progress import report_phase
from jaxmoe.shapes import Params
from jaxmoe.vllm.client.backend import VllmBackend
from jaxmoe.vllm.engine.expert_format import FullWeights
from jaxmoe.vllm.plugin.names import ADAPTER_NAME
from jaxmoe.weight_sync.adapter_files import extract_adapters, write_adapter
from jaxmoe.weight_sync.files import WeightFile

ZERO_ADAPTER_FOLDER = "no_adapter"  # vLLM's start needs an adapter: this one changes nothing
MIN_SIGNAL_TO_NOISE = 4  # relative to the difference of two runs of the base


@dataclass(frozen=True)
class ServedAdapter:
    """A run's adapters, and the folder of the base model that vLLM serves them over."""

    lora: LoraConfig
    base: Path
    served_name = ADAPTER_NAME
    are_adapters = True
    four_bits = False  # an adapter has no experts of its own

    def vllm_options(self, cpu: bool) -> dict[str, Any]:
        """Return vLLM options beyond those of server.py. Raises ConfigError if a CPU lacks one."""
        adapted = self.lora.ranks
        if cpu and any(name in adapted for name in EXPERTS):
            raise ConfigError(
                "rollout.vllm.lora=adapter on a CPU supports adapters of attention only: vLLM has "
                "no experts with adapters there. Try --set rollout.vllm.lora=merged, or --set "
                "lora.expert_rank=0."
            )
        chosen: dict[str, Any] = {
            "load_format": "auto",
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in VLLM_RANKS if rank >= self.lora.rank),
        }
        if not any(name in adapted for name in EXPERTS):  # keeps the expert kernels without LoRA
            chosen["lora_target_modules"] = [
                f"{name[2:]}_proj" for name in ATTENTION if name in adapted
            ]
        return chosen

    def prepare_model(self, cfg: ModelConfig, dtype: str, work: Path, cpu: bool) -> Path:
        """Return the base weights' folder; on a CPU, which cannot read MXFP4, a decoded copy."""
        return _decode_base(self.base, cfg, dtype, work) if cpu else self.base

    def write_start_files(self, cfg: ModelConfig, scratch: Path) -> list[str]:
        """Write an adapter that changes nothing, and return vLLM's arguments that load it."""
        directory = scratch / ZERO_ADAPTER_FOLDER
        shutil.rmtree(directory, ignore_errors=True)
        save_adapter(zero_adapters(cfg, self.lora), cfg, self.lora, directory)
        zero_adapter = {"name": ADAPTER_NAME, "path": str(directory)}
        return ["--lora-modules", json.dumps(zero_adapter)]

    def write_file(
        self, params: Params, cfg: ModelConfig, directory: str | Path, *, run: str, version: int
    ) -> WeightFile:
        """Write the adapters among these parameters, for all replicas."""
        adapters = extract_adapters(params)
        return write_adapter(adapters, cfg, self.lora, directory, run=run, version=version)

    def keep_file(self, previous: WeightFile | None) -> None:
        """Remove the files of an older version."""
        if previous is not None:
            previous.close()

    def check_applied(
        self,
        backend: VllmBackend,
        cfg: ModelConfig,
        tokens: list[int],
        directory: str | Path,
        run: str,
    ) -> None:
        """Raise WeightSyncError if an adapter of a single matrix does not change log-probs."""

        def logps(changed: AdaptedMatrix | None) -> np.ndarray:
            adapters = zero_adapters(cfg, self.lora)
            if changed is not None:
                _fill_matrix(adapters, changed)
            with write_adapter(adapters, cfg, self.lora, directory, run=run, version=-1) as update:
                backend.load_adapter(update.update_info["adapter"])
            backend.reset_prefix_cache()
            return backend.score_tokens(tokens, cfg)[0].astype(np.float64)

        matrices = [m for m in adapted_matrices(cfg) if m.name in self.lora.ranks]
        with report_phase(
            f"trying an adapter of each of {len(matrices)} matrices in {backend.name}"
        ):
            base = logps(None)
            noise = float(np.mean(np.abs(logps(None) - base)))
            for matrix in matrices:
                moved = float(np.mean(np.abs(logps(matrix) - base)))
                if not (np.isfinite(moved) and moved > MIN_SIGNAL_TO_NOISE * noise):
                    raise WeightSyncError(
                        f"{backend.name} must apply an adapter of {matrix.target}: one of it "
                        f"alone moves the log-probs of {len(tokens)} tokens by {moved:.3g} "
                        f"nats; two runs of the same weights differ by {noise:.3g}. vLLM would "
                        "not sample from the trained weights. Try --set rollout.vllm.lora=merged."
                    )


def sent_from_config(cfg: Config) -> FullWeights | ServedAdapter:
    """Return what a run sends to its vLLMs."""
    if cfg.lora.ranks and cfg.rollout.vllm.lora == "adapter":
        return ServedAdapter(cfg.lora, base_folder(cfg))
    return FullWeights(cfg.quant.experts != "none")


def zero_adapters(cfg: ModelConfig, lora: LoraConfig) -> Params:
    """Return the tree of adapters as numpy arrays of zeros."""
    shapes = adapter_shapes(cfg, lora)
    return jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)


def _fill_matrix(adapters: Params, matrix: AdaptedMatrix) -> None:
    """Fill one layer's pair of one matrix with random values, A scaled by the matrix's inputs."""
    pair: Pair = adapters["layers"][matrix.keys[1]][matrix.name]
    dice = np.random.default_rng(3)
    pair.a[matrix.index] = dice.normal(size=pair.a[matrix.index].shape) / np.sqrt(matrix.inputs)
    pair.b[matrix.index] = dice.normal(size=pair.b[matrix.index].shape)


@cache
def _decode_base(base: Path, cfg: ModelConfig, dtype: str, work: Path) -> Path:
    """Write decoded base weights, once for the servers of a run; an earlier run's are replaced."""
    folder = work / "base"
    shutil.rmtree(folder, ignore_errors=True)
    save_params(load_params(base, cfg, "float32"), cfg, folder, dtype=dtype)
    return folder
