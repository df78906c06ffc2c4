# SPDX-License-Identifier: Apache-2.0
"""Round matrices to MXFP4 on the device, to the bit as jaxmoe/checkpoint/mxfp4.py does on the host.

Integer arithmetic on the bits of float32: a float comparison would flush subnormals to 0 on most
devices, and programs that fuse differently could round differently.
Next: pallas_kernels/grouped_matmul/mxfp4_scales.py and mxfp4_stochastic.py, other rules.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4

# Of the bits of groups [*, G, 32, F], without signs: their exponents [*, G, 1, F].
ChooseExponent = Callable[[Array], Array]
# Of these bits and exponents: the codes of the magnitudes, 0 to 7.
RoundMagnitude = Callable[[Array, Array], Array]

# Values between two codes, m · 2^k with m in [1, 2), and whether the upper code takes a tie: the
# even one does.
_MIDPOINTS = (
    (1.0, -2, False),
    (1.5, -1, True),
    (1.25, 0, False),
    (1.75, 0, True),
    (1.25, 1, False),
    (1.75, 1, True),
    (1.25, 2, False),
)
DOUBLED_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)  # of codes 0 to 7
MANTISSA_BITS = 23
_INFINITE = 0x7F800000


def choose_ocp_exponent(size: Int32[Array, "*G _ F"]) -> Int32[Array, "*G 1 F"]:
    """Exponents e = clip(floor(log2(max|w|)) − 2, −127, 127) of groups; −3 for one of zeros.

    size: bits of |w| in float32, [*, G, 32, F].
    """
    largest = size.max(axis=-2, keepdims=True)
    exponent = jnp.clip((largest >> MANTISSA_BITS) - 129, -127, 127)
    return jnp.where(largest == 0, -3, exponent)


def round_to_nearest(
    size: Int32[Array, "*G _ F"], exponent: Int32[Array, "*G 1 F"]
) -> Int32[Array, "*G _ F"]:
    """Codes of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 nearest to |w| / 2^e; ties to even."""
    code = jnp.zeros_like(size)
    for mantissa, power, is_up in _MIDPOINTS:
        midpoint = _float_bits(mantissa, power + exponent)
        code += (size >= midpoint if is_up else size > midpoint).astype(jnp.int32)
    return code


def encode_mxfp4(
    w_EDF: Float[Array, "*E D F"],
    *,
    choose_exponent: ChooseExponent = choose_ocp_exponent,
    round_magnitude: RoundMagnitude = round_to_nearest,
) -> Mxfp4:
    """Round [E, D, F] (or [D, F]) to the four-bit format, in groups of 32 rows.

        e = clip(floor(log2(max|w|)) − 2, −127, 127) of a group
        code = the magnitude of 0, 0.5, 1, 1.5, 2, 3, 4, 6 that is nearest to |w| / 2^e

    Ties go to the even code; what is above 6 · 2^e becomes 6 · 2^e. A group of zeros has e = −3.
    choose_exponent, round_magnitude: other rules for e and for the code.
    Numerics: exact integer arithmetic; the bytes are those of `encode_blocks` and
        `blocks_to_halves`. Zero keeps its sign. Decoded values are encoded to themselves.
        A group with NaN or infinity gets the scale 255, which is NaN: nothing here can raise.
    Raises: ValueError if D is no multiple of 64, so that each half of the rows is whole groups.
    Source: OCP Microscaling Formats (MX) 1.0, §6.3.
    """
    *stack, depth, width = w_EDF.shape
    if depth % (2 * GROUP):
        raise ValueError(
            f"MXFP4 needs a number of rows that is a multiple of {2 * GROUP}, got {w_EDF.shape}. "
            "Keep this matrix dense, or choose other sizes."
        )
    bits = lax.bitcast_convert_type(w_EDF.astype(jnp.float32), jnp.int32)
    groups = bits.reshape(*stack, depth // GROUP, GROUP, width)
    size = groups & 0x7FFFFFFF
    exponent = choose_exponent(size)
    code = round_magnitude(size, exponent) | ((groups >> 28) & 8)
    is_finite = size.max(axis=-2, keepdims=True) < _INFINITE
    scale = jnp.where(is_finite, exponent + 127, 255)
    code = code.reshape(*stack, 2, depth // 2, width)
    nibbles = code[..., 0, :, :] | (code[..., 1, :, :] << 4)
    return Mxfp4(nibbles.astype(jnp.uint8), scale[..., 0, :].astype(jnp.uint8))


def scale_to_integer(
    size: Int32[Array, "*G _ F"], exponent: Int32[Array, "*G 1 F"], fraction_bits: int
) -> Int32[Array, "*G _ F"]:
    """floor(|w| / 2^e · 2^fraction_bits), where |w| / 2^e is below 8; at most 22 bits."""
    field = size >> MANTISSA_BITS
    fraction = size & ((1 << MANTISSA_BITS) - 1)
    mantissa = jnp.where(field > 0, fraction | (1 << MANTISSA_BITS), fraction)
    # |w| = mantissa · 2^(field − 150); a subnormal has the exponent of field 1.
    shift = 150 - fraction_bits + exponent - jnp.maximum(field, 1)
    return jnp.where(
        shift < 0, mantissa << jnp.clip(-shift, 0, 31), mantissa >> jnp.clip(shift, 0, 31)
    )


def _float_bits(mantissa: float, exponent: Int32[Array, "*s"]) -> Int32[Array, "*s"]:
    """Bits of the float32 mantissa · 2^exponent, from 2^−129 on; the mantissa is k/4 in [1, 2)."""
    fraction = int(mantissa * (1 << MANTISSA_BITS))  # with the leading bit
    field = exponent + 127
    normal = (field << MANTISSA_BITS) | (fraction & ((1 << MANTISSA_BITS) - 1))
    # Below 2^−126 the leading bit is stored, and moves to the right.
    return jnp.where(field > 0, normal, fraction >> jnp.clip(1 - field, 0, 3))
