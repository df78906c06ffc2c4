# SPDX-License-Identifier: Apache-2.0
"""An engine of another make for tests: GPT-OSS in numpy as the formula reads, with faults.

It shares no code with jaxmoe's forward nor with its hypotheses; a fault is put in where an
engine would have it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxmoe.config import ModelConfig


@dataclass(frozen=True)
class Peer:
    """What the engine does; the defaults are right."""

    dtype: str = "float32"  # of activations
    window: int | None = None  # keys of a sliding layer; None: the config's, 0: no window
    full_window: int = 0  # of full layers, which have none
    sinks: bool = True
    softmax_first: bool = False
    limit: float | None = None
    alpha: float | None = None
    half_router: bool = False
    half_head: bool = False
    half_logits: bool = False
    truncate: bool | None = None
    factor: float | None = None
    theta: float | None = None
    eps: float | None = None
    scale: float = 1.0  # on attention's scores
    sink_shift: float = 0.0
    active: int | None = None  # experts per token
    key_shift: int = 0  # of the keys' positions against the queries'
    interleaved: bool = False  # RoPE turns neighbours, not halves
    softcap: float = 0.0  # of the vocabulary's logits
    open_below: bool = False  # up is clamped from above only
    over_tokens: bool = False  # the router's softmax over the wrong axis
    scaled_layer: int | None = None  # the scale in this layer only
    changed: Callable[[Any], Any] | None = None  # of its weights, a tree in numpy
    switch: float = 0.0  # share of tokens sent to their next best expert instead
    experts: list = field(default_factory=list)  # where it notes [layer][token, A] of a row


def to_half(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def rope_frequencies(cfg: ModelConfig, truncate: bool, factor: float):
    h, theta, t0 = cfg.head_dim, cfg.rope_theta, cfg.rope_original_context
    plain = theta ** (-np.arange(0, h, 2) / h)
    if factor <= 1:
        return plain, 1.0
    low, high = (
        h * np.log(t0 / (beta * 2 * np.pi)) / (2 * np.log(theta))
        for beta in (cfg.rope_beta_fast, cfg.rope_beta_slow)
    )
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, h - 1)
    divided = np.clip((np.arange(h // 2) - low) / (high - low), 0, 1)
    return plain * (1 - divided) + plain / factor * divided, 0.1 * np.log(factor) + 1


def log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def peer_logits(params: Any, tokens, cfg: ModelConfig, peer: Peer):
    """[T, V] of one row, before any temperature."""
    params = to_numpy(params)
    cast = to_half if peer.dtype == "bfloat16" else (lambda x: np.asarray(x, np.float32))
    params = peer.changed(params) if peer.changed else params
    cfg = replace(
        cfg,
        rope_theta=cfg.rope_theta if peer.theta is None else peer.theta,
        rms_eps=cfg.rms_eps if peer.eps is None else peer.eps,
        experts_per_token=peer.active or cfg.experts_per_token,
    )
    truncate = cfg.rope_truncate if peer.truncate is None else peer.truncate
    turn, scale = rope_frequencies(
        cfg, truncate, cfg.rope_factor if peer.factor is None else peer.factor
    )

    def rms_norm(x, w):
        return cast(x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_eps) * w)

    def apply_linear(x, w, b):
        return cast(x @ cast(w) + b)

    def apply_rope(x, shift=0):
        angle = ((np.arange(len(tokens)) + shift)[:, None] * turn[None]).astype(np.float32)
        cos, sin = (np.cos(angle) * scale)[:, None], (np.sin(angle) * scale)[:, None]
        a, b = np.split(x, 2, axis=-1)
        if peer.interleaved:
            a, b = x[..., ::2], x[..., 1::2]
        return cast(np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1))

    x = cast(params["embed"][tokens])
    rng = np.random.default_rng(len(tokens))
    absent = {f"b_{name}": 0.0 for name in ("q", "k", "v", "o", "router")}
    absent |= {f"b_{name}": np.zeros(cfg.n_experts) for name in ("gate_up", "down")}
    absent["sinks"] = np.full(cfg.n_q_heads, -np.inf)
    for i in range(cfg.n_layers):
        group, index = cfg.plan.find_layer(i)
        p = {name: value[index] for name, value in params["layers"][group].items()}
        p = absent | p
        window = cfg.plan.kinds[i].window if peer.window is None else peer.window
        window = peer.full_window if cfg.plan.kinds[i].window is None else window
        layer_peer = peer if peer.scaled_layer in (None, i) else replace(peer, scale=1.0)
        x = cast(
            x
            + apply_attention(
                rms_norm(x, p["attn_norm"]),
                p,
                cfg,
                layer_peer,
                window,
                apply_linear,
                apply_rope,
                cast,
            )
        )
        x = cast(x + apply_moe(rms_norm(x, p["moe_norm"]), p, cfg, peer, rng, cast))
    h, w = rms_norm(x, params["final_norm"]), params["head"][:, : cfg.vocab_size]
    if peer.half_head or peer.dtype == "bfloat16":
        h, w = to_half(h), to_half(w)
    z = to_half(h @ w) if peer.half_logits else h @ w
    return peer.softcap * np.tanh(z / peer.softcap) if peer.softcap else z


def apply_attention(h, p, cfg, peer, window, apply_linear, apply_rope, cast):
    time, group = len(h), cfg.n_q_heads // cfg.n_kv_heads
    q, k, v = (
        apply_linear(h, p[f"w_{c}"], p[f"b_{c}"]).reshape(time, n, cfg.head_dim)
        for c, n in (("q", cfg.n_q_heads), ("k", cfg.n_kv_heads), ("v", cfg.n_kv_heads))
    )
    k, v = (np.repeat(x, group, axis=1) for x in (apply_rope(k, peer.key_shift), v))
    z = np.einsum("tnh,snh->nts", apply_rope(q), k) / np.sqrt(cfg.head_dim) * peer.scale
    distance = np.arange(time)[:, None] - np.arange(time)[None]
    is_visible = (distance >= 0) & ((distance < window) | (window == 0))
    z = np.where(is_visible[None], z, -np.inf)
    top = z.max(axis=-1, keepdims=True)
    weights = np.exp(z - top)
    total = weights.sum(axis=-1, keepdims=True)
    if peer.sinks:
        total = total + np.exp(p["sinks"][:, None, None] + peer.sink_shift - top)
    o = cast(np.einsum("nts,snh->tnh", weights / total, v)).reshape(time, -1)
    return apply_linear(o, p["w_o"], p["b_o"])


def apply_moe(h, p, cfg, peer, rng, cast):
    a, f = cfg.experts_per_token, cfg.d_expert
    hr, wr = (to_half(h), to_half(p["w_router"])) if peer.half_router else (h, p["w_router"])
    z = hr @ wr + p["b_router"]
    z = to_half(z) if peer.half_router else z
    order = np.argsort(-z, axis=1, kind="stable")
    picked = order[:, :a].copy()
    moved = rng.random(len(h)) < peer.switch
    picked[moved, -1] = order[moved, a]
    peer.experts.append(picked)
    top = np.take_along_axis(z, picked, 1)
    weights = np.take_along_axis(np.exp(log_softmax(z)), picked, 1)
    weights = weights if peer.softmax_first else np.exp(log_softmax(top))
    if peer.over_tokens:
        weights = np.take_along_axis(np.exp(log_softmax(z.T)).T, picked, 1)
    limit = cfg.swiglu_limit if peer.limit is None else peer.limit
    alpha = cfg.swiglu_alpha if peer.alpha is None else peer.alpha
    y = np.zeros_like(h)
    for e in range(cfg.n_experts):
        rows, slots = np.nonzero(picked == e)
        gate_up = cast(h[rows] @ cast(p["w_gate_up"][e]) + p["b_gate_up"][e])
        gate, up = np.minimum(gate_up[:, :f], limit), np.clip(gate_up[:, f:], -limit, limit)
        up = np.minimum(gate_up[:, f:], limit) if peer.open_below else up
        act = cast((up + 1) * gate / (1 + np.exp(-alpha * gate)))
        out = cast(act @ cast(p["w_down"][e]) + p["b_down"][e])
        np.add.at(y, rows, weights[rows, slots, None] * out)
    return cast(y)


def to_numpy(params):
    if isinstance(params, dict):
        return {name: to_numpy(value) for name, value in params.items()}
    return np.asarray(params, np.float32)


def reset_peer(peer: Peer) -> Peer:
    return replace(peer, experts=[])
