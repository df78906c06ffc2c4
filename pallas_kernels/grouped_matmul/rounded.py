# SPDX-License-Identifier: Apache-2.0
"""Four-bit matrices with the unrounded ones behind them, the masters, which get the gradient.

    dL/dmaster = dL/dvalue where |master| ≤ 6 · 2^e of its group of 32, else 0

This is the straight-through gradient: rounding counts as the identity, except where a master is
above the largest code and a smaller change of it changes nothing. The products read the packed
values alone; a backward pass sums dL/dvalue as for dense matrices. Next: chip_kernels.py.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8

from pallas_kernels.grouped_matmul.mxfp4 import (
    GROUP,
    Mxfp4,
    mxfp4_to_dense,
    mxfp4_to_float32_bits,
    split_part,
)

_LARGEST_CODE = 7  # the value 6


def has_masters(rhs: Any) -> bool:
    """True for four-bit matrices that train."""
    return isinstance(rhs, Mxfp4) and rhs.master_EDF is not None


def is_frozen(rhs: Any) -> bool:
    """True for four-bit matrices without masters."""
    return isinstance(rhs, Mxfp4) and rhs.master_EDF is None


def values_of(rhs: Any) -> Any:
    """The matrices that a product reads: without masters."""
    return rhs._replace(master_EDF=None) if isinstance(rhs, Mxfp4) else rhs


def read_rounded(rhs: Any, dtype: DTypeLike) -> Float[Array, "E D F"]:
    """Decode to [E, D, F]; the gradient of the values goes to the masters."""
    return _decode(rhs.master_EDF, _own_matrices(rhs), jnp.dtype(dtype))


def gradient_of_masters(rhs: Any, gradient_EDF: Float[Array, "E D F"]) -> Float[Array, "E D F"]:
    """The gradient of the masters, in their dtype, by that of the values."""
    return _mask_saturated(gradient_EDF, rhs.master_EDF, _own_matrices(rhs))


def cotangent_of_rounded(gradient_EDF: Float[Array, "E D F"]) -> Any:
    """The cotangent of four-bit matrices by the gradient of their masters; values have none."""
    no_gradient: Any = None
    return Mxfp4(no_gradient, no_gradient, None, gradient_EDF)


def group_of_rounded(rhs: Any, e: Int[Array, ""]) -> Mxfp4:
    """Matrix e and its master, as a stack of one; the packed values stay in their stack."""
    first = e if rhs.first is None else rhs.first + e
    return rhs._replace(first=first, master_EDF=lax.dynamic_slice_in_dim(rhs.master_EDF, e, 1))


def is_saturated(
    master_EDF: Float[Array, "*E D F"], scales_EDF: UInt8[Array, "*E D_32nd F"]
) -> Bool[Array, "*E D F"]:
    """True where a master is above the largest value of its group, 6 · 2^e."""
    *stack, n_groups, width = scales_EDF.shape
    groups = master_EDF.reshape(*stack, n_groups, GROUP, width)
    return is_above_largest(groups, scales_EDF[..., None, :]).reshape(master_EDF.shape)


def is_above_largest(
    master: Float[Array, "*s D F"], scale: UInt8[Array, "*s d F"]
) -> Bool[Array, "*s D F"]:
    """True where a master is above the largest value of a group with this scale, 6 · 2^e."""
    scale = scale.astype(jnp.int32)
    # Compared as bits, because a device may flush subnormals.
    largest = mxfp4_to_float32_bits(jnp.full_like(scale, _LARGEST_CODE), scale)
    bits = lax.bitcast_convert_type(master.astype(jnp.float32), jnp.int32)
    return (bits & 0x7FFFFFFF) > largest


def _own_matrices(rhs: Any) -> Mxfp4:
    """The masters' own matrices; sliced out of the stack that they are part of."""
    stack, first = split_part(rhs)
    if first is None:
        return stack
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, rhs.shape[0]), stack)


def _mask_saturated(gradient_EDF: Array, master_EDF: Array, packed: Mxfp4) -> Array:
    saturated = is_saturated(master_EDF, packed.scales_EDF)
    gradient_EDF = gradient_EDF.astype(master_EDF.dtype)
    return jnp.where(saturated, jnp.zeros_like(gradient_EDF), gradient_EDF)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _decode(master_EDF: Array, packed: Mxfp4, dtype: Any) -> Array:
    return mxfp4_to_dense(packed, dtype)


def _decode_forward(master_EDF: Array, packed: Mxfp4, dtype: Any) -> tuple[Array, Any]:
    return mxfp4_to_dense(packed, dtype), (master_EDF, packed)


def _decode_backward(dtype: Any, saved: Any, gradient_EDF: Array) -> tuple[Array, Mxfp4]:
    no_gradient = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), saved[1])
    return _mask_saturated(gradient_EDF, *saved), no_gradient


_decode.defvjp(_decode_forward, _decode_backward)
