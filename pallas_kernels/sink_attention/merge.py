# SPDX-License-Identifier: Apache-2.0
"""Attention over keys in two parts: each part's result by itself, merged by log-sum-exp.

Next: jaxmoe/model/prompt_keys.py and jaxmoe/parallel/ring.py, which read keys in parts.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_parts(
    o_BTNH: Float[Array, "B T N H"],
    lse_BTN: Float[Array, "B T N"],
    part_BTNH: Float[Array, "B T N H"],
    part_lse_BTN: Float[Array, "B T N"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Return (o, lse) over the keys of both parts, float32; o is 0 where neither has keys.

    lse = log(e^lse₁ + e^lse₂);  o = e^{lse₁ − lse}·o₁ + e^{lse₂ − lse}·o₂

    Only one of the parts may contain the sink.
    """
    total_BTN = jnp.logaddexp(lse_BTN, part_lse_BTN)
    # Without keys in either part −inf − (−inf) would be NaN.
    finite_BTN = jnp.where(jnp.isfinite(total_BTN), total_BTN, 0.0)
    weight_BTN, part_weight_BTN = (jnp.exp(x - finite_BTN) for x in (lse_BTN, part_lse_BTN))
    merged_BTNH = (
        o_BTNH.astype(jnp.float32) * weight_BTN[..., None]
        + part_BTNH.astype(jnp.float32) * part_weight_BTN[..., None]
    )
    return merged_BTNH, total_BTN
