# SPDX-License-Identifier: Apache-2.0
"""The reference: the formula of attention with a sink, in float32 with O(T·S) memory.

Next: xla.py, the same in blocks.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import signature as sig

# Score of an unseen key. With −∞ the difference of two such scores would be NaN; with this one the
# weight is 0 and all differences are finite.
UNSEEN = -2e30
_EXACT = jax.lax.Precision.HIGHEST


def sink_attention_reference(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    sink_N: sig.Sinks,
    layout: Layout,
    window: int,
    scale: float,
) -> sig.Result:
    """o = Σ_s e^{z_s − lse} v_s,  lse = log(Σ_s e^{z_s} + e^{sink}),  z = scale·q·k if seen."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    sink_1KG11 = sink_N.astype(jnp.float32).reshape(1, K, N // K, 1, 1)
    z = _masked_scores(q, k, layout, window, scale)
    top = jnp.maximum(jnp.max(z, axis=-1, keepdims=True, initial=UNSEEN), sink_1KG11)
    # The result does not depend on `top`, so it needs no gradient. It stays above UNSEEN, so that a
    # row that sees no key has weights 0 and not 1.
    top = jax.lax.stop_gradient(jnp.maximum(top, UNSEEN / 2))
    weights = jnp.exp(z - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink_1KG11 - top)
    has_weights = total > 0  # a row without keys and without a sink has nothing to divide by
    p = weights / jnp.where(has_weights, total, 1.0)
    lse = jnp.where(has_weights, top + jnp.log(jnp.where(has_weights, total, 1.0)), -jnp.inf)
    o_BTNH = jnp.einsum("bkgts,bskh->btkgh", p, v, precision=_EXACT).reshape(B, T, N, H)
    return o_BTNH.astype(q_BTNH.dtype), lse[..., 0].reshape(B, N, T).transpose(0, 2, 1)


def _masked_scores(q, k, layout, window, scale):
    """[B, K, G, T, S], UNSEEN where a query does not see a key."""
    (B, T, N, H), K = q.shape, k.shape[2]
    visible = layout.visible_mask(window)[:, None, None]
    q = q.reshape(B, T, K, N // K, H)
    z = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=_EXACT) * scale
    return jnp.where(visible, z, UNSEEN)


def sink_attention_backward_reference(
    q_BTNH: sig.Queries,
    k_BSKH: sig.Keys,
    v_BSKH: sig.Keys,
    dout_BTNH: sig.Queries,
    lse_BTN: sig.Rows,
    delta_BTN: sig.Rows,
    layout: Layout,
    window: int,
    scale: float,
) -> sig.Gradients:
    """p = e^{z − lse},  dz = scale·p·(dO·v − Δ);  dq = Σ_s dz·k,  dk = Σ_t dz·q,  dv = Σ_t p·dO."""
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    q, k, v, dout = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH, dout_BTNH))
    p = jnp.exp(_masked_scores(q, k, layout, window, scale) - _per_score(lse_BTN, K))
    q, dout = (x.reshape(B, T, K, N // K, H) for x in (q, dout))
    dp = jnp.einsum("btkgh,bskh->bkgts", dout, v, precision=_EXACT)
    dz = p * (dp - _per_score(delta_BTN, K)) * scale
    dq = jnp.einsum("bkgts,bskh->btkgh", dz, k, precision=_EXACT).reshape(B, T, N, H)
    dk = jnp.einsum("bkgts,btkgh->bskh", dz, q, precision=_EXACT)
    return dq, dk, jnp.einsum("bkgts,btkgh->bskh", p, dout, precision=_EXACT)


def _per_score(x_BTN, K):
    """One value per query and head, as [B, K, G, T, 1] to broadcast against scores."""
    B, T, N = x_BTN.shape
    return x_BTN.reshape(B, T, K, N // K).transpose(0, 2, 3, 1)[..., None]
