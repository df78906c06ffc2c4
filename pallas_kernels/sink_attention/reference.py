# SPDX-License-Identifier: Apache-2.0
"""The oracle: attention with a sink in float32, as the formula reads, O(T·S) memory.

Next: xla.py, the same in blocks.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention.signature import (
    Gradients,
    Keys,
    Queries,
    Result,
    Rows,
    Sinks,
)

UNSEEN = -2e30  # a score that weighs nothing beside any other, and stays finite in differences
_EXACT = jax.lax.Precision.HIGHEST


def reference(
    q_BTNH: Queries, k_BSKH: Keys, v_BSKH: Keys, sink_N: Sinks, layout: Layout, window: int,
    scale: float,
) -> Result:  # fmt: skip
    """o = Σ_s e^{z_s − lse} v_s,  lse = log(Σ_s e^{z_s} + e^{sink}),  z = scale·q·k if seen."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    sink_1KG11 = sink_N.astype(jnp.float32).reshape(1, K, N // K, 1, 1)
    z = _scores(q, k, layout, window, scale)
    top = jnp.maximum(jnp.max(z, axis=-1, keepdims=True, initial=UNSEEN), sink_1KG11)
    top = jax.lax.stop_gradient(jnp.maximum(top, UNSEEN / 2))
    weights = jnp.exp(z - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink_1KG11 - top)
    some = total > 0  # a row without keys and without a sink has nothing to divide by
    p = weights / jnp.where(some, total, 1.0)
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
    o_BTNH = jnp.einsum("bkgts,bskh->btkgh", p, v, precision=_EXACT).reshape(B, T, N, H)
    return o_BTNH.astype(q_BTNH.dtype), lse[..., 0].reshape(B, N, T).transpose(0, 2, 1)


def _scores(q, k, layout, window, scale):
    """[B, K, G, T, S], UNSEEN where a query does not see a key."""
    (B, T, N, H), K = q.shape, k.shape[2]
    seen = layout.visible(window)[:, None, None]
    q = q.reshape(B, T, K, N // K, H)
    z = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=_EXACT) * scale
    return jnp.where(seen, z, UNSEEN)


def reference_backward(
    q_BTNH: Queries, k_BSKH: Keys, v_BSKH: Keys, do_BTNH: Queries, lse_BTN: Rows, delta_BTN: Rows,
    layout: Layout, window: int, scale: float,
) -> Gradients:  # fmt: skip
    """p = e^{z − lse},  dz = scale·p·(dO·v − Δ);  dq = Σ_s dz·k,  dk = Σ_t dz·q,  dv = Σ_t p·dO."""
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    q, k, v, do = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH, do_BTNH))
    p = jnp.exp(_scores(q, k, layout, window, scale) - _per_score(lse_BTN, K))
    q, do = (x.reshape(B, T, K, N // K, H) for x in (q, do))
    dp = jnp.einsum("btkgh,bskh->bkgts", do, v, precision=_EXACT)
    dz = p * (dp - _per_score(delta_BTN, K)) * scale
    dq = jnp.einsum("bkgts,bskh->btkgh", dz, k, precision=_EXACT).reshape(B, T, N, H)
    dk = jnp.einsum("bkgts,btkgh->bskh", dz, q, precision=_EXACT)
    return dq, dk, jnp.einsum("bkgts,btkgh->bskh", p, do, precision=_EXACT)


def _per_score(x_BTN, K):
    """[B, K, G, T, 1]"""
    B, T, N = x_BTN.shape
    return x_BTN.reshape(B, T, K, N // K).transpose(0, 2, 3, 1)[..., None]


def unsupported(*_arrays) -> str | None:
    """The reference runs everywhere."""
    return None
