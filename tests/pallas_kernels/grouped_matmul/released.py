# SPDX-License-Identifier: Apache-2.0
"""Four-bit weights as GPT-OSS is released, in the layout of the kernels."""

import jax.numpy as jnp

from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4


def pack_released(blocks, scales):
    """Blocks [E, F, D/32, 16], low half first, and scales [E, F, D/32]; no value changes."""
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:2], -1)
    low, high = jnp.split(codes.swapaxes(1, 2), 2, axis=1)
    return Mxfp4(low | (high << 4), jnp.asarray(scales).swapaxes(1, 2))
