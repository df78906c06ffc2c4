# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul as naive masks and as the formula, with values and gradients of either."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import pallas_gpu, reference
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense
from tests.pallas_kernels.three_way import three_way

NAMES = ("out", "dlhs", "drhs", "dbias")
ALPHA, LIMIT = 1.3, 0.9  # the clamps bite

knows_transposes = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10's GPU interpreter knows no transposed operand"
)


def hopper(sizes, lhs, rhs, bias):
    """The Hopper kernel, interpreted."""
    return pallas_gpu.grouped_matmul_mosaic_gpu(lhs, rhs, sizes, bias, interpret=True)


def hopper_swiglu(sizes, lhs, rhs, bias):
    return pallas_gpu.grouped_swiglu_mosaic_gpu(lhs, rhs, sizes, bias, ALPHA, LIMIT, interpret=True)


def naive(sizes, lhs, rhs, bias):
    """Every group's matrix on every row, in the inputs' dtype."""
    rhs = mxfp4_to_dense(rhs, lhs.dtype) if isinstance(rhs, Mxfp4) else rhs
    row, end = jnp.arange(lhs.shape[0], dtype=jnp.int32)[:, None], jnp.cumsum(sizes)
    is_in_group = (row < end[None, :]) & (row >= (end - sizes)[None, :])
    products = jnp.einsum("md,edf->mef", lhs, rhs) + bias[None]
    return jnp.where(is_in_group[:, :, None], products, jnp.zeros_like(products)).sum(1)


def plain_swiglu(h, alpha, limit):
    """The activation written out in the dtype of h, whose halves are gate and up."""
    gate, up = jnp.split(h, 2, axis=-1)
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def naive_swiglu(sizes, lhs, rhs, bias):
    return plain_swiglu(naive(sizes, lhs, rhs, bias), ALPHA, LIMIT)


def exact(sizes, lhs, rhs, bias):
    return reference.grouped_matmul_reference(lhs, rhs, sizes, bias)


def exact_swiglu(sizes, lhs, rhs, bias):
    return reference.grouped_swiglu_reference(lhs, rhs, sizes, bias, ALPHA, LIMIT)


forward = partial(jax.jit, static_argnums=0)(lambda f, sizes, *args: f(sizes, *args))


@partial(jax.jit, static_argnums=0)
def values_and_gradients(f, dout, sizes, lhs, rhs, bias):
    """Values and the gradients of the arrays; four-bit weights are held fixed."""
    if isinstance(rhs, Mxfp4):
        out, pull = jax.vjp(lambda lhs, bias: f(sizes, lhs, rhs, bias), lhs, bias)
    else:
        out, pull = jax.vjp(partial(f, sizes), lhs, rhs, bias)
    return out, *pull(dout)


def as_float32(*arrays):
    return [x if isinstance(x, Mxfp4) else x.astype(jnp.float32) for x in arrays]


def check_all(product, plain, oracle, args, name):
    """Check values and every gradient of `product` against `oracle`, by the error of `plain`."""
    lhs, rhs, sizes, bias, dout = args
    names = [x for x in NAMES if x != "drhs" or not isinstance(rhs, Mxfp4)]
    actual = values_and_gradients(product, dout, sizes, lhs, rhs, bias)
    simple = values_and_gradients(plain, dout, sizes, lhs, rhs, bias)
    wide = as_float32(lhs, rhs, bias, dout)
    expected = values_and_gradients(oracle, wide[3], sizes, *wide[:3])
    for array, a, b, c in zip(names, actual, simple, expected, strict=True):
        assert a.dtype == lhs.dtype
        three_way(a, b, c, f"{name} {array}")


def mark_slow(sizes, *fast):
    """All names of `sizes` as parameters, those not in `fast` as slow tests."""
    return [x if x in fast else pytest.param(x, marks=pytest.mark.slow) for x in sizes]
