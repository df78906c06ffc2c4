# SPDX-License-Identifier: Apache-2.0
"""The scale of a group of 32 values that makes its squared error least.

Next: pallas_kernels/grouped_matmul/mxfp4_encode.py takes it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.grouped_matmul.mxfp4_encode import (
    DOUBLED_MAGNITUDES,
    choose_ocp_exponent,
    round_to_nearest,
    scale_to_integer,
)

_LARGEST_EXPONENT = 125  # of which 6 · 2^e is finite in float32
_FRACTION_BITS = 11  # values are compared in units of 2^e / 2^11


def choose_least_error_exponent(size: Int32[Array, "*G _ F"]) -> Int32[Array, "*G 1 F"]:
    """Exponents that minimise the squared error of groups; on a tie that of the OCP rule, e.

    Only e − 1, e and e + 1 can be best. With e + 2 no value saturates, as with e + 1, and codes are
    further apart; with e − 2 the largest value errs more than the other 31 gain over e − 1.
    size: bits of |w| in float32, [*, G, 32, F].
    Numerics: values are cut to multiples of 2^(e − 11) and compared in integers, so that every
        program chooses the same scale. A choice is wrong only where the errors differ by less.
    """
    ocp = choose_ocp_exponent(size)
    value = scale_to_integer(size, ocp, _FRACTION_BITS)
    errors = {shift: _squared_error(size, value, ocp, shift) for shift in (0, -1, 1)}
    chosen, smallest_error = ocp, errors[0]
    for shift in (-1, 1):
        exponent = ocp + shift
        is_better = (
            (errors[shift] < smallest_error) & (exponent >= -127) & (exponent <= _LARGEST_EXPONENT)
        )
        chosen = jnp.where(is_better, exponent, chosen)
        smallest_error = jnp.where(is_better, errors[shift], smallest_error)
    return chosen


def _squared_error(size: Array, value: Array, ocp: Array, shift: int) -> Array:
    """Sum over a group of (|w| − its rounded value)², below 2^32."""
    code = round_to_nearest(size, ocp + shift)
    doubled = jnp.asarray(DOUBLED_MAGNITUDES, jnp.int32)[code]
    error = value - (doubled << (_FRACTION_BITS - 1 + shift))
    squared = (error * error).astype(jnp.uint32)
    return jnp.sum(squared, axis=-2, keepdims=True, dtype=jnp.uint32)
