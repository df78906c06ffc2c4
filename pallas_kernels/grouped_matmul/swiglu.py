# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS' clamped SwiGLU: one formula for every implementation, in or out of a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float

Limit = float | Float[Array, ""]


def activate(
    gate: Float[Array, "*M F"], up: Float[Array, "*M F"], alpha: float, limit: Limit
) -> Float[Array, "*M F"]:
    """(up + 1) · gate · σ(α·gate) with gate ≤ limit and −limit ≤ up ≤ limit, in float32.

    Source: GPT-OSS model card §2.2.
    """
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1.0) * gate * (1.0 / (1.0 + jnp.exp(-alpha * gate)))


def clamped_swiglu(h_MF: Float[Array, "M F2"], alpha: float, limit: Limit) -> Float[Array, "M F"]:
    """`activate` of h = [gate | up], rounded once to h's dtype."""
    gate, up = jnp.split(h_MF, 2, axis=-1)
    return activate(gate, up, alpha, limit).astype(h_MF.dtype)
