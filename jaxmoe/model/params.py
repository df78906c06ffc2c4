# SPDX-License-Identifier: Apache-2.0
"""The one table of parameters: shape, axes, initialiser, dtype when read, Hugging Face name.

Initial values, abstract shapes, shardings, import, export and counts are maps over
`param_specs(cfg)`; nothing else declares a parameter. Layers of a group are stacked, since
`forward` scans over them (jaxmoe/config/layer_plan.py maps the number of a layer to both):

    params["layers"][group][name][index, ...]      groups of GPT-OSS: "sliding", "full"

The layout differs from the checkpoint's where it matters to a compiler: gate and up are contiguous
halves instead of interleaved columns, matrices are [in, out], and the vocabulary is padded.
`Spec.layout` names the conversion; jaxmoe/checkpoint/hf.py performs it.

Matrices are read in the model's dtype; router, norms, biases and sinks as they are stored, as a
rule in float32. Code that passes weights on must round exactly what `Spec.read` names. Otherwise an
engine samples from other weights than the trainer's: a rounded router switches experts.
Next: jaxmoe/model/forward.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PRNGKeyArray

from jaxmoe.config import ModelConfig, require
from jaxmoe.config.layer_plan import BlockKind, LayerGroup
from jaxmoe.model.stacks import is_packed, stacked_shape
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4

STACK = "stack"  # the logical axis of the layers of a group
Layout = Literal["same", "transpose", "gate_up", "gate_up_bias", "pad_rows", "transpose_pad"]


@dataclass(frozen=True)
class Spec:
    """One parameter."""

    shape: tuple[int, ...]  # as stored here
    axes: tuple[str | None, ...]  # logical axes, for parallel/sharding.py; STACK of layers is first
    init: Literal["normal", "ones", "zeros"]
    hf: str  # name in a checkpoint, with {} for the layer number
    layout: Layout = "same"  # conversion from the checkpoint's array
    read: Literal["compute", "as_stored"] = "as_stored"  # in the model's dtype, or unrounded

    @property
    def is_stacked(self) -> bool:
        """True for a parameter of layers."""
        return self.axes[:1] == (STACK,)

    @property
    def is_packable(self) -> bool:
        """True for the experts' two matrices, which may be packed in four bits."""
        return "expert" in self.axes and self.read == "compute"


def block_specs(cfg: ModelConfig, kind: BlockKind | None = None) -> dict[str, Spec]:
    """Return the Specs of one layer, not stacked; without a kind, with sinks and biases."""
    d, h, f, e = cfg.d_model, cfg.head_dim, cfg.d_expert, cfg.n_experts
    n, k = cfg.n_q_heads, cfg.n_kv_heads
    attn, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    block = {
        "attn_norm": Spec((d,), ("embed",), "ones", "model.layers.{}.input_layernorm.weight"),
        "w_q": Spec(
            (d, n * h), ("embed", "heads"), "normal", attn + "q_proj.weight", "transpose", "compute"
        ),
        "b_q": Spec((n * h,), ("heads",), "zeros", attn + "q_proj.bias"),
        "w_k": Spec(
            (d, k * h), ("embed", "kv"), "normal", attn + "k_proj.weight", "transpose", "compute"
        ),
        "b_k": Spec((k * h,), ("kv",), "zeros", attn + "k_proj.bias"),
        "w_v": Spec(
            (d, k * h), ("embed", "kv"), "normal", attn + "v_proj.weight", "transpose", "compute"
        ),
        "b_v": Spec((k * h,), ("kv",), "zeros", attn + "v_proj.bias"),
        "w_o": Spec(
            (n * h, d), ("heads", "embed"), "normal", attn + "o_proj.weight", "transpose", "compute"
        ),
        "b_o": Spec((d,), ("embed",), "zeros", attn + "o_proj.bias"),
        "sinks": Spec((n,), (None,), "zeros", attn + "sinks"),
        "moe_norm": Spec(
            (d,), ("embed",), "ones", "model.layers.{}.post_attention_layernorm.weight"
        ),
        "w_router": Spec((d, e), ("embed", None), "normal", mlp + "router.weight", "transpose"),
        "b_router": Spec((e,), (None,), "zeros", mlp + "router.bias"),
        "w_gate_up": Spec(
            (e, d, 2 * f),
            ("expert", "embed", "hidden"),
            "normal",
            mlp + "experts.gate_up_proj",
            "gate_up",
            "compute",
        ),
        "b_gate_up": Spec(
            (e, 2 * f),
            ("expert", "hidden"),
            "zeros",
            mlp + "experts.gate_up_proj_bias",
            "gate_up_bias",
        ),
        "w_down": Spec(
            (e, f, d),
            ("expert", "hidden", "embed"),
            "normal",
            mlp + "experts.down_proj",
            "same",
            "compute",
        ),
        "b_down": Spec((e, d), ("expert", "embed"), "zeros", mlp + "experts.down_proj_bias"),
    }
    return {
        name: spec
        for name, spec in block.items()
        if kind is None
        or ((kind.sinks or name != "sinks") and (kind.biases or not name.startswith("b_")))
    }


def fill_layer(layer: Params, cfg: ModelConfig) -> Params:
    """Return a layer as the ops read it: a sink of −inf and biases of 0 where its kind has none."""
    constants = {
        name: jnp.full(spec.shape, -jnp.inf if name == "sinks" else 0.0, jnp.float32)
        for name, spec in block_specs(cfg).items()
        if name not in layer
    }
    return layer | constants if constants else layer


def param_specs(cfg: ModelConfig) -> Params:
    """Return the tree of Spec for a model: the only declaration of its parameters."""
    d, v = cfg.d_model, cfg.padded_vocab

    def stack_spec(spec: Spec, group: LayerGroup) -> Spec:
        return replace(spec, shape=(group.size, *spec.shape), axes=(STACK, *spec.axes))

    return {
        "embed": Spec(
            (v, d), (None, "width"), "normal", "model.embed_tokens.weight", "pad_rows", "compute"
        ),
        "layers": {
            group.name: {n: stack_spec(s, group) for n, s in block_specs(cfg, group.kind).items()}
            for group in cfg.plan.groups.values()
        },
        "final_norm": Spec((d,), ("embed",), "ones", "model.norm.weight"),
        "head": Spec(
            (d, v), (None, "vocab"), "normal", "lm_head.weight", "transpose_pad", "compute"
        ),
    }


def value_head_specs(cfg: ModelConfig) -> Params:
    """Return the Specs of a critic's value head; its backbone has those of the table above."""
    return {
        "w_value": Spec((cfg.d_model,), ("embed",), "zeros", "score.weight"),
        "b_value": Spec((), (), "zeros", "score.bias"),
    }


def _is_spec(leaf: Leaf) -> bool:
    return isinstance(leaf, Spec)


def map_specs(fn, cfg: ModelConfig, *trees: Params) -> Params:
    """Map fn(spec, *leaves) over the table and trees of its structure."""
    return jax.tree.map(fn, param_specs(cfg), *trees, is_leaf=_is_spec)


def abstract_params(cfg: ModelConfig, dtype: str = "float32") -> Params:
    """Return the tree of jax.ShapeDtypeStruct; costs no memory at any size."""
    return map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype)), cfg)


def abstract_base(cfg: ModelConfig) -> Params:
    """Return the shapes of the frozen weights that adapters are trained on; costs no memory.

    Each parameter has the dtype it is read in, and expert matrices are packed in four bits.
    """

    def abstract_leaf(spec: Spec) -> Leaf:
        if not spec.is_packable:
            return jax.ShapeDtypeStruct(spec.shape, read_dtype(spec, cfg, "float32"))
        *stack, height, width = spec.shape
        rows = height // 2, height // GROUP
        shapes: Leaf = [jax.ShapeDtypeStruct((*stack, n, width), jnp.uint8) for n in rows]
        return Mxfp4(*shapes)

    return map_specs(abstract_leaf, cfg)


def check_param_shapes(params: Params, cfg: ModelConfig) -> None:
    """Raise ConfigError if params do not have the shapes of the config, naming the first that
    differs.

    The head may be missing: a critic's backbone has none.
    """
    expected_params = {k: v for k, v in abstract_params(cfg).items() if k in params or k != "head"}
    expected, actual = param_shapes(expected_params), param_shapes(params)
    for name in [*expected, *actual]:
        require(
            expected.get(name) == actual.get(name),
            f"params {name} must have shape {expected.get(name)} by the model's config, got "
            f"{actual.get(name)}: these params belong to another config.",
        )


def param_shapes(params: Params) -> dict[str, tuple[int, ...] | str]:
    """Return each parameter's shape by its path; for packed experts that of the decoded matrices.

    A leaf that is packed but cannot be (a matrix of no expert, scales that do not fit, rows that
    are no multiple of 64) is described by a text, which equals no shape.
    """
    flat, _ = jax.tree.flatten_with_path(params, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): stacked_shape(leaf)
        for path, leaf in flat
    }


def read_dtype(spec: Spec, cfg: ModelConfig, stored_dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype in which the forward reads a parameter that is stored in `stored_dtype`."""
    return jnp.dtype(cfg.dtype if spec.read == "compute" else stored_dtype)


def cast_for_forward(params: Params, cfg: ModelConfig, shared: Params | None = None) -> Params:
    """Return a copy of the parameters, each in the dtype in which the forward reads it.

    forward(cast_for_forward(params, cfg), …) equals forward(params, …) to the bit. Packed experts
    stay packed, and adapted matrices stay adapted. Arrays that are part of `shared` are not copied,
    nor are packed experts, which no step donates.
    """
    shared_ids = {id(x) for x in jax.tree.leaves(shared)}

    def keeps(x: Leaf) -> bool:
        return id(x) in shared_ids or is_packed(x)

    def read_leaf(spec: Spec, x: Leaf) -> Leaf:
        if not hasattr(x, "dtype"):  # packed or adapted
            return jax.tree.map(
                lambda part: part if keeps(part) else jnp.copy(part), x, is_leaf=is_packed
            )
        # A copy even if the dtype is right, because the trainer donates its own arrays at the next
        # step.
        return x if id(x) in shared_ids else jnp.array(x, read_dtype(spec, cfg, x.dtype), copy=True)

    return map_specs(read_leaf, cfg, params)


def init_params(key: PRNGKeyArray, cfg: ModelConfig, dtype: str = "float32") -> Params:
    """Return random weights: matrices normal with deviation 1/sqrt(fan in), biases and sinks 0.

    The embedding too has 1/sqrt(d_model): with larger rows the layers' first contributions drown in
    the residual stream, and a small model learns half as fast.
    """
    leaves, tree = jax.tree.flatten(param_specs(cfg), is_leaf=_is_spec)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [_init_leaf(k, s, jnp.dtype(dtype)) for k, s in zip(keys, leaves, strict=True)]
    )


def _init_leaf(key: PRNGKeyArray, spec: Spec, dtype: jnp.dtype) -> Array:
    if spec.init != "normal":
        return jnp.full(spec.shape, 1 if spec.init == "ones" else 0, dtype)
    # A row of the embedding is read by a look-up and not by a matmul, so its width stands for the
    # fan-in.
    fan_in = spec.shape[-1] if spec.axes[-1] == "width" else spec.shape[-2]
    # Drawn in float32, so that the weights of a narrower dtype are the same draw, rounded.
    return (jax.random.normal(key, spec.shape, jnp.float32) / math.sqrt(fan_in)).astype(dtype)


def unpadded_size(spec: Spec, cfg: ModelConfig) -> int:
    """Return the number of entries of a parameter, without the padding of the vocabulary."""
    size = math.prod(spec.shape)
    # Every such size is a multiple of the padded vocabulary, so the division is exact.
    padded = spec.layout in ("pad_rows", "transpose_pad")
    return size // cfg.padded_vocab * cfg.vocab_size if padded else size


def count_params(cfg: ModelConfig) -> tuple[int, int]:
    """Return (all parameters, parameters active per token); vocabulary padding is not counted.

    The second leaves out the embedding look-up, as the model card does.
    """
    specs = jax.tree.leaves(param_specs(cfg))
    total = sum(unpadded_size(spec, cfg) for spec in specs)
    experts = sum(unpadded_size(spec, cfg) for spec in specs if "expert" in spec.axes)
    active = total - experts + experts * cfg.experts_per_token // cfg.n_experts
    return total, active - cfg.vocab_size * cfg.d_model
