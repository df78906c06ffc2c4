# SPDX-License-Identifier: Apache-2.0
"""Four-bit matrices with masters: inputs, the formula in float64, and naive products.

All sizes differ; the experts stand in a larger stack, whose other matrices are NaN; one has no
rows, and some rows have no expert.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4
from tests.pallas_kernels.grouped_matmul.matmul_oracle import naive, plain_swiglu
from tests.pallas_kernels.three_way import three_way

M, D, F = 118, 192, 256
SIZES = (11, 67, 0, 23, 9)
IDLE, STACK, FIRST = 2, 8, 1
ALPHA, LIMIT = 1.3, 2.5
NAMES = ("out", "dlhs", "dmaster", "dbias")


@cache
def draw_inputs(dtype, swiglu, master_dtype=jnp.float32):
    """dout, sizes, lhs, the experts as part of a stack, bias, all but the masters in dtype."""
    lhs_key, master_key, bias_key, dout_key = jax.random.split(jax.random.key(3), 4)
    E = len(SIZES)
    # Spread over groups as trained weights are, so that scales differ; some masters saturate.
    size = 2.0 ** jnp.arange(-6.0, 0.0)[None, :, None, None]
    master = jax.random.normal(master_key, (E, D // 32, 32, F)) * size / 2
    master = master.reshape(E, D, F).astype(master_dtype)
    encoded = encode_mxfp4(master)
    stack = Mxfp4(
        jnp.full((STACK, D // 2, F), 0x5A, jnp.uint8)
        .at[FIRST : FIRST + E]
        .set(encoded.nibbles_EDF),
        jnp.full((STACK, D // 32, F), 255, jnp.uint8).at[FIRST : FIRST + E].set(encoded.scales_EDF),
    )
    lhs, bias, dout = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in (
            (lhs_key, (M, D)),
            (bias_key, (E, F)),
            (dout_key, (M, F // 2 if swiglu else F)),
        )
    )
    rhs = stack._replace(first=jnp.int32(FIRST), master_EDF=master)
    return dout, jnp.asarray(SIZES, jnp.int32), lhs, rhs, bias


def own_matrices(rhs):
    """The packed experts by themselves."""
    return Mxfp4(*(x[FIRST : FIRST + len(SIZES)] for x in rhs.codes))


def find_saturated(master_EDF):
    """Masters above 6 · 2^e of their group, by the definition of e, in float64."""
    size = np.abs(np.asarray(master_EDF, np.float64)).reshape(len(master_EDF), -1, 32, F)
    exponent = np.floor(np.log2(size.max(axis=2, keepdims=True))) - 2
    return (size > 6 * 2.0**exponent).reshape(master_EDF.shape)


@partial(jax.jit, static_argnums=0)
def values_and_gradients(run, dout, sizes, lhs, rhs, bias):
    """The value, and the gradients of lhs, masters and bias."""
    out, pull = jax.vjp(
        lambda lhs, master, bias: run(sizes, lhs, rhs._replace(master_EDF=master), bias),
        lhs,
        rhs.master_EDF,
        bias,
    )
    return out, *pull(dout)


@partial(jax.jit, static_argnums=0)
def found_of_values(swiglu, dout, sizes, lhs, values, bias):
    """The same of dense matrices, every one on every row, in the inputs' dtype."""

    def run(lhs, values, bias):
        h = naive(sizes, lhs, values, bias)
        return plain_swiglu(h, ALPHA, LIMIT) if swiglu else h

    out, pull = jax.vjp(run, lhs, values, bias)
    return out, *pull(dout)


@cache
def naive_and_right(dtype, swiglu, master_dtype=jnp.float32):
    """Plain products in dtype, and the formula in float64."""
    dout, sizes, lhs, rhs, bias = draw_inputs(dtype, swiglu, master_dtype)
    values = mxfp4_to_dense(own_matrices(rhs))
    saturated = find_saturated(rhs.master_EDF)
    assert 0.01 < saturated.mean() < 0.1 and saturated.any(axis=(1, 2)).all()
    plain = list(found_of_values(swiglu, dout, sizes, lhs, values.astype(dtype), bias))
    with jax.enable_x64(True):
        dout, lhs, values, bias = (
            jnp.asarray(np.asarray(x.astype(jnp.float32), np.float64))
            for x in (dout, lhs, values, bias)
        )
        exact = [np.asarray(x) for x in found_of_values(swiglu, dout, sizes, lhs, values, bias)]
    for results in plain, exact:
        results[2] = np.where(saturated, 0, np.asarray(results[2], np.float64))
    return plain, exact


def check(actual, dtype, swiglu, master_dtype=jnp.float32):
    """Assert the three-way rule of values and gradients, their dtypes, and the exact zeros."""
    plain, exact = naive_and_right(dtype, swiglu, master_dtype)
    for name, x, a, b in zip(NAMES, actual, plain, exact, strict=True):
        assert x.dtype == (master_dtype if name == "dmaster" else dtype)
        three_way(x, a, b, name)
    out, dlhs, dmaster, dbias = (np.asarray(x, np.float32) for x in actual)
    assert not out[sum(SIZES) :].any() and not dlhs[sum(SIZES) :].any(), "rows of no expert"
    assert not dmaster[IDLE].any() and not dbias[IDLE].any(), "an idle expert"
    saturated = find_saturated(draw_inputs(dtype, swiglu, master_dtype)[3].master_EDF)
    assert not dmaster[saturated].any(), "saturated masters"
