# SPDX-License-Identifier: Apache-2.0
"""A change of low rank beside the matrices: the formula in float64, gradients, and four bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import LowRank, grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense
from tests.pallas_kernels.three_way import three_way

M, D, F, R = 150, 64, 40, 5
SIZES = jnp.array([0, 97, 1, 31, 9], jnp.int32)  # an empty group, rows past the sum
SCALE = 1.75
NAMES = ("out", "dlhs", "da", "db")


def arrays(dtype=jnp.float32):
    """lhs and matrices in dtype, the change in float32, a bias and a cotangent."""
    keys = iter(jax.random.split(jax.random.key(3), 8))

    def draw(*shape):
        return jax.random.normal(next(keys), shape)

    n = len(SIZES)
    rhs_EDF = Mxfp4(
        jax.random.randint(next(keys), (n, D // 2, F), 0, 256).astype(jnp.uint8),
        jax.random.randint(next(keys), (n, D // 32, F), 120, 126).astype(jnp.uint8),
    )
    lhs_MD, bias_EF, dout_MF = draw(M, D), draw(n, F), draw(M, F)
    a_ERD, b_ERF = draw(n, R, D) / 8, draw(n, R, F)
    return lhs_MD.astype(dtype), rhs_EDF, bias_EF, a_ERD, b_ERF, dout_MF.astype(dtype)


def oracle(lhs, rhs, bias, a, b, dout, scale=SCALE):
    lhs, rhs, bias, a, b, dout = (
        np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)
        for x in (lhs, mxfp4_to_dense(rhs), bias, a, b, dout)
    )
    out, dlhs, da, db = (np.zeros_like(x) for x in (dout, lhs, a, b))
    begin = 0
    for e, size in enumerate(np.asarray(SIZES)):
        rows = slice(begin, begin + size)
        begin += size
        low, dlow = lhs[rows] @ a[e].T, dout[rows] @ b[e].T
        out[rows] = lhs[rows] @ rhs[e] + bias[e] + scale * low @ b[e]
        dlhs[rows] = dout[rows] @ rhs[e].T + scale * dlow @ a[e]
        da[e], db[e] = scale * dlow.T @ lhs[rows], scale * low.T @ dout[rows]
    return out, dlhs, da, db


@partial(jax.jit, static_argnames=("impl", "packed"))
def found(lhs, rhs, bias, a, b, dout, impl, packed=True):
    rhs = rhs if packed else mxfp4_to_dense(rhs, lhs.dtype)

    def run(lhs, a, b):
        return grouped_matmul(
            lhs, rhs, SIZES, bias_EF=bias, low_rank=LowRank(a, b, SCALE), impl=impl
        )

    out, pull = jax.vjp(run, lhs, a, b)
    return out, *pull(dout)


@partial(jax.jit)
def merged(lhs, rhs, bias, a, b, dout):
    """Naively, over the whole matrix and by its reference, in the inputs' dtype."""

    def run(lhs, a, b):
        change = SCALE * jnp.einsum("erd,erf->edf", a, b)
        whole = (mxfp4_to_dense(rhs) + change).astype(lhs.dtype)
        return grouped_matmul(lhs, whole, SIZES, bias_EF=bias, impl="reference")

    out, pull = jax.vjp(run, lhs, a, b)
    return out, *pull(dout)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [True, False], ids=["four bits", "dense"])
def test_values_and_gradients_match_merged_matrices(dtype, packed):
    given = arrays(dtype)
    ours = found(*given, impl="xla", packed=packed)
    assert [x.dtype for x in ours] == [dtype, dtype, jnp.float32, jnp.float32]
    for name, x, plain, right in zip(NAMES, ours, merged(*given), oracle(*given), strict=True):
        three_way(x, plain, right, name)
    assert not np.asarray(ours[0])[int(SIZES.sum()) :].any()


def test_the_reference_is_the_formula():
    given = arrays()
    for x, right in zip(found(*given, impl="reference"), oracle(*given), strict=True):
        np.testing.assert_allclose(x, right, rtol=1e-5, atol=1e-4)


def test_b_of_zero_adds_nothing():
    lhs, rhs, bias, a, b, _ = arrays()
    change, none = LowRank(a, b, SCALE), LowRank(a, jnp.zeros_like(b), SCALE)
    same = grouped_swiglu(lhs, rhs, SIZES, bias_EF=bias, low_rank=none, impl="xla")
    np.testing.assert_array_equal(same, grouped_swiglu(lhs, rhs, SIZES, bias_EF=bias, impl="xla"))
    ours = grouped_swiglu(lhs, rhs, SIZES, bias_EF=bias, low_rank=change, impl="xla")
    whole = mxfp4_to_dense(rhs) + SCALE * jnp.einsum("erd,erf->edf", a, b)
    right = grouped_swiglu(lhs, whole, SIZES, bias_EF=bias, impl="reference")
    np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-4)


def test_a_change_that_does_not_fit_is_refused():
    lhs, rhs, bias, a, b, _ = arrays()
    for wrong in (LowRank(b, a, SCALE), LowRank(a[:, :0], b[:, :0], SCALE)):
        with pytest.raises(
            ValueError, match=r"low_rank must have a of shape .5, 'R', 64.*\[groups"
        ):
            grouped_matmul(lhs, rhs, SIZES, bias_EF=bias, low_rank=wrong)


def test_frozen_matrices_have_no_gradient_program():
    lhs, rhs, bias, a, b, dout = arrays()
    text = (
        jax.jit(partial(found, impl="xla", packed=False))
        .lower(lhs, rhs, bias, a, b, dout)
        .compile()
        .as_text()
    )
    of_rhs = f"f32[{len(SIZES)},{D},{F}]"  # decoded matrices are read; who sums them writes tiles
    assert f"f32[{D},{F}]" in text
    assert not [x for x in text.splitlines() if "dynamic-update-slice(" in x and of_rhs in x]
