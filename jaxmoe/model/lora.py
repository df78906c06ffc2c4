# SPDX-License-Identifier: Apache-2.0
"""LoRA: trained low-rank changes of frozen matrices, packed or dense.

    adapters  {"layers": {group: {name: Pair(a, b)}}}, the trained tree
    params    = with_adapters(base, adapters, scales), the tree that `forward` reads

A parameter that is trained in full is an array among the adapters, under its name in the base,
which it replaces: a router in its layer, "final_norm", "embed", "head".

A and B both have the rank as their first axis, since a TPU pads the last axis to 128.
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
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from jaxmoe.config import LoraConfig, ModelConfig, require
from jaxmoe.model.params import Spec, param_specs
from jaxmoe.model.stacks import as_part
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul import LowRank, Mxfp4


class Pair(NamedTuple):
    """The change scale · aᵀ·b of a stack of matrices [L, (E,) in, out]."""

    a: Leaf  # [L, (E,) R, in]
    b: Leaf  # [L, (E,) R, out]


@struct.dataclass
class Adapted:
    """A matrix and its low-rank change, as `linear` and `apply_experts` read them."""

    base: Leaf  # an array, or the experts' Mxfp4
    a: Leaf
    b: Leaf
    scale: float = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape


def lora_specs(cfg: ModelConfig, lora: LoraConfig) -> Params:
    """Return the tree of `Pair`s of Spec by the table of parameters; {} per layer where LoRA is
    off.

    A parameter that is trained in full has the table's own Spec. Raises ConfigError for a rank
    above that of the matrix.
    """
    table, fully_trained = param_specs(cfg), lora.fully_trained
    layers = table.pop("layers")
    return {name: spec for name, spec in table.items() if name in fully_trained} | {
        "layers": {
            kind: {name: _pair_spec(name, layer[name], rank) for name, rank in lora.ranks.items()}
            | {name: spec for name, spec in layer.items() if name in fully_trained}
            for kind, layer in layers.items()
        }
    }


def _pair_spec(name: str, spec: Spec, rank: int) -> Pair:
    *stack, inputs, outputs = spec.shape
    *axes, in_axis, out_axis = spec.axes
    key = "expert_rank" if "expert" in axes else "attention_rank"
    require(
        rank <= min(inputs, outputs),
        f"lora.{key} must be at most {min(inputs, outputs)}, that of {name} "
        f"[{inputs}, {outputs}], got {rank}. Try --set lora.{key}={min(inputs, outputs, 16)}.",
    )
    # No checkpoint of the base has adapters, so they have our layout and no name there.
    unstacked = replace(spec, layout="same", read="as_stored", hf="")
    return Pair(
        replace(
            unstacked, shape=(*stack, rank, inputs), axes=(*axes, None, in_axis), init="normal"
        ),
        replace(
            unstacked, shape=(*stack, rank, outputs), axes=(*axes, None, out_axis), init="zeros"
        ),
    )


def adapter_shapes(cfg: ModelConfig, lora: LoraConfig) -> Params:
    """Return the tree of jax.ShapeDtypeStruct of the trained parameters, float32."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32),
        lora_specs(cfg, lora),
        is_leaf=_is_spec,
    )


def init_adapters(
    key: PRNGKeyArray, cfg: ModelConfig, lora: LoraConfig, base: Params | None = None
) -> Params:
    """Return adapters in float32: A normal with deviation 1/sqrt(inputs), B zero.

    A parameter that is trained in full starts as a copy of `base`'s; `base` may be None without
    such.
    """
    specs, tree = jax.tree_util.tree_flatten_with_path(lora_specs(cfg, lora), is_leaf=_is_spec)
    # A split into 0 keys is an error, so without leaves one key is left over.
    keys = jax.random.split(key, max(len(specs), 1))

    def init_leaf(key: PRNGKeyArray, path: Any, spec: Spec) -> Array:
        # without an attribute in its path the leaf is not part of a Pair
        if not any(isinstance(step, jax.tree_util.GetAttrKey) for step in path):
            assert base is not None, "fully trained parameters start from the base"
            leaf = base
            for step in path:
                leaf = leaf[step.key]
            # A copy, because a step donates the adapters and the base must survive it.
            return jnp.array(leaf, jnp.float32, copy=True)
        if spec.init == "zeros":
            return jnp.zeros(spec.shape)
        return jax.random.normal(key, spec.shape) / math.sqrt(spec.shape[-1])

    leaves = [init_leaf(key, *item) for key, item in zip(keys, specs, strict=False)]
    return jax.tree.unflatten(tree, leaves)


def with_adapters(base: Params | None, adapters: Params, scales: Mapping[str, float]) -> Params:
    """Return the parameters that `forward` reads.

    They are the base's own arrays, its adapted matrices as `Adapted`, and the fully trained
    parameters in place of the base's. Without a base, all weights are trained and read as they are.
    """
    if base is None:
        return adapters

    def adapt_matrix(layer: Params, name: str, trained: Leaf) -> Leaf:
        if not isinstance(trained, Pair):
            return trained
        return Adapted(layer[name], *trained, scale=scales[name])

    layers = {
        kind: layer
        | {
            name: adapt_matrix(layer, name, trained)
            for name, trained in adapters["layers"].get(kind, {}).items()
        }
        for kind, layer in base["layers"].items()
    }
    return base | adapters | {"layers": layers}


def split_adapter(matrix: Leaf, dtype: DTypeLike) -> tuple[Leaf, LowRank | None]:
    """Return a layer's matrix as a product reads it, and its LowRank change or None.

    Packed matrices of a stack are those of the layer alone, without a copy.
    """
    low_rank = None
    if isinstance(matrix, Adapted):
        matrix, low_rank = matrix.base, LowRank(matrix.a, matrix.b, matrix.scale)
    # The kernels decode packed matrices a tile at a time. A cast would decode all of them.
    if isinstance(matrix, Mxfp4):
        return as_part(matrix) if matrix.nibbles_EDF.ndim == 4 else matrix, low_rank
    return matrix.astype(dtype), low_rank


def _is_spec(leaf: Leaf) -> bool:
    return isinstance(leaf, Spec)
