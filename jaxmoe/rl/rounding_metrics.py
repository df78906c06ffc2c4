# SPDX-License-Identifier: Apache-2.0
"""Metrics of experts that are read in four bits: codes that a step changed, and saturated values.

A master that never crosses the border to another code teaches the model nothing, whatever its
gradient. Next: jaxmoe/model/rounded.py.
"""

import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.model.rounded import MATRICES
from jaxmoe.shapes import Metrics, Params
from pallas_kernels.grouped_matmul import Mxfp4
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, mxfp4_to_dense
from pallas_kernels.grouped_matmul.rounded import is_saturated


def rounding_metrics(before: Params, after: Params, masters: Params) -> Metrics:
    """Shares of all values of the experts' matrices, and their error.

    quant/moved_frac: values whose code or scale changed in this step.
    quant/saturated_frac: masters above the largest value of their group; they get no gradient.
    quant/relative_error: ‖values − masters‖ / ‖masters‖, Frobenius.

    before, after: packed weights (`round_experts`) around the step; masters: the weights after it.
    """
    moved, saturated, error, norm, count = (jnp.zeros(()) for _ in range(5))
    for kind, layer in after["layers"].items():
        for name in MATRICES:
            old, new = before["layers"][kind][name], layer[name]
            master = masters["layers"][kind][name].astype(jnp.float32)
            moved += count_changed(old, new)
            saturated += jnp.sum(is_saturated(master, new.scales_EDF), dtype=jnp.float32)
            error += jnp.sum(jnp.square(mxfp4_to_dense(new) - master))
            norm += jnp.sum(jnp.square(master))
            count += master.size
    return {
        "quant/moved_frac": moved / count,
        "quant/saturated_frac": saturated / count,
        "quant/relative_error": jnp.sqrt(error / norm),
    }


def count_changed(old: Mxfp4, new: Mxfp4) -> Array:
    """Number of values whose code or scale differs, float32."""
    differs = old.nibbles_EDF ^ new.nibbles_EDF
    half = differs.shape[-2]
    is_scale_changed = jnp.repeat(old.scales_EDF != new.scales_EDF, GROUP, axis=-2)
    low = (differs & 15 != 0) | is_scale_changed[..., :half, :]
    high = (differs >> 4 != 0) | is_scale_changed[..., half:, :]
    return jnp.sum(low, dtype=jnp.float32) + jnp.sum(high, dtype=jnp.float32)
