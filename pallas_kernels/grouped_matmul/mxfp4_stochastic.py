# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding to MXFP4 codes, with the randomness of the weights' own bits.

Next: pallas_kernels/grouped_matmul/mxfp4_encode.py takes it.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.grouped_matmul.mxfp4_encode import DOUBLED_MAGNITUDES, scale_to_integer

_FRACTION_BITS = 20  # probabilities are multiples of 2^−19 to 2^−21


def round_stochastically(
    size: Int32[Array, "*G _ F"], exponent: Int32[Array, "*G 1 F"]
) -> Int32[Array, "*G _ F"]:
    """Codes of one of the two magnitudes next to x = |w| / 2^e: the upper one, b, with probability

        (x − a) / (b − a)

    so that the mean of the rounded values is x. Above 6 it is 6, and a code stays itself.
    The random number is a hash of the bits of the value and its group: equal weights are rounded
    equally in every program, and a group of which one value changes is rounded anew.
    size: bits of |w| in float32, [*, G, 32, F]; exponent: e of the groups.
    Numerics: x is cut to a multiple of 2^−20; the rest is exact.
    """
    x = scale_to_integer(size, exponent, _FRACTION_BITS)
    magnitudes = jnp.asarray(DOUBLED_MAGNITUDES, jnp.int32) << (_FRACTION_BITS - 1)
    code = jnp.zeros_like(size)
    for i in range(1, 8):
        code += (x >= magnitudes[i]).astype(jnp.int32)
    # Neighbours are 0.5, 1 or 2 apart.
    gap_bits = _FRACTION_BITS - 1 + (code >= 4).astype(jnp.int32) + (code >= 6).astype(jnp.int32)
    draw = (draw_from_bits(size) >> (32 - gap_bits).astype(jnp.uint32)).astype(jnp.int32)
    is_up = (draw < x - magnitudes[code]) & (code < 7)
    return code + is_up.astype(jnp.int32)


def draw_from_bits(size: Int32[Array, "*G _ F"]) -> UInt32[Array, "*G _ F"]:
    """Random integers of 32 bits, from the bits of each value, its group and its place there."""
    bits = size.astype(jnp.uint32)
    place = lax.broadcasted_iota(jnp.uint32, size.shape, size.ndim - 2)
    value_hash = _mix(bits ^ (place * jnp.uint32(0x9E3779B9)))
    group_hash = jnp.sum(value_hash, axis=-2, keepdims=True, dtype=jnp.uint32)
    return _mix(value_hash ^ _mix(group_hash))


def _mix(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    """A bijection that moves near numbers far apart: the last step of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
