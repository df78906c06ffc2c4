# SPDX-License-Identifier: Apache-2.0
"""Per-op comparison with vLLM: how much of the log-prob gap each op of the model causes.

vLLM's modules are recorded while they read some tokens. Each op of the trainer is applied to the
inputs of vLLM's own op, and the difference of the two outputs is that op's rounding. A forward of
the trainer to which the differences of one op are added, in every layer, gives the effect of this
op alone on the log-probs. With the differences of all ops added it equals vLLM's by construction.
Next: jaxmoe/vllm/plugin/recording.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model import Ops, sequence_logprobs
from jaxmoe.model.moe.router import router_logits
from jaxmoe.model.params import fill_layer
from jaxmoe.shapes import Params

_PLACES_OF_OP = {  # recorded tensors of each op, without the layer's number
    "embedding": ("embed",),
    "norms": ("attn_norm", "moe_norm", "final_norm"),
    "q, k, v": ("qkv",),
    "RoPE's cos and sin": ("cos_sin",),
    "rotation": ("rotated",),
    "attention": ("attention",),
    "output of attention": ("output",),
    "residual sums": ("after_attention", "after_experts"),
    "router": ("router",),
    "experts": ("experts",),
    "head": ("logp",),
}
OP_NAMES = tuple(_PLACES_OF_OP)

# (place, op, *inputs) -> the output that the forward continues with; a place names one tensor
CallOp = Callable[..., Any]


@dataclass(frozen=True)
class OpDifference:
    """One op: the difference of its outputs for the same inputs, and its effect on log-probs."""

    op: str
    share_different: float  # share of its output values
    max_difference: float  # of outputs in float32
    gap: float  # mean |Δlogp| of a forward with this op's differences alone, nats


@dataclass(frozen=True)
class OpComparison:
    """The differences of all ops."""

    ops: tuple[OpDifference, ...]
    gap: float  # mean |Δlogp| of trainer and engine on these tokens
    tokens: int


class ComparisonPrograms(NamedTuple):
    """The two forwards, jitted by the caller."""

    differences: Any
    with_differences: Any


def op_of_place(place: str) -> str:
    """Return the op, one of OP_NAMES, that makes the tensor at a place."""
    name = place.rpartition(".")[2]
    return next(op for op, names in _PLACES_OF_OP.items() if name in names)


def forward_by_op(
    params: Params, tokens_BT: Int[Array, "B T"], cfg: ModelConfig, ops: Ops, call_op: CallOp
) -> Float[Array, "B T"]:
    """Return log-probs at temperature 1 by the forward's ops, each called through `call_op`."""
    batch, time = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), (batch, time))
    segments_BT = jnp.ones_like(positions_BT)
    q_size, kv_size = cfg.n_q_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim

    def split_heads(x_BTF: Array) -> Array:
        return x_BTF.reshape(batch, time, -1, cfg.head_dim)

    def project_qkv(h_BTD: Array, layer: Params) -> Array:
        projections = [ops.linear(h_BTD, layer[f"w_{x}"], layer[f"b_{x}"]) for x in "qkv"]
        return jnp.concatenate(projections, axis=-1)

    def rotate_qk(q_BTF: Array, k_BTF: Array, make_tables: Any) -> Array:
        rotated = [ops.rotate(split_heads(x), make_tables).reshape(x.shape) for x in (q_BTF, k_BTF)]
        return jnp.concatenate(rotated, axis=-1)

    def attend(q_BTF: Array, k_BTF: Array, v_BTF: Array, layer: Params, window: Any) -> Array:
        o_BTNH, _ = ops.attend(
            split_heads(q_BTF),
            split_heads(k_BTF),
            split_heads(v_BTF),
            layer["sinks"],
            q_positions_BT=positions_BT,
            k_positions_BS=positions_BT,
            q_segment_ids_BT=segments_BT,
            k_segment_ids_BS=segments_BT,
            window=window,
        )
        return o_BTNH.reshape(batch, time, -1)

    def sum_experts(h_BTD: Array, logits_BTE: Array, layer: Params) -> Array:
        top_BTA, indices_BTA = lax.top_k(logits_BTE, cfg.experts_per_token)
        return ops.experts(h_BTD, indices_BTA, jax.nn.softmax(top_BTA, axis=-1), layer, cfg)

    def make_tables() -> Array:
        return jnp.concatenate(ops.rotary(positions_BT, cfg), axis=-1)

    cos_sin = call_op("cos_sin", make_tables)
    tables = tuple(jnp.split(cos_sin, 2, axis=-1))
    x_BTD = call_op("embed", ops.embed, tokens_BT, params["embed"], cfg.dtype)
    for i in range(cfg.n_layers):
        group, index = cfg.plan.find_layer(i)
        layer = jax.tree.map(lambda w, index=index: w[index], params["layers"][group])
        layer, window = fill_layer(layer, cfg), cfg.plan.kinds[i].window
        h_BTD = call_op(f"{i}.attn_norm", ops.norm, x_BTD, layer["attn_norm"], cfg.rms_eps)
        qkv_BTF = call_op(f"{i}.qkv", project_qkv, h_BTD, layer)
        q, k, v = jnp.split(qkv_BTF, (q_size, q_size + kv_size), axis=-1)
        rotated_BTF = call_op(f"{i}.rotated", rotate_qk, q, k, tables)
        q, k = rotated_BTF[..., :q_size], rotated_BTF[..., q_size:]
        o_BTF = call_op(f"{i}.attention", attend, q, k, v, layer, window)
        o_BTD = call_op(f"{i}.output", ops.output, o_BTF, layer["w_o"], layer["b_o"])
        x_BTD = call_op(f"{i}.after_attention", jnp.add, x_BTD, o_BTD)
        h_BTD = call_op(f"{i}.moe_norm", ops.norm, x_BTD, layer["moe_norm"], cfg.rms_eps)
        logits_BTE = call_op(f"{i}.router", router_logits, h_BTD, layer)
        y_BTD = call_op(f"{i}.experts", sum_experts, h_BTD, logits_BTE, layer)
        x_BTD = call_op(f"{i}.after_experts", jnp.add, x_BTD, y_BTD)
    hidden_BTD = call_op("final_norm", ops.norm, x_BTD, params["final_norm"], cfg.rms_eps)

    def score_tokens(hidden_BTD: Array) -> Array:
        return sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops, temperature=1.0)[0]

    return call_op("logp", score_tokens, hidden_BTD)


def read_recording(
    recorded: Mapping[str, Sequence[np.ndarray]], logp_T: np.ndarray, cfg: ModelConfig
) -> dict[str, np.ndarray]:
    """Return one sequence's recording by the places of `forward_by_op`, [T, …]."""
    time, h = len(logp_T), cfg.head_dim // 2
    table = recorded["cos_sin"][0][:time]
    by_place = {
        "cos_sin": np.concatenate([table[:, None, :h], table[:, None, h:]], axis=-1),
        "embed": recorded["model.embedding"][0],
        "logp": logp_T,
        "final_norm": recorded["model.norm"][0],
    }
    for i in range(cfg.n_layers):
        prefix = f"model.layers.{i}."
        q, k, _, o = recorded[prefix + "attn.attn"]
        after = (
            recorded[f"model.layers.{i + 1}.input_layernorm"]
            if i + 1 < cfg.n_layers
            else (recorded["model.norm"])
        )
        normed, residual = recorded[prefix + "post_attention_layernorm"]
        by_place |= {
            f"{i}.attn_norm": recorded[prefix + "input_layernorm"][0],
            f"{i}.qkv": recorded[prefix + "attn.qkv_proj"][0],
            f"{i}.rotated": np.concatenate([q, k], axis=-1),
            f"{i}.attention": o,
            f"{i}.output": recorded[prefix + "attn.o_proj"][0],
            f"{i}.after_attention": residual,
            f"{i}.moe_norm": normed,
            f"{i}.router": recorded[prefix + "mlp.router"][0],
            f"{i}.experts": recorded[prefix + "mlp.experts"][0],
            f"{i}.after_experts": after[1],
        }
    return by_place


def compute_op_differences(
    params: Params, tokens_BT: Array, engine: dict[str, Array], cfg: ModelConfig, ops: Ops
) -> dict[str, Array]:
    """Return, by place, the engine's output minus that of the trainer's op on the same inputs."""
    differences = {}

    def call_op(place: str, fn: Callable[..., Array], *inputs: Any) -> Array:
        output = fn(*inputs)
        differences[place] = engine[place] - output.astype(jnp.float32)
        # The next op continues from the engine's output, so that its difference does not include
        # the earlier ones.
        return engine[place].astype(output.dtype)

    forward_by_op(params, tokens_BT, cfg, ops, call_op)
    return differences


def score_with_differences(
    params: Params,
    tokens_BT: Array,
    added: dict[str, Array],
    added_P: Array,
    cfg: ModelConfig,
    ops: Ops,
) -> Float[Array, "B T"]:
    """Return the trainer's log-probs with the differences of the ops in `added_P` added."""

    def call_op(place: str, fn: Callable[..., Array], *inputs: Any) -> Array:
        output = fn(*inputs)
        # Selected by an array, so that one program serves all ops.
        is_added = added_P[OP_NAMES.index(op_of_place(place))] > 0
        with_difference = output.astype(jnp.float32) + added[place]
        return jnp.where(is_added, with_difference, output.astype(jnp.float32)).astype(output.dtype)

    return forward_by_op(params, tokens_BT, cfg, ops, call_op)


def compare_ops(
    params: Params,
    tokens_BT: np.ndarray,
    engine: Sequence[Mapping[str, np.ndarray]],
    run: ComparisonPrograms,
) -> OpComparison:
    """Return the comparison of every op; `engine` has the recorded tensors of each row."""
    engine_arrays = {name: jnp.asarray(np.stack([x[name] for x in engine])) for name in engine[0]}
    added = run.differences(params, tokens_BT, engine_arrays)
    # Column 0 has no prediction.
    added["logp"] = added["logp"].at[:, 0].set(0.0)

    def score_added(added_ops: Sequence[int]) -> np.ndarray:
        logp_BT = run.with_differences(
            params, tokens_BT, added, jnp.asarray(added_ops, jnp.float32)
        )
        return np.asarray(logp_BT, np.float64)[:, 1:]

    count = len(OP_NAMES)
    base, engine_logp = (
        score_added([0] * count),
        np.asarray(engine_arrays["logp"], np.float64)[:, 1:],
    )
    ops = []
    for i, op in enumerate(OP_NAMES):
        differences = np.concatenate(
            [np.asarray(x).reshape(-1) for place, x in added.items() if op_of_place(place) == op]
        )
        op_logp = score_added([int(i == j) for j in range(count)])
        ops.append(
            OpDifference(
                op,
                float(np.mean(differences != 0)),
                float(np.abs(differences).max()),
                float(np.abs(op_logp - base).mean()),
            )
        )
    return OpComparison(tuple(ops), float(np.abs(engine_logp - base).mean()), engine_logp.size)
