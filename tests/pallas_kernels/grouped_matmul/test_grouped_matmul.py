# SPDX-License-Identifier: Apache-2.0
"""The tiled grouped matmul against the formula, a float64 oracle, and its own promises."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import cases, grouped_matmul
from pallas_kernels.grouped_matmul.xla import tile_rows
from tests.pallas_kernels.grouped_matmul.matmul_oracle import NAMES, naive, values_and_gradients
from tests.pallas_kernels.jaxprs import equations
from tests.pallas_kernels.three_way import three_way


def f64(*arrays):
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in arrays]


def cotangent(case, dtype):
    return jax.random.normal(jax.random.key(9), (case.M, case.F)).astype(dtype)


def oracle(lhs, rhs, sizes, bias, dout):
    """Values and every gradient, float64, one group at a time."""
    lhs, rhs, bias, dout = f64(lhs, rhs, bias, dout)
    out, dlhs = np.zeros_like(dout), np.zeros_like(lhs)
    drhs, dbias = np.zeros_like(rhs), np.zeros_like(bias)
    begin = 0
    for e, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        out[rows] = lhs[rows] @ rhs[e] + bias[e]
        dlhs[rows] = dout[rows] @ rhs[e].T
        drhs[e], dbias[e] = lhs[rows].T @ dout[rows], dout[rows].sum(0)
        begin += size
    return out, dlhs, drhs, dbias


def tiled(sizes, lhs, rhs, bias):
    return grouped_matmul(lhs, rhs, sizes, bias_EF=bias, impl="xla")


def invariant(sizes, lhs, rhs, bias):
    return grouped_matmul(lhs, rhs, sizes, bias_EF=bias, impl="xla_invariant")


def formula(sizes, lhs, rhs, bias):
    return grouped_matmul(lhs, rhs, sizes, bias_EF=bias, impl="reference")


# Half precision where the compiled shape is shared: compiling is what these tests cost.
@pytest.mark.parametrize(
    "case, dtype",
    [(case, jnp.float32) for case in cases.TEST_CASES]
    + [(case, jnp.bfloat16) for case in cases.TEST_CASES[:5]],
    ids=lambda x: x.name if isinstance(x, cases.MatmulCase) else x.__name__,
)
def test_values_and_gradients_match_naive_masks(case, dtype):
    lhs, rhs, sizes, bias = cases.init_matmul_inputs(case, dtype)
    dout = cotangent(case, dtype)
    exact_results = oracle(lhs, rhs, case.group_sizes, bias, dout)
    plain = values_and_gradients(naive, dout, sizes, lhs, rhs, bias)
    for f in (tiled, invariant, formula) if case is cases.TEST_CASES[0] else (tiled, invariant):
        actual = values_and_gradients(f, dout, sizes, lhs, rhs, bias)
        for name, value, simple, exact in zip(NAMES, actual, plain, exact_results, strict=True):
            assert value.dtype == dtype
            three_way(value, simple, exact, f"{case.name} {f.__name__} {name}")


def test_rows_past_the_sum_are_zero():
    case = cases.TEST_CASES[1]
    lhs, rhs, sizes, bias = cases.init_matmul_inputs(case)
    used = sum(case.group_sizes)
    dout = cotangent(case, jnp.float32).at[used:].set(jnp.nan)
    lhs = lhs.at[used:].set(jnp.nan)
    out, dlhs, drhs, dbias = values_and_gradients(tiled, dout, sizes, lhs, rhs, bias)
    assert not np.any(out[used:]) and not np.any(dlhs[used:])
    for x in (out, dlhs, drhs, dbias):
        assert np.isfinite(x).all()


def test_a_nan_stays_in_its_own_group():
    case = cases.TEST_CASES[0]
    lhs, rhs, sizes, bias = cases.init_matmul_inputs(case)
    group = 2
    begin = sum(case.group_sizes[:group])
    lhs = lhs.at[begin + 3].set(jnp.nan)
    out, _, drhs, dbias = values_and_gradients(
        tiled, cotangent(case, jnp.float32), sizes, lhs, rhs, bias
    )
    assert np.isnan(out).any(axis=1).nonzero()[0].tolist() == [begin + 3]
    assert np.isnan(drhs).any(axis=(1, 2)).nonzero()[0].tolist() == [group]
    assert np.isfinite(dbias).all()


def test_no_bias_equals_a_zero_bias():
    lhs, rhs, sizes, bias = cases.init_matmul_inputs(cases.TEST_CASES[0])
    with_zero = grouped_matmul(lhs, rhs, sizes, bias_EF=jnp.zeros_like(bias), impl="xla")
    np.testing.assert_array_equal(grouped_matmul(lhs, rhs, sizes, impl="xla"), with_zero)
    gradients = jax.grad(lambda r: grouped_matmul(lhs, r, sizes, impl="xla").sum())(rhs)
    assert gradients.shape == rhs.shape


def test_no_rows_give_no_rows_and_zero_gradients():
    case = cases.MatmulCase("empty", 0, 48, 40, (0,) * 7)
    lhs, rhs, sizes, bias = cases.init_matmul_inputs(case)
    out, dlhs, drhs, dbias = values_and_gradients(tiled, jnp.zeros((0, 40)), sizes, lhs, rhs, bias)
    assert out.shape == (0, 40) and dlhs.shape == (0, 48)
    assert not np.any(drhs) and not np.any(dbias)


def test_the_program_copies_no_weights():
    case = cases.TEST_CASES[0]
    lhs, rhs, sizes, bias = cases.init_matmul_inputs(case)
    f = lambda *args: tiled(sizes, *args).sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(f, argnums=(0, 1, 2)))(lhs, rhs, bias)
    largest = max(x.size for x in (lhs, rhs, cotangent(case, jnp.float32)))
    all_equations = list(equations(jaxpr.jaxpr))
    assert any(eqn.primitive.name == "dot_general" for eqn in all_equations)
    for eqn in all_equations:
        assert "scatter" not in eqn.primitive.name and "ragged" not in eqn.primitive.name
        for var in eqn.outvars:
            assert var.aval.size <= largest, (eqn.primitive.name, var.aval)


@pytest.mark.parametrize("rows, groups, expected", [(10240, 8, 128), (128, 8, 16), (9, 7, 9)])
def test_a_tile_is_an_eighth_of_a_group(rows, groups, expected):
    assert tile_rows(rows, groups, 8) == expected


def test_misshaped_arguments_are_named():
    raw = inspect.unwrap(grouped_matmul)  # without the type checks of the test run
    lhs, rhs, sizes, bias = cases.init_matmul_inputs(cases.TEST_CASES[0])
    with pytest.raises(ValueError, match="lhs must have 48 columns"):
        raw(lhs[:, 1:], rhs, sizes)
    with pytest.raises(ValueError, match="group_sizes must have one size"):
        raw(lhs, rhs, sizes[1:])
    with pytest.raises(ValueError, match="bias must have the shape"):
        raw(lhs, rhs, sizes, bias_EF=bias[:, 1:])
