# SPDX-License-Identifier: Apache-2.0
"""Adapters served as they are: vLLM loads the base by itself, and an adapter is what is synced.

    served     options and folders that such a vLLM is started with
    check      before anything is sampled: an adapter of each matrix alone must move log-probs

vLLM skips what it has no layer for, and its kernels, its base's quantisation and the layout of the
experts' matrices all decide whether an adapter is applied; so each adapted matrix is tried.
Next: jaxmoe/vllm/sync.py, which compares every version with the trainer.
"""

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint.hf import load_params, save_params
from jaxmoe.checkpoint.peft import save_adapter
from jaxmoe.checkpoint.peft_layout import AdaptedMatrix, adapted_matrices
from jaxmoe.config import ConfigError, LoraConfig, ModelConfig
from jaxmoe.config.lora import ATTENTION, EXPERTS, VLLM_RANKS
from jaxmoe.model.lora import Pair, adapter_shapes
from jaxmoe.observe.progress import phase
from jaxmoe.shapes import Params
from jaxmoe.vllm.backend import Backend
from jaxmoe.vllm.request import score
from jaxmoe.vllm.sync import WeightSyncError
from jaxmoe.weight_sync.adapter import write_adapter

ABOVE_NOISE = 4  # times the difference of the base with itself


@dataclass(frozen=True)
class ServedAdapter:
    """What a vLLM serves adapters of: a run's, over the base in a folder."""

    lora: LoraConfig
    base: Path

    def options(self, cpu: bool) -> dict[str, Any]:
        """vLLM's options beside those of server.py. Raises ConfigError for what a CPU has not."""
        adapted = self.lora.ranks
        if cpu and any(name in adapted for name in EXPERTS):
            raise ConfigError(
                "rollout.vllm.lora=adapter on a CPU needs adapters of attention alone: vLLM has no "
                "experts with adapters there. Try --set rollout.vllm.lora=merged, or --set "
                "lora.expert_rank=0."
            )
        chosen: dict[str, Any] = {
            "load_format": "auto", "enable_lora": True, "max_loras": 1,
            "max_lora_rank": next(rank for rank in VLLM_RANKS if rank >= self.lora.rank),
        }  # fmt: skip
        if not any(name in adapted for name in EXPERTS):  # whose kernels stay those without
            chosen["lora_target_modules"] = [
                f"{name[2:]}_proj" for name in ATTENTION if name in adapted
            ]
        return chosen

    def folder(self, cfg: ModelConfig, dtype: str, work: Path, cpu: bool) -> Path:
        """Of the base's weights: the checkpoint itself, on a CPU decoded, which reads no MXFP4."""
        return _decoded(self.base, cfg, dtype, work) if cpu else self.base

    def write_none(self, cfg: ModelConfig, directory: Path) -> None:
        """An adapter that changes nothing, in PEFT's files."""
        shutil.rmtree(directory, ignore_errors=True)
        save_adapter(zeros(cfg, self.lora), cfg, self.lora, directory)

    def check(
        self, backend: Backend, cfg: ModelConfig, tokens: list[int], directory: str | Path, run: str
    ) -> None:
        """Raises WeightSyncError, naming the matrix, for one that an adapter of it alone leaves the
        log-probs of these tokens as the base has them.
        """

        def logps(changed: AdaptedMatrix | None) -> np.ndarray:
            adapters = zeros(cfg, self.lora)
            if changed is not None:
                _fill(adapters, changed)
            with write_adapter(adapters, cfg, self.lora, directory, run=run, version=-1) as update:
                backend.load_adapter(update.update_info["adapter"])
            backend.reset_prefix_cache()
            return score(backend, tokens, cfg)[0].astype(np.float64)

        matrices = [m for m in adapted_matrices(cfg) if m.name in self.lora.ranks]
        with phase(f"trying an adapter of each of {len(matrices)} matrices in {backend.name}"):
            base = logps(None)
            noise = float(np.mean(np.abs(logps(None) - base)))
            for matrix in matrices:
                moved = float(np.mean(np.abs(logps(matrix) - base)))
                if not (np.isfinite(moved) and moved > ABOVE_NOISE * noise):
                    raise WeightSyncError(
                        f"{backend.name} must apply an adapter of {matrix.target}: one of it alone "
                        f"moves the log-probs of {len(tokens)} tokens by {moved:.3g} nats, and "
                        f"twice the same weights differ by {noise:.3g}. It would sample from other "
                        "weights than are trained. Try --set rollout.vllm.lora=merged."
                    )


def zeros(cfg: ModelConfig, lora: LoraConfig) -> Params:
    """The tree of adapters, numpy, all 0."""
    shapes = adapter_shapes(cfg, lora)
    return jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)


def _fill(adapters: Params, matrix: AdaptedMatrix) -> None:
    """Of one layer's matrix: changes as large as what it multiplies, of every expert."""
    pair: Pair = adapters["layers"][matrix.keys[1]][matrix.name]
    dice = np.random.default_rng(3)
    pair.a[matrix.pair] = dice.normal(size=pair.a[matrix.pair].shape) / np.sqrt(matrix.inputs)
    pair.b[matrix.pair] = dice.normal(size=pair.b[matrix.pair].shape)


@cache
def _decoded(base: Path, cfg: ModelConfig, dtype: str, work: Path) -> Path:
    """Once for the servers of a run; one that a run before left is of other weights, maybe."""
    folder = work / "base"
    shutil.rmtree(folder, ignore_errors=True)
    save_params(load_params(base, cfg, "float32"), cfg, folder, dtype=dtype)
    return folder
