# SPDX-License-Identifier: Apache-2.0
"""The two small layers everything else is made of. Next: jaxmoe/model/attention.py."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*B D"], scale_D: Float[Array, " D"], eps: float) -> Array:
    """x / sqrt(mean(x²) + ε) · scale, in float32, rounded once at the end to x's dtype.

    Source: GPT-OSS multiplies by the scale before the rounding, unlike Llama.
    """
    x32 = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * _per_row(scale_D, x)).astype(x.dtype)


def linear(x: Float[Array, "*B D"], w_DF: Float[Array, "D F"], b_F: Float[Array, " F"]) -> Array:
    """x·w + b: accumulated in float32, rounded once to x's dtype."""
    y = jnp.dot(x, w_DF.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y + _per_row(b_F, y)).astype(x.dtype)


def _per_row(v_D: Array, x: Array) -> Array:
    """A vector in float32, shaped to combine with x along its last axis."""
    return v_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + v_D.shape)
