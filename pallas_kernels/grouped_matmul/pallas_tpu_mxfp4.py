# SPDX-License-Identifier: Apache-2.0
"""Four-bit weights decoded inside a TPU kernel.

Next: `pallas_tpu_rows.py`, which multiplies them.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul import pallas_tpu_tiles as tiles
from pallas_kernels.grouped_matmul.mxfp4 import GROUP
from pallas_kernels.grouped_matmul.pallas_tpu_blocks import for_each_column_block


def decode_rows_tpu(nibbles, scales, slot, scale32, weight, base):
    """Decode a window of four-bit codes into `weight`, from row `base` on, GROUP rows at a time.

    Numerics: exact except for subnormals, which TPU arithmetic flushes to 0.
    """
    half, n_scales = nibbles.shape[1], scales.shape[1]
    height, width = weight.shape
    packed = scales[slot].astype(jnp.int32)
    # Bits of 2^(s − 128), half the scale, because 2·|fp4| is an integer. 255 is NaN.
    scale32[pl.ds(0, n_scales), pl.ds(0, width)] = jnp.where(
        packed == 255, 0x7FC00000, jnp.maximum(packed - 1, 0) << 23
    )

    def decode_group(i, j, scale, span):
        """Decode the 32 rows of one scale, row j of a register of scales."""
        target_row = i * 8 * GROUP + j * GROUP
        row = base + target_row

        @pl.when((target_row < height) & (row < 2 * half))
        def _():
            high = (row >= half).astype(jnp.int32)
            source = pl.multiple_of(row - half * high, GROUP)
            code = nibbles[slot, pl.ds(source, GROUP), span].astype(jnp.int32) >> (4 * high)
            # {0, 1, 2, 3, 4, 6, 8, 12}[code & 7], packed as hexadecimal digits
            twice = (jnp.int32(-0x379BCDF0) >> ((code & 7) << 2)) & 15
            value = lax.bitcast_convert_type(twice.astype(jnp.float32) * scale, jnp.int32)
            value = lax.bitcast_convert_type(value | ((code & 8) << 28), jnp.float32)
            weight[pl.ds(pl.multiple_of(target_row, GROUP), GROUP), span] = value.astype(
                weight.dtype
            )

    def decode_groups(i, _):
        def decode_columns(start, size):
            span = pl.ds(start, size)
            bits = scale32[pl.ds(pl.multiple_of(base // GROUP + i * 8, 8), 8), span]
            scale = lax.bitcast_convert_type(bits, jnp.float32)
            for j in range(8):
                decode_group(i, j, scale[j : j + 1], span)

        for_each_column_block(width, tiles.COLUMNS, decode_columns)

    lax.fori_loop(0, -(-height // (8 * GROUP)), decode_groups, None)
