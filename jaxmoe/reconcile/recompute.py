# SPDX-License-Identifier: Apache-2.0
"""The trainer's log-probs recomputed as an engine with one fault would compute them.

Faults that need no other program are numbers in `Knobs`; dtype and window belong to the model's
config. Without a fault this is the trainer's own forward and head.
Next: jaxmoe/reconcile/variants.py defines what can change, hypotheses.py names the changes.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig
from jaxmoe.model import Ops, forward, sequence_logprobs
from jaxmoe.model.moe.router import router_logits
from jaxmoe.model.rope import yarn_frequencies
from jaxmoe.rollout.sampling import apply_top_k_top_p, log_kept_mass
from jaxmoe.shapes import Leaf, Params
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.routing import combine_rows, permute_rows, sort_by_expert
from pallas_kernels.grouped_matmul.swiglu import clamped_swiglu

QUARTER_ULP = 2.0**-25  # of float32; times a number it is the average effect of rounding
LOGITS_CHUNK_TOKENS = 256  # tokens whose logits over the full vocabulary exist at a time


class Knobs(NamedTuple):
    """Properties in which an engine may differ; arrays, so that changing one compiles nothing."""

    frequencies: Leaf  # float32 [H/2] of RoPE
    rope_scale: Leaf  # factor on RoPE's cos and sin
    attention_scale: Leaf  # factor on the scores, in addition to 1/sqrt(H)
    sink_shift: Leaf  # added to every sink
    rms_eps: Leaf
    swiglu_alpha: Leaf
    swiglu_limit: Leaf
    softmax_over_all: Leaf  # bool: over every expert, before the top-k, and not renormalised
    round_router: Leaf  # bool: operands and logits of the router in bfloat16
    round_head: Leaf  # bool: operands of the head in bfloat16
    round_logits: Leaf  # bool: the vocabulary's logits in bfloat16
    temperature: Leaf
    jitter: Leaf  # relative noise on the outputs of every layer's blocks, 2^-23 for one rounding


class Programs(NamedTuple):
    """The two halves, jitted by the caller, with static keywords."""

    trunk: Any
    head: Any


class Scores(NamedTuple):
    """Results for each token and each layer's router; nats and logits in float32."""

    logp_BT: Leaf  # at the temperature, over the full vocabulary
    raw_BT: Leaf  # at temperature 1
    log_kept_BT: Leaf  # log of the mass that top-k and top-p keep
    ulp_BT: Leaf  # 2^-25·(|logit| + |logsumexp|), tempered: a quarter ulp of each, up to a half
    experts_LBTA: Leaf  # this router's own choice, even if others were replayed
    margin_LBT: Leaf  # difference in logits between the last selected expert and the next one
    regret_LBT: Leaf  # Σ logits of its own choice − Σ logits of the experts that were used


def make_knobs(cfg: ModelConfig, temperature: float) -> Knobs:
    """Return the knobs of the trainer, without a fault."""
    frequencies, scale = yarn_frequencies(cfg)
    disabled, is_bfloat16 = jnp.asarray(False), jnp.asarray(cfg.dtype == "bfloat16")
    return Knobs(
        jnp.asarray(frequencies),
        jnp.float32(scale),
        attention_scale=jnp.float32(1),
        sink_shift=jnp.float32(0),
        rms_eps=jnp.float32(cfg.rms_eps),
        swiglu_alpha=jnp.float32(cfg.swiglu_alpha),
        swiglu_limit=jnp.float32(cfg.swiglu_limit),
        softmax_over_all=disabled,
        round_router=disabled,
        round_head=is_bfloat16,
        round_logits=disabled,
        temperature=jnp.float32(temperature),
        jitter=jnp.float32(0),
    )


def run_trunk(
    params: Params,
    tokens_BT: Int[Array, "B T"],
    segment_ids_BT: Int[Array, "B T"],
    replay_LBTA: Int[Array, "L B T A"],
    knobs: Knobs,
    *,
    cfg: ModelConfig,
    ops: Ops,
) -> tuple[Float[Array, "B T D"], Array, Array, Array]:
    """Return final hidden states and, for each router, its choice, margin and regret; see Scores.

    Negative experts in `replay_LBTA` are replaced by this router's choice.
    Every sample has its own prompt, whatever `optim.share_prompts` says: replayed experts, faults
    and noise are those of a row and a column, the results for prompts are compared as well, and two
    samples of a prompt would save less than half. Shared prompts change a log-prob by rounding.
    Numerics: as jaxmoe.model.forward. bfloat16 rounding, where a knob asks for it, is to nearest
    even, on operands and on the float32 result of the product.
    """
    variant_ops = replace(
        ops,
        norm=partial(_rms_norm, knobs, ops),
        attend=partial(_sink_attention, knobs, ops),
        experts=partial(_apply_experts, knobs),
        router=partial(_route_tokens, knobs),
        rotary=partial(_rope_tables, knobs),
        record=partial(_record_routing, knobs),
    )
    hidden_BTD, _, routing = forward(
        params,
        tokens_BT,
        cfg,
        variant_ops,
        segment_ids_BT=segment_ids_BT,
        routed_experts_BTLA=jnp.moveaxis(replay_LBTA, 0, 2),
    )
    return (
        hidden_BTD.astype(jnp.float32),
        routing["experts_BTA"],
        routing["margin_BT"],
        routing["regret_BT"],
    )


def run_head(
    params: Params,
    hidden_BTD: Float[Array, "B T D"],
    tokens_BT: Int[Array, "B T"],
    knobs: Knobs,
    *,
    cfg: ModelConfig,
    ops: Ops,
    top_k: int,
    top_p: float,
) -> tuple[Float[Array, "B T"], ...]:
    """Return four values for each token, in nats.

    They are the log-prob at the temperature, the log-prob at temperature 1, the log of the mass
    that top-k and top-p keep, and the ulp of `Scores`.
    """
    return sequence_logprobs(
        params,
        hidden_BTD,
        tokens_BT,
        cfg,
        replace(ops, logprobs=partial(_token_logprobs, knobs, top_k, top_p)),
        temperature=knobs.temperature,
    )


def round_to_bfloat16(x: Array, enabled: Array) -> Array:
    """Round x to bfloat16 where `enabled`; a pair of casts would be optimised away."""
    return jnp.where(enabled, lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), x)


def _rope_tables(knobs: Knobs, positions_BT: Array, _cfg: ModelConfig) -> tuple[Array, Array]:
    angles = (
        positions_BT.astype(jnp.float32)[:, :, None, None] * knobs.frequencies[None, None, None]
    )
    return jnp.cos(angles) * knobs.rope_scale, jnp.sin(angles) * knobs.rope_scale


def _router_logits(knobs: Knobs, h_BTD: Array, layer: Params) -> Array:
    w_DE = round_to_bfloat16(layer["w_router"].astype(jnp.float32), knobs.round_router)
    h_BTD = round_to_bfloat16(h_BTD.astype(jnp.float32), knobs.round_router)
    return round_to_bfloat16(router_logits(h_BTD, {**layer, "w_router": w_DE}), knobs.round_router)


def _route_tokens(
    knobs: Knobs, h_BTD: Array, layer: Params, *, active: int, indices_BTA: Array
) -> tuple[Array, Array]:
    logits_BTE = _router_logits(knobs, h_BTD, layer)
    indices_BTA = jnp.where(indices_BTA < 0, lax.top_k(logits_BTE, active)[1], indices_BTA)
    top_BTA = jnp.take_along_axis(logits_BTE, indices_BTA, axis=-1)
    all_BT1 = jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True)
    among_BTA = jax.nn.softmax(top_BTA, axis=-1)
    return indices_BTA, jnp.where(knobs.softmax_over_all, jnp.exp(top_BTA - all_BT1), among_BTA)


def _record_routing(
    knobs: Knobs, h_BTD: Array, layer: Params, indices_BTA: Array, _weights_BTA: Array
) -> dict[str, Array]:
    logits_BTE = _router_logits(knobs, h_BTD, layer)
    active, total = indices_BTA.shape[-1], logits_BTE.shape[-1]
    top, chosen = lax.top_k(logits_BTE, min(active + 1, total))
    # If every expert is active, no other expert could have been selected.
    infinite_BT = jnp.full(top.shape[:-1], jnp.inf)
    margin_BT = top[..., -2] - top[..., -1] if active < total else infinite_BT
    used_BTA = jnp.take_along_axis(logits_BTE, indices_BTA, axis=-1)
    regret_BT = jnp.sum(top[..., :active], axis=-1) - jnp.sum(used_BTA, axis=-1)
    return {"experts_BTA": chosen[..., :active], "margin_BT": margin_BT, "regret_BT": regret_BT}


def _apply_experts(
    knobs: Knobs,
    h_BTD: Array,
    indices_BTA: Array,
    weights_BTA: Array,
    layer: Params,
    cfg: ModelConfig,
) -> Array:
    """Compute jaxmoe.model.moe.experts.apply_experts with a limit and an alpha that are arrays."""
    active, dtype = indices_BTA.shape[-1], h_BTD.dtype
    h_MD = h_BTD.reshape(-1, h_BTD.shape[-1])
    order, inverse, sizes_E = sort_by_expert(indices_BTA.reshape(-1, active), cfg.n_experts)
    rows = permute_rows(h_MD, order, inverse, active)
    gate_up = grouped_matmul(
        rows, layer["w_gate_up"].astype(dtype), sizes_E, bias_EF=layer["b_gate_up"]
    )
    hidden = clamped_swiglu(gate_up, knobs.swiglu_alpha, knobs.swiglu_limit)
    out = grouped_matmul(hidden, layer["w_down"].astype(dtype), sizes_E, bias_EF=layer["b_down"])
    y_MD = combine_rows(out, inverse, weights_BTA.reshape(-1, active))
    return _add_noise(knobs, y_MD, 1).reshape(h_BTD.shape)


def _rms_norm(knobs: Knobs, ops: Ops, x: Array, scale_D: Array, _eps: float) -> Array:
    return ops.norm(x, scale_D, knobs.rms_eps)


def _sink_attention(
    knobs: Knobs,
    ops: Ops,
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    sink_N: Array,
    **layout: Any,
) -> tuple[Array, Array]:
    scaled_BTNH = (q_BTNH.astype(jnp.float32) * knobs.attention_scale).astype(q_BTNH.dtype)
    moved_N = sink_N.astype(jnp.float32) + knobs.sink_shift
    o_BTNH, lse_BTN = ops.attend(scaled_BTNH, k_BSKH, v_BSKH, moved_N, **layout)
    return _add_noise(knobs, o_BTNH, 2), lse_BTN


def _add_noise(knobs: Knobs, x: Array, seed: int) -> Array:
    """Add noise of either sign: a sine, since a generator would double the compilation time."""
    noise = jnp.sin(jnp.arange(x.size, dtype=jnp.float32) * (12.9898 + seed)).reshape(x.shape)
    return (x.astype(jnp.float32) * (1.0 + knobs.jitter * noise)).astype(x.dtype)


def _token_logprobs(
    knobs: Knobs,
    top_k: int,
    top_p: float,
    hidden_BTD: Float[Array, "B T D"],
    w_DV: Array,
    targets_BT: Array,
    *,
    temperature: Any,
    vocab_size: int,
) -> tuple[Array, ...]:
    """Return the four values of `run_head`; a chunk of tokens' logits at a time."""
    w_DV = round_to_bfloat16(w_DV.astype(hidden_BTD.dtype)[:, :vocab_size], knobs.round_head)

    def score_token(h_D: Array, target: Array) -> tuple[Array, ...]:
        raw_V = jnp.dot(
            round_to_bfloat16(h_D, knobs.round_head), w_DV, precision=lax.Precision.HIGHEST
        )
        raw_V = round_to_bfloat16(raw_V, knobs.round_logits)
        tempered_1V = raw_V[None] / temperature
        keep_mask = apply_top_k_top_p(tempered_1V, top_k=top_k, top_p=top_p)
        logit, total = tempered_1V[0, target], jax.nn.logsumexp(tempered_1V[0])
        raw = raw_V[target] - jax.nn.logsumexp(raw_V)
        ulp = (jnp.abs(logit) + jnp.abs(total)) * QUARTER_ULP
        return logit - total, raw, log_kept_mass(keep_mask, tempered_1V)[0], ulp

    flat = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), targets_BT.reshape(-1)
    size = min(LOGITS_CHUNK_TOKENS, targets_BT.size)
    scores = lax.map(lambda x: score_token(*x), flat, batch_size=size)
    return tuple(x_M.reshape(targets_BT.shape) for x_M in scores)
