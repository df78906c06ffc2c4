# SPDX-License-Identifier: Apache-2.0
"""YaRN rotary positions. Next: jaxmoe/model/attention.py."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.config import ModelConfig


def yarn_frequencies(cfg: ModelConfig) -> tuple[np.ndarray, float]:
    """Return the angular frequencies [H/2] in float32, and the factor on cos and sin.

        f_j = θ^(−2j/H) · (r_j + (1 − r_j)/s),   r = 1 − ramp between the two correction dimensions
        d(β) = H · ln(T0 / 2πβ) / (2 ln θ)
        factor = 1 + 0.1·ln(s)

    Dimensions that make at least β_fast rotations within the original context keep their frequency;
    those with at most β_slow rotations divide it by s.

    Numerics: computed on the host in float32, as for the released model: at position 100,000 one
    bit of a frequency is 0.01 rad.
    Source: arXiv:2309.00071 §3.2, §3.4; GPT-OSS does not round the correction dimensions.
    """
    half, theta, scale = cfg.head_dim // 2, cfg.rope_theta, cfg.rope_factor

    def correction_dim(rotations: float) -> float:
        ratio = cfg.rope_original_context / (rotations * 2 * math.pi)
        return cfg.head_dim * math.log(ratio) / (2 * math.log(theta))

    low, high = correction_dim(cfg.rope_beta_fast), correction_dim(cfg.rope_beta_slow)
    if cfg.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, cfg.head_dim - 1)
    # Equal bounds would divide by 0 in the ramp.
    high = high + 1e-3 if low == high else high
    exponents = np.arange(0, cfg.head_dim, 2, dtype=np.float32) / np.float32(cfg.head_dim)
    # Computed in float64 and rounded once: numpy's float32 power can be one bit off, which is
    # visible at position 5,000.
    periods = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    ramp = (np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    unscaled_share = np.float32(1) - np.clip(ramp, 0, 1)
    unscaled = np.float32(1) / periods
    scaled = np.float32(1) / (np.float32(scale) * periods)
    frequencies = scaled * (np.float32(1) - unscaled_share) + unscaled * unscaled_share
    return frequencies, 1.0 if scale <= 1 else 0.1 * math.log(scale) + 1.0


def rope_tables(
    positions_BT: Int[Array, "B T"], cfg: ModelConfig
) -> tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]:
    """Return cos and sin of every position, float32, one column per pair of head entries."""
    frequencies, factor = yarn_frequencies(cfg)
    angles = positions_BT.astype(jnp.float32)[:, :, None, None] * jnp.asarray(
        frequencies[None, None, None, :]
    )
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x_BTNH: Float[Array, "B T N H"],
    tables: tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]],
) -> Float[Array, "B T N H"]:
    """Rotate the pairs (x_j, x_{j+H/2}) by their angles, in float32, rounded once at the end."""
    cos, sin = tables
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
