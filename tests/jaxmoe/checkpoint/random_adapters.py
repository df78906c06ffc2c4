# SPDX-License-Identifier: Apache-2.0
"""Adapters with every entry nonzero, and what they add, written plainly."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.checkpoint.merge import merge_layer
from jaxmoe.config import ModelConfig
from jaxmoe.model.lora import Adapted, Pair, with_adapters
from jaxmoe.model.params import Spec, param_specs
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4
from tests.jaxmoe.small_models import SEVEN_EXPERTS

# D = 48, F = 40, 2F = 80, N·H = 96, K·H = 32: no two sizes of a matrix agree
CFG = replace(
    SEVEN_EXPERTS, n_layers=4, n_kv_heads=2, n_experts=3, experts_per_token=2, vocab_multiple=40
)
NAMES = ("w_q", "w_k", "w_v", "w_o", "w_gate_up", "w_down")
EXPERTS = NAMES[4:]


def random_adapters(cfg: ModelConfig, ranks: dict[str, int], seed: int = 0, size: float = 1.0):
    """{"layers": {"sliding" | "full": {name: Pair}}} for the names that have a rank."""
    rng = np.random.default_rng(seed)

    def pair(spec: Spec, rank: int):
        *stack, inputs, outputs = spec.shape
        return Pair(
            *(size * rng.standard_normal((*stack, rank, n), np.float32) for n in (inputs, outputs))
        )

    specs = param_specs(cfg)["layers"]
    return {
        "layers": {
            kind: {name: pair(specs[kind][name], rank) for name, rank in ranks.items()}
            for kind in ("sliding", "full")
        }
    }


def delta(adapters, kind: str, name: str, scale: float) -> np.ndarray:
    """scale · aᵀ b in float64, [pair, (E,) in, out]."""
    a, b = (np.asarray(x, np.float64) for x in adapters["layers"][kind][name])
    return scale * np.einsum("...rd,...rf->...df", a, b)


def is_same_tree(actual, expected) -> bool:
    is_equal = jax.tree.map(lambda x, y: x.dtype == y.dtype and (x == y).all(), actual, expected)
    return all(jax.tree.leaves(is_equal))


def merge_adapters(base, adapters, scales, *, dtype=None):
    """The base with W + scale · aᵀ b for every adapted matrix, on the host and rounded once."""

    def merge_leaf(leaf):
        if not isinstance(leaf, Adapted):
            return leaf
        packed = isinstance(leaf.base, Mxfp4)
        out_dtype = jnp.dtype(dtype or ("bfloat16" if packed else leaf.base.dtype))
        return np.stack([merge_layer(leaf, i).astype(out_dtype) for i in range(leaf.shape[0])])

    adapted = with_adapters(base, adapters, scales)
    return jax.tree.map(merge_leaf, adapted, is_leaf=lambda leaf: hasattr(leaf, "shape"))
