# SPDX-License-Identifier: Apache-2.0
"""Four-bit weights laid out for matmul kernels: MXFP4 with two halves of the rows in each byte.

The released files pack neighbouring rows into a byte, so unpacking a tile interleaves rows, which
is slow in tiled memories. Here a byte holds row d and row d + D/2, so its halves are two complete
tiles. Values are assembled as bits, never multiplied, so subnormals survive where arithmetic
flushes them to 0. Next: `pallas_tpu_mxfp4.py` and `hopper/pallas_gpu_mxfp4.py`, which decode tiles.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int32, UInt8

GROUP = 32  # consecutive rows under one scale


class Mxfp4(NamedTuple):
    """A stack of [D, F] matrices with four bits a value, 4.25 with the scales.

    nibbles_EDF[e, d, f]: the FP4 E2M1 code of row d in the low half, of row d + D/2 in the high.
    scales_EDF[e, g, f]: the scale s of rows 32g … 32g + 31; a value is fp4(code) · 2^(s − 127).
    first: if only a part of the stack is meant, the index of its first matrix; the part has as many
        as there are groups of rows. Kernels read it in place; a slice would be a copy.
    master_EDF: the unrounded matrices of a stack that trains, or of the part alone (`rounded.py`).
    """

    nibbles_EDF: UInt8[Array, "E D_half F"]
    scales_EDF: UInt8[Array, "E D_32nd F"]
    first: Int32[Array, ""] | None = None
    master_EDF: Float[Array, "E D F"] | None = None

    @property
    def codes(self) -> tuple[Any, Any]:
        """The nibbles and the scales, of jax or, where a file is read or written, of numpy."""
        return self.nibbles_EDF, self.scales_EDF

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the masters, or without them of the complete stack, decoded."""
        if self.master_EDF is not None:
            return self.master_EDF.shape
        *lead, half, width = self.nibbles_EDF.shape
        return (*lead, 2 * half, width)


def split_part(rhs: Any) -> tuple[Any, Any]:
    """The matrices without masters, and of a part of a stack the index of its first one."""
    return (Mxfp4(*rhs.codes), rhs.first) if isinstance(rhs, Mxfp4) else (rhs, None)


def mxfp4_to_float32_bits(
    code: Int32[Array, "*s"], scale: Int32[Array, "*s"]
) -> Int32[Array, "*s"]:
    """Bits of the float32 number fp4(code) · 2^(scale − 127); the lower 16 bits are 0.

    Numerics: exact, subnormals included; infinite past the largest value; scale 255 gives NaN.
    Source: OCP Microscaling Formats (MX) 1.0, §5.3 and §6.3.
    """
    size = code & 7
    # E2M1 magnitudes 2…7 are normal: two bits of exponent, one of mantissa. 1 is 2^−1.
    exponent = jnp.where(size == 1, scale - 1, scale + (size >> 1) - 1)
    half = jnp.where(size == 1, 0, size & 1)  # the mantissa's top bit
    normal = (exponent << 23) | (half << 22)
    subnormal = jnp.where(exponent < 0, 1 << 21, (2 + half) << 21)  # 2^−128 = 1 << 21
    value = jnp.where(exponent > 0, normal, subnormal)
    value = jnp.where(exponent >= 255, 0x7F800000, value)
    value = jnp.where(size == 0, 0, value)
    value = jnp.where(scale == 255, 0x7FC00000, value)
    return value | ((code & 8) << 28)


def mxfp4_to_dense(x: Mxfp4, dtype: DTypeLike = jnp.float32) -> Float[Array, "*E D F"]:
    """Decode to [E, D, F] (or [D, F] of one matrix); exact in float32 and bfloat16."""
    byte = x.nibbles_EDF.astype(jnp.int32)
    code = jnp.concatenate([byte & 15, byte >> 4], axis=-2)
    scale = jnp.repeat(x.scales_EDF.astype(jnp.int32), GROUP, axis=-2)
    word = mxfp4_to_float32_bits(code, scale)
    # A cast from float32 may flush subnormals, so the upper half of the bits is taken instead.
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type((word >> 16).astype(jnp.int16), jnp.bfloat16)
    return lax.bitcast_convert_type(word, jnp.float32).astype(dtype)
