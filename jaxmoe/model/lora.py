# SPDX-License-Identifier: Apache-2.0
"""LoRA: trained changes of low rank beside frozen matrices, packed or dense.

    adapters  {"layers": {"sliding" | "full": {name: Pair(a, b)}}}, what is trained
    params    = with_adapters(base, adapters, scales), what `forward` reads

A holds its rank before its width, as B does: a TPU pads the last axis to 128.
Source: Hu et al. 2021, §4.1: A random, B zero, so that training begins at the base.
Next: layers.py and experts.py, which read an `Adapted` matrix.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import PRNGKeyArray

from jaxmoe.config import LoraConfig, ModelConfig, require
from jaxmoe.model.params import Spec, param_specs
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul import LowRank


class Pair(NamedTuple):
    """Of a stack of matrices [pair, (E,) in, out] the change scale · aᵀ·b."""

    a: Leaf  # [pair, (E,) R, in]
    b: Leaf  # [pair, (E,) R, out]


@struct.dataclass
class Adapted:
    """A matrix and its change, as `linear` and `experts` read them; stacked or of one layer."""

    base: Leaf  # an array, or the experts' Mxfp4
    a: Leaf
    b: Leaf
    scale: float = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape


def lora_specs(cfg: ModelConfig, lora: LoraConfig) -> Params:
    """The tree of `Pair`s of Spec, by the table of parameters; {} layers where LoRA is off.

    Raises ConfigError for a rank above that of the matrix.
    """
    layers = param_specs(cfg)["layers"]
    return {
        "layers": {
            kind: {
                name: _pair_spec(name, layers[kind][name], rank)
                for name, rank in lora.ranks.items()
            }
            for kind in layers
        }
    }


def _pair_spec(name: str, spec: Spec, rank: int) -> Pair:
    *stack, inputs, outputs = spec.shape
    *axes, into, out = spec.axes
    key = "expert_rank" if "expert" in axes else "attention_rank"
    require(
        rank <= min(inputs, outputs),
        f"lora.{key} must be at most {min(inputs, outputs)}, that of {name} "
        f"[{inputs}, {outputs}], got {rank}. Try --set lora.{key}={min(inputs, outputs, 16)}.",
    )
    hold = replace(spec, layout="same", read="compute", hf="")
    return Pair(
        replace(hold, shape=(*stack, rank, inputs), axes=(*axes, None, into), init="normal"),
        replace(hold, shape=(*stack, rank, outputs), axes=(*axes, None, out), init="zeros"),
    )


def init_adapters(key: PRNGKeyArray, cfg: ModelConfig, lora: LoraConfig) -> Params:
    """A normal with deviation 1/sqrt(inputs), B zero; float32."""
    leaves, tree = jax.tree.flatten(
        lora_specs(cfg, lora), is_leaf=lambda leaf: isinstance(leaf, Spec)
    )
    keys = jax.random.split(key, max(len(leaves), 1))
    return jax.tree.unflatten(tree, [
        jnp.zeros(spec.shape) if spec.init == "zeros"
        else jax.random.normal(key, spec.shape) / math.sqrt(spec.shape[-1])
        for key, spec in zip(keys, leaves, strict=False)
    ])  # fmt: skip


def with_adapters(base: Params, adapters: Params, scales: Mapping[str, float]) -> Params:
    """The parameters that `forward` reads: the base's own arrays, adapted ones as `Adapted`."""
    layers = {
        kind: layer | {
            name: Adapted(layer[name], *pair, scale=scales[name])
            for name, pair in adapters["layers"].get(kind, {}).items()
        }
        for kind, layer in base["layers"].items()
    }  # fmt: skip
    return base | {"layers": layers}


def split(matrix: Leaf) -> tuple[Leaf, LowRank | None]:
    """A layer's matrix, and its change as the grouped matmuls take it; None where it has none."""
    if not isinstance(matrix, Adapted):
        return matrix, None
    return matrix.base, LowRank(matrix.a, matrix.b, matrix.scale)
