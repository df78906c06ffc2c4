# SPDX-License-Identifier: Apache-2.0
"""LoRA: trained changes of low rank beside frozen matrices, packed or dense.

    adapters  {"layers": {"sliding" | "full": {name: Pair(a, b)}}}, what is trained
    params    = with_adapters(base, adapters, scales), what `forward` reads

What is to be trained whole is an array among the adapters, under its name in the base, in whose
place it stands: a router in its layer, "final_norm", "embed", "head".

A holds its rank before its width, as B does: a TPU pads the last axis to 128.
Source: Hu et al. 2021, §4.1: A random, B zero, so that training begins at the base.
Next: layers.py and experts.py, which read an `Adapted` matrix.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, PRNGKeyArray

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

    Of what is trained whole it has the table's own Spec.
    Raises ConfigError for a rank above that of the matrix.
    """
    table, whole = param_specs(cfg), lora.fully_trained
    layers = table.pop("layers")
    return {name: spec for name, spec in table.items() if name in whole} | {
        "layers": {
            kind: {name: _pair_spec(name, layer[name], rank) for name, rank in lora.ranks.items()}
            | {name: spec for name, spec in layer.items() if name in whole}
            for kind, layer in layers.items()
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


def adapter_shapes(cfg: ModelConfig, lora: LoraConfig) -> Params:
    """The tree of jax.ShapeDtypeStruct of what is trained: float32."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), lora_specs(cfg, lora),
        is_leaf=_is_spec,
    )  # fmt: skip


def init_adapters(
    key: PRNGKeyArray, cfg: ModelConfig, lora: LoraConfig, base: Params | None = None
) -> Params:
    """A normal with deviation 1/sqrt(inputs), B zero; float32. What is trained whole is a copy of
    the `base`'s, without which there may be nothing such.
    """
    found, tree = jax.tree_util.tree_flatten_with_path(lora_specs(cfg, lora), is_leaf=_is_spec)
    keys = jax.random.split(key, max(len(found), 1))

    def new(key: PRNGKeyArray, path: Any, spec: Spec) -> Array:
        if not any(isinstance(step, jax.tree_util.GetAttrKey) for step in path):  # not of a Pair
            assert base is not None, "what is trained whole begins as the base has it"
            held = base
            for step in path:
                held = held[step.key]
            return jnp.array(held, jnp.float32, copy=True)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape)
        return jax.random.normal(key, spec.shape) / math.sqrt(spec.shape[-1])

    leaves = [new(key, *item) for key, item in zip(keys, found, strict=False)]
    return jax.tree.unflatten(tree, leaves)


def with_adapters(base: Params, adapters: Params, scales: Mapping[str, float]) -> Params:
    """The parameters that `forward` reads: the base's own arrays, adapted ones as `Adapted`, and
    in the place of the base's what is trained whole.
    """

    def beside(layer: Params, name: str, trained: Leaf) -> Leaf:
        if not isinstance(trained, Pair):
            return trained
        return Adapted(layer[name], *trained, scale=scales[name])

    layers = {
        kind: layer | {
            name: beside(layer, name, trained)
            for name, trained in adapters["layers"].get(kind, {}).items()
        }
        for kind, layer in base["layers"].items()
    }  # fmt: skip
    return base | adapters | {"layers": layers}


def split(matrix: Leaf) -> tuple[Leaf, LowRank | None]:
    """A layer's matrix, and its change as the grouped matmuls take it; None where it has none."""
    if not isinstance(matrix, Adapted):
        return matrix, None
    return matrix.base, LowRank(matrix.a, matrix.b, matrix.scale)


def _is_spec(leaf: Leaf) -> bool:
    return isinstance(leaf, Spec)
