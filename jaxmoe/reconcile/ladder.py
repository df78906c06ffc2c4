# SPDX-License-Identifier: Apache-2.0
"""From the trainer's log-probs to vLLM's, piece by piece: whose kernel makes which part of the gap.

vLLM's modules are recorded while they read some tokens. Each piece of the trainer is applied to
what vLLM's own piece was given, and the difference of the two outputs is that piece's rounding. A
forward of the trainer to which the differences of one piece are added, in every layer, says what
this piece alone does to the log-probs. With all of them added it is vLLM's by construction.
Next: jaxmoe/vllm_plugin/recording.py.
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
from jaxmoe.model.router import router_logits
from jaxmoe.shapes import Params

_PLACES = {  # of each piece, without the layer's number
    "embedding": ("embed",), "norms": ("attn_norm", "moe_norm", "final_norm"),
    "q, k, v": ("qkv",), "RoPE's cos and sin": ("cos_sin",), "rotation": ("rotated",),
    "attention": ("attention",), "output of attention": ("output",),
    "residual sums": ("after_attention", "after_experts"), "router": ("router",),
    "experts": ("experts",), "head": ("logp",),
}  # fmt: skip
PIECES = tuple(_PLACES)

# (name of the place, the trainer's piece, its arguments) -> what goes on from there
At = Callable[..., Any]


@dataclass(frozen=True)
class Rung:
    """One piece: how its own outputs differ, given the same inputs, and what comes of it."""

    piece: str
    differ: float  # share of its output's numbers
    largest: float  # difference, of float32 outputs
    gap: float  # mean |Δlogp| of a forward with this piece's differences alone, nats


@dataclass(frozen=True)
class Ladder:
    rungs: tuple[Rung, ...]
    gap: float  # mean |Δlogp| of trainer and engine on these tokens
    tokens: int


class Steps(NamedTuple):
    """The two forwards, jitted by whoever stands at the edge."""

    differences: Any
    with_differences: Any


def piece_of(place: str) -> str:
    """Of PIECES."""
    name = place.rpartition(".")[2]
    return next(piece for piece, names in _PLACES.items() if name in names)


def walk(
    params: Params, tokens_BT: Int[Array, "B T"], cfg: ModelConfig, ops: Ops, at: At
) -> Float[Array, "B T"]:
    """Log-probs at temperature 1 by the forward's own pieces, each called through `at`."""
    batch, time = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32), (batch, time))
    ones_BT = jnp.ones_like(positions_BT)
    q_size, kv_size = cfg.n_q_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim

    def heads(x_BTF: Array) -> Array:
        return x_BTF.reshape(batch, time, -1, cfg.head_dim)

    def qkv(h_BTD: Array, layer: Params) -> Array:
        each = [ops.linear(h_BTD, layer[f"w_{x}"], layer[f"b_{x}"]) for x in "qkv"]
        return jnp.concatenate(each, axis=-1)

    def rotated(q_BTF: Array, k_BTF: Array, tables: Any) -> Array:
        turned = [ops.rotate(heads(x), tables).reshape(x.shape) for x in (q_BTF, k_BTF)]
        return jnp.concatenate(turned, axis=-1)

    def attended(q_BTF: Array, k_BTF: Array, v_BTF: Array, layer: Params, window: Any) -> Array:
        o_BTNH, _ = ops.attend(
            heads(q_BTF), heads(k_BTF), heads(v_BTF), layer["sinks"], q_positions_BT=positions_BT,
            k_positions_BS=positions_BT, q_segment_ids_BT=ones_BT, k_segment_ids_BS=ones_BT,
            window=window,
        )  # fmt: skip
        return o_BTNH.reshape(batch, time, -1)

    def expert_sum(h_BTD: Array, logits_BTE: Array, layer: Params) -> Array:
        top_BTA, indices_BTA = lax.top_k(logits_BTE, cfg.experts_per_token)
        return ops.experts(h_BTD, indices_BTA, jax.nn.softmax(top_BTA, axis=-1), layer, cfg)

    def tables() -> Array:
        return jnp.concatenate(ops.rotary(positions_BT, cfg), axis=-1)

    cos_sin = at("cos_sin", tables)
    both = tuple(jnp.split(cos_sin, 2, axis=-1))
    x_BTD = at("embed", ops.embed, tokens_BT, params["embed"], cfg.dtype)
    for i in range(cfg.n_layers):
        kind, window = (("sliding", cfg.sliding_window), ("full", None))[i % 2]
        layer = jax.tree.map(lambda w, i=i: w[i // 2], params["layers"][kind])
        h_BTD = at(f"{i}.attn_norm", ops.norm, x_BTD, layer["attn_norm"], cfg.rms_eps)
        qkv_BTF = at(f"{i}.qkv", qkv, h_BTD, layer)
        q, k, v = jnp.split(qkv_BTF, (q_size, q_size + kv_size), axis=-1)
        turned_BTF = at(f"{i}.rotated", rotated, q, k, both)
        q, k = turned_BTF[..., :q_size], turned_BTF[..., q_size:]
        o_BTF = at(f"{i}.attention", attended, q, k, v, layer, window)
        o_BTD = at(f"{i}.output", ops.output, o_BTF, layer["w_o"], layer["b_o"])
        x_BTD = at(f"{i}.after_attention", jnp.add, x_BTD, o_BTD)
        h_BTD = at(f"{i}.moe_norm", ops.norm, x_BTD, layer["moe_norm"], cfg.rms_eps)
        logits_BTE = at(f"{i}.router", router_logits, h_BTD, layer)
        y_BTD = at(f"{i}.experts", expert_sum, h_BTD, logits_BTE, layer)
        x_BTD = at(f"{i}.after_experts", jnp.add, x_BTD, y_BTD)
    hidden_BTD = at("final_norm", ops.norm, x_BTD, params["final_norm"], cfg.rms_eps)

    def scored(hidden_BTD: Array) -> Array:
        return sequence_logprobs(params, hidden_BTD, tokens_BT, cfg, ops, temperature=1.0)[0]

    return at("logp", scored, hidden_BTD)


def places(
    recorded: Mapping[str, Sequence[np.ndarray]], logp_T: np.ndarray, cfg: ModelConfig
) -> dict[str, np.ndarray]:
    """One sequence's recording by the places of `walk`, [T, …]."""
    time, h = len(logp_T), cfg.head_dim // 2
    table = recorded["cos_sin"][0][:time]
    found = {
        "cos_sin": np.concatenate([table[:, None, :h], table[:, None, h:]], axis=-1),
        "embed": recorded["model.embedding"][0], "logp": logp_T,
        "final_norm": recorded["model.norm"][0],
    }  # fmt: skip
    for i in range(cfg.n_layers):
        at = f"model.layers.{i}."
        q, k, _, o = recorded[at + "attn.attn"]
        after = recorded[f"model.layers.{i + 1}.input_layernorm"] if i + 1 < cfg.n_layers else (
            recorded["model.norm"])  # fmt: skip
        normed, residual = recorded[at + "post_attention_layernorm"]
        found |= {
            f"{i}.attn_norm": recorded[at + "input_layernorm"][0],
            f"{i}.qkv": recorded[at + "attn.qkv_proj"][0],
            f"{i}.rotated": np.concatenate([q, k], axis=-1), f"{i}.attention": o,
            f"{i}.output": recorded[at + "attn.o_proj"][0],
            f"{i}.after_attention": residual, f"{i}.moe_norm": normed,
            f"{i}.router": recorded[at + "mlp.router"][0],
            f"{i}.experts": recorded[at + "mlp.experts"][0], f"{i}.after_experts": after[1],
        }  # fmt: skip
    return found


def differences(
    params: Params, tokens_BT: Array, theirs: dict[str, Array], cfg: ModelConfig, ops: Ops
) -> dict[str, Array]:
    """By place, the engine's output less that of the trainer's piece of the engine's inputs."""
    found = {}

    def at(place: str, fn: Callable[..., Array], *given: Any) -> Array:
        ours = fn(*given)
        found[place] = theirs[place] - ours.astype(jnp.float32)
        return theirs[place].astype(ours.dtype)

    walk(params, tokens_BT, cfg, ops, at)
    return found


def with_differences(
    params: Params, tokens_BT: Array, added: dict[str, Array], on_P: Array, cfg: ModelConfig,
    ops: Ops,
) -> Float[Array, "B T"]:  # fmt: skip
    """The trainer's log-probs with those of the pieces in `on_P` (of PIECES, 1 or 0) added."""

    def at(place: str, fn: Callable[..., Array], *given: Any) -> Array:
        ours = fn(*given)
        on = on_P[PIECES.index(piece_of(place))] > 0
        moved = ours.astype(jnp.float32) + added[place]
        return jnp.where(on, moved, ours.astype(jnp.float32)).astype(ours.dtype)

    return walk(params, tokens_BT, cfg, ops, at)


def ladder(
    params: Params, tokens_BT: np.ndarray, theirs: Sequence[Mapping[str, np.ndarray]], run: Steps
) -> Ladder:
    """Rungs of every piece; `theirs` are `places` of each row."""
    told = {name: jnp.asarray(np.stack([x[name] for x in theirs])) for name in theirs[0]}
    added = run.differences(params, tokens_BT, told)
    added["logp"] = added["logp"].at[:, 0].set(0.0)  # of no prediction

    def logp(on: Sequence[int]) -> np.ndarray:
        found = run.with_differences(params, tokens_BT, added, jnp.asarray(on, jnp.float32))
        return np.asarray(found, np.float64)[:, 1:]

    count = len(PIECES)
    base, whole = logp([0] * count), np.asarray(told["logp"], np.float64)[:, 1:]
    rungs = []
    for i, piece in enumerate(PIECES):
        own = np.concatenate([
            np.asarray(x).reshape(-1) for place, x in added.items() if piece_of(place) == piece
        ])  # fmt: skip
        alone = logp([int(i == j) for j in range(count)])
        rungs.append(Rung(
            piece, float(np.mean(own != 0)), float(np.abs(own).max()),
            float(np.abs(alone - base).mean()),
        ))  # fmt: skip
    return Ladder(tuple(rungs), float(np.abs(whole - base).mean()), whole.size)
