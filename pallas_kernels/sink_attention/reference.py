# SPDX-License-Identifier: Apache-2.0
"""The oracle: attention with a sink in float32, as the formula reads, O(T·S) memory.

Next: xla.py, the same in blocks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.masks import visible

UNSEEN = -2e30  # a score that weighs nothing beside any other, and stays finite in differences


def reference(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    sink_N: Float[Array, " N"],
    q_positions_BT: Int[Array, "B T"],
    k_positions_BS: Int[Array, "B S"],
    q_segments_BT: Int[Array, "B T"],
    k_segments_BS: Int[Array, "B S"],
    window: int,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """o = Σ_s e^{z_s − lse} v_s,  lse = log(Σ_s e^{z_s} + e^{sink}),  z = scale·q·k if seen."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH, k_BSKH, v_BSKH))
    sink_1KG11 = sink_N.astype(jnp.float32).reshape(1, K, N // K, 1, 1)
    seen = visible(
        q_positions_BT[:, :, None], k_positions_BS[:, None, :], window,
        q_segments_BT[:, :, None], k_segments_BS[:, None, :],
    )[:, None, None]  # fmt: skip
    exact = jax.lax.Precision.HIGHEST
    q = q.reshape(B, T, K, N // K, H)
    z = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=exact) * scale
    z = jnp.where(seen, z, UNSEEN)
    top = jnp.maximum(jnp.max(z, axis=-1, keepdims=True, initial=UNSEEN), sink_1KG11)
    top = jax.lax.stop_gradient(jnp.maximum(top, UNSEEN / 2))
    weights = jnp.exp(z - top)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink_1KG11 - top)
    some = total > 0  # a row without keys and without a sink has nothing to divide by
    p = weights / jnp.where(some, total, 1.0)
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
    o_BTNH = jnp.einsum("bkgts,bskh->btkgh", p, v, precision=exact).reshape(B, T, N, H)
    return o_BTNH.astype(q_BTNH.dtype), lse[..., 0].reshape(B, N, T).transpose(0, 2, 1)


def unsupported(*_arrays) -> str | None:
    """The reference runs everywhere."""
    return None
