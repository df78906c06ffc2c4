# SPDX-License-Identifier: Apache-2.0
"""What the public functions do to their arguments before anything is traced for a device."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array

FURTHEST = 2**31 - 1  # between two positions


def floats(name: str, x: Any) -> Array:
    """The argument as an array of floating-point numbers; else ValueError."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must hold floating-point numbers; got {x.dtype}. Cast it.")
    return x


def without_derivative(name: str, x: Any) -> Any:
    """The argument as it is; differentiating with respect to it raises NotImplementedError.

    For arguments whose derivative is not computed: a zero would look like an answer.
    """
    if not isinstance(x, Tracer):
        return x

    @jax.custom_jvp
    def same(x: Array) -> Array:
        return x

    @same.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            f"there is no derivative with respect to {name}. If none is wanted, pass "
            f"jax.lax.stop_gradient({name})."
        )

    return same(x)


def integers(name: str, x: Any, shape: tuple[int, ...] | None = None) -> Array:
    """The argument as int32, of the shape if one is given; else ValueError."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must hold integers; got {x.dtype}. Cast it.")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}; got {x.shape}.")
    return x.astype(jnp.int32)


def window_size(window: Any) -> int:
    """0 for None, else a number of keys of at least 1. It is compiled in, so it is not traced."""
    if window is None:
        return 0
    try:
        size = operator.index(window)
    except TypeError:
        size = 0
    if isinstance(window, bool) or size < 1:
        raise ValueError(
            "window must count at least the query's own key, a whole Python number; got "
            f"{window!r}. Pass None for no window."
        )
    return min(size, FURTHEST)


def scale_of(scale: Any, head_size: int) -> float:
    """1/√H unless given. It is compiled in, so it is not traced."""
    if isinstance(scale, Tracer):
        raise ValueError("scale must be a Python number; got a traced one. Multiply q by it.")
    return head_size**-0.5 if scale is None else float(scale)


def products(*dtypes: Any) -> lax.Precision:
    """How operands are multiplied: float32 as float32, others as they are, whatever precision the
    caller's surroundings ask of matmuls (a TPU would take float32 as bfloat16)."""
    wide = any(jnp.dtype(x).itemsize > 2 for x in dtypes)
    return lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT


def dot(a: Array, b: Array, contract: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    """The product over these axes of a and of b, float32, its operands multiplied as they are."""
    return lax.dot_general(
        a, b, (contract, ((), ())), precision=products(a.dtype, b.dtype),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
