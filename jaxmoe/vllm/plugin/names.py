# SPDX-License-Identifier: Apache-2.0
"""Names of tensors in a GPT-OSS checkpoint or adapter, and of the vLLM parameters that they become.

Next: loaded_state.py.
"""

import re
from collections.abc import Mapping
from typing import Any

_RENAMED = {
    "gate_up_proj": "routed_experts.w13_weight",
    "gate_up_proj_blocks": "routed_experts.w13_weight",
    "gate_up_proj_scales": "routed_experts.w13_weight_scale",
    "gate_up_proj_bias": "routed_experts.w13_bias",
    "down_proj": "routed_experts.w2_weight",
    "down_proj_blocks": "routed_experts.w2_weight",
    "down_proj_scales": "routed_experts.w2_weight_scale",
    "down_proj_bias": "routed_experts.w2_bias",
}
MXFP4_GROUP = 32  # values under one scale
PACKED_ENDS = ("_blocks", "_scales")  # of the names of tensors of bytes
ADAPTER_NAME, ADAPTER_ID = "jaxmoe_adapter", 1  # of the adapter that vLLM serves, in requests
LAYER = re.compile(r"layers\.(\d+)\.")
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "num_experts_per_tok",
    "intermediate_size",
    "sliding_window",
)
CONSTANTS = (
    "rms_norm_eps",
    "swiglu_alpha",
    "swiglu_limit",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)


def checkpoint_shapes(
    model: Mapping[str, Any], *, packed: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a checkpoint with these sizes of config.json.

    packed: experts are in MXFP4, as tensors of blocks and of scales.
    """
    d, v, f = model["hidden_size"], model["vocab_size"], model["intermediate_size"]
    e, h = model["num_local_experts"], model["head_dim"]
    n = model["num_attention_heads"]
    out = {"q": n * h, "k": model["num_key_value_heads"] * h, "v": model["num_key_value_heads"] * h}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for layer in range(model["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (d,)
        for kind, width in out.items():
            shapes[f"{prefix}self_attn.{kind}_proj.weight"] = (width, d)
            shapes[f"{prefix}self_attn.{kind}_proj.bias"] = (width,)
        shapes[prefix + "self_attn.o_proj.weight"] = (d, n * h)
        shapes[prefix + "self_attn.o_proj.bias"] = (d,)
        shapes[prefix + "self_attn.sinks"] = (n,)
        shapes[prefix + "post_attention_layernorm.weight"] = (d,)
        shapes[prefix + "mlp.router.weight"] = (e, d)
        shapes[prefix + "mlp.router.bias"] = (e,)
        for matrix, summed, width in (("gate_up_proj", d, 2 * f), ("down_proj", f, d)):
            name = f"{prefix}mlp.experts.{matrix}"
            if packed:
                groups = summed // MXFP4_GROUP
                shapes[name + "_blocks"] = (e, width, groups, MXFP4_GROUP // 2)
                shapes[name + "_scales"] = (e, width, groups)
            else:
                shapes[name] = (e, summed, width)
        shapes[prefix + "mlp.experts.gate_up_proj_bias"] = (e, 2 * f)
        shapes[prefix + "mlp.experts.down_proj_bias"] = (e, d)
    shapes["model.norm.weight"] = (d,)
    shapes["lm_head.weight"] = (v, d)
    return shapes


def vllm_parameter_name(name: str) -> str:
    """Return the parameter of vLLM's model, or part of a fused one, that a tensor loads into."""
    if name == "model.embed_tokens.weight":
        return "model.embedding.weight"
    *parts, last = name.replace(".self_attn.", ".attn.").split(".")
    if parts and parts[-1] in ("q_proj", "k_proj", "v_proj"):
        return ".".join([*parts[:-1], "qkv_proj", f"{last}[{parts[-1][0]}]"])
    return ".".join([*parts, _RENAMED.get(last, last)])


def adapter_buffer_names(names: list[str], config: dict[str, Any]) -> dict[str, str]:
    """Return each adapter tensor's buffer, by its name in live_parameters.py.

    PEFT nests modules if both parameters of the experts are adapted; the first one is the inner
    module.
    """
    experts = [str(name) for name in config.get("target_parameters") or []]
    inner = "gate_up" if len(experts) == 2 or "gate_up_proj" in "".join(experts) else "down"
    buffers: dict[str, str] = {}
    for name in names:
        layer, letter = LAYER.search(name), name.split(".lora_")[-1][0]
        last = name.split(".lora_")[0].rpartition(".")[2]
        if last == "base_layer":
            matrix = inner
        elif last == "experts":
            matrix = "down" if len(experts) == 2 else inner
        else:
            matrix = last.removesuffix("_proj")
        buffers[name] = f"layers.{layer[1] if layer else '?'}.{matrix}.{letter}"
    return buffers
