# SPDX-License-Identifier: Apache-2.0
"""Checks and conversions that the public functions apply to their arguments, before dispatch."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

MAX_DISTANCE = 2**31 - 1  # largest difference of two int32 positions


def as_floats(name: str, x: Any) -> Array:
    """The argument as an array of floating-point numbers. Raises ValueError for other dtypes."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must hold floating-point numbers; got {x.dtype}. Cast it.")
    return x


def forbid_derivative(name: str, x: Any) -> Any:
    """Return the argument; differentiating with respect to it raises NotImplementedError.

    For arguments whose derivative is not computed. Returning a zero instead would hide that.
    """
    # Only a traced value can be differentiated.
    if not isinstance(x, Tracer):
        return x

    @jax.custom_jvp
    def identity(x: Array) -> Array:
        return x

    @identity.defjvp
    def _refuse_derivative(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"there is no derivative with respect to {name}. If you need none, pass "
            f"jax.lax.stop_gradient({name})."
        )

    return identity(x)


def as_integers(name: str, x: Any, shape: tuple[int, ...] | None = None) -> Array:
    """The argument as int32. Raises ValueError for other dtypes, or another shape than `shape`."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must hold integers; got {x.dtype}. Cast it.")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}; got {x.shape}.")
    return x.astype(jnp.int32)


def window_size(window: Any) -> int:
    """The window as a number of keys: 0 for None, else at least 1.

    It is a compile-time constant: a traced value raises ValueError.
    """
    if window is None:
        return 0
    try:
        size = operator.index(window)
    except TypeError:
        size = 0
    # operator.index takes True for 1.
    if isinstance(window, bool) or size < 1:
        raise ValueError(
            "window must be a Python integer of at least 1 (the query's own key); got "
            f"{window!r}. Pass None for no window."
        )
    # Kernels compare int32 distances, of which none is larger.
    return min(size, MAX_DISTANCE)


def resolve_scale(scale: Any, head_size: int) -> float:
    """The scale of the scores, by default 1/√H.

    It is a compile-time constant: a traced value raises ValueError.
    """
    if isinstance(scale, Tracer):
        raise ValueError("scale must be a Python number; got a traced one. Multiply q by it.")
    return head_size**-0.5 if scale is None else float(scale)


def matmul_precision(*dtypes: Any) -> lax.Precision:
    """The precision of a product of operands of these dtypes: HIGHEST if one has 32 bits or more.

    It is independent of the caller's `jax.default_matmul_precision`, by which a TPU would round
    float32 operands to bfloat16.
    """
    wide = any(jnp.dtype(x).itemsize > 2 for x in dtypes)
    return lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT


def dot_float32(a: Array, b: Array, contract: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """The product of a and b over the axes in `contract`, in float32; see `matmul_precision`."""
    return lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=matmul_precision(a.dtype, b.dtype),
        preferred_element_type=jnp.float32,
    )
