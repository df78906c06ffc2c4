# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS' clamped SwiGLU: one formula for every implementation, in or out of a kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float

Scalar = float | Float[Array, ""]


def apply_swiglu(
    gate: Float[Array, "*M F"], up: Float[Array, "*M F"], alpha: Scalar, limit: Scalar
) -> Float[Array, "*M F"]:
    """(up + 1) · gate · σ(α·gate) with gate ≤ limit and −limit ≤ up ≤ limit, in float32.

    Numerics: value and gradient are finite for every finite gate and up; α must be above 0.
    Source: GPT-OSS model card §2.2.
    """
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    # exp(x) overflows above 88, and its derivative would be ∞/∞. So gate is clipped at −80/α, where
    # gate·σ is 1e-33.
    gate, up = jnp.clip(gate, -80.0 / alpha, limit), jnp.clip(up, -limit, limit)
    return (up + 1.0) * gate * (1.0 / (1.0 + jnp.exp(-alpha * gate)))


def clamped_swiglu(h_MF: Float[Array, "M F2"], alpha: Scalar, limit: Scalar) -> Float[Array, "M F"]:
    """`apply_swiglu` of h = [gate | up], rounded once to h's dtype."""
    gate, up = jnp.split(h_MF, 2, axis=-1)
    return apply_swiglu(gate, up, alpha, limit).astype(h_MF.dtype)
