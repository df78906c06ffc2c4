# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in four bits as others write them: made without the code that they test."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxmoe.config import ModelConfig
from jaxmoe.model.params import Spec, param_specs

EXPERTS = ("gate_up_proj", "down_proj")
# E = 3, D = 64, F = 128, 2F = 256: a transposed matrix or scale has another shape
CFG = ModelConfig(
    vocab_size=97,
    d_model=64,
    n_layers=4,
    n_q_heads=6,
    n_kv_heads=3,
    head_dim=16,
    n_experts=3,
    experts_per_token=2,
    d_expert=128,
    sliding_window=9,
    dtype="bfloat16",
    vocab_multiple=40,
)
LARGE = replace(CFG, n_experts=48, d_model=1024, d_expert=1088)  # some hundred MB


def random_tensors(cfg: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Every byte random, every scale that leaves values finite; the rest float32 of few bits."""
    rng = np.random.default_rng(seed)
    tensors = dict[str, np.ndarray]()
    flat = jax.tree.leaves_with_path(param_specs(cfg), is_leaf=lambda s: isinstance(s, Spec))
    for path, spec in flat:
        *_, kind, _ = ["", ""] + [str(getattr(step, "key", "")) for step in path]
        layers = range(("sliding", "full").index(kind), cfg.n_layers, 2) if "{}" in spec.hf else [0]
        for layer in layers:
            name = spec.hf.format(layer)
            shape = spec.shape[1:] if spec.is_stacked else spec.shape
            if name.endswith(EXPERTS):
                n_experts, summed, out = shape
                scales = rng.integers(0, 255, (n_experts, out, summed // 32), np.uint8)
                tensors[name + "_scales"] = scales
                tensors[name + "_blocks"] = finite(
                    rng.integers(0, 256, (*scales.shape, 16), np.uint8), scales
                )
                continue
            shape = shape[::-1] if spec.layout in ("transpose", "transpose_pad") else shape
            if spec.layout in ("pad_rows", "transpose_pad"):
                shape = (cfg.vocab_size, *shape[1:])
            tensors[name] = rng.integers(-64, 64, shape).astype(np.float32) / 32
    return tensors


def finite(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes of at most 1.5 under 2^127, of at most 3 under 2^126; smaller scales hold all."""
    max_magnitude = np.select([scales == 254, scales == 253], [3, 5], 7).astype(np.uint8)[..., None]
    low, high = blocks & 15, blocks >> 4
    low, high = ((code & 8) | np.minimum(code & 7, max_magnitude) for code in (low, high))
    return low | (high << 4)


def write(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    return directory
