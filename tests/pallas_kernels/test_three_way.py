# SPDX-License-Identifier: Apache-2.0
"""The three-way rule must be able to fail: a rule that passes everything tests nothing."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pallas_kernels.three_way import three_way

ORACLE = np.linspace(-2.0, 2.0, 15).reshape(3, 5)  # the largest is 2
ULP = float(np.finfo(np.float32).eps)


def moved(factor, index=(1, 3), dtype=np.float32):
    out = ORACLE.astype(dtype)
    out[index] += dtype(factor)
    return out


@given(st.floats(1e-3, 1e3), st.floats(0.1, 5.0).filter(lambda x: abs(x - 2) > 0.05))
def test_ours_may_err_twice_the_naive_error(error, factor):
    oracle = np.zeros((3, 5))  # no ulps are granted at zero
    naive, actual = (np.full((3, 5), x, np.float32) for x in (error, factor * error))
    if factor < 2:
        three_way(actual, naive, oracle)
    else:
        with pytest.raises(AssertionError, match="must be at most"):
            three_way(actual, naive, oracle)


def test_exact_naive_results_allow_only_ulps():
    exact = ORACLE.astype(np.float32)
    oracle = exact.astype(np.float64)
    index = (1, 2)  # the value there is 0, so adding is exact
    three_way(moved(2 * 2 * ULP, index), exact, oracle)
    with pytest.raises(AssertionError):
        three_way(moved(2.1 * 2 * ULP, index), exact, oracle)
    three_way(moved(2.1 * 2 * ULP, index), exact, oracle, ulps=3.0)
    with pytest.raises(AssertionError):
        three_way(moved(ULP, index), exact, oracle, ulps=0.0)


def test_the_ulp_is_of_our_dtype():
    units = np.ones((3, 5))
    close = 1.0 + float(jnp.finfo(jnp.bfloat16).eps)
    three_way(jnp.full((3, 5), close, jnp.bfloat16), units, units)
    with pytest.raises(AssertionError):
        three_way(jnp.full((3, 5), close, jnp.float32), units, units)


def test_the_message_names_the_worst_coordinate():
    actual = moved(0.25, (0, 1))
    actual[2, 4] = 7.0
    with pytest.raises(AssertionError) as failed:
        three_way(actual, moved(0.0), ORACLE, "dsink")
    message = str(failed.value)
    assert message.startswith("dsink: error 5.000e+00 at (2, 4)"), message
    assert "ours 7, naive 2, oracle 2" in message, message


@pytest.mark.parametrize("perturbed", [np.nan, np.inf, -np.inf])
def test_infinities_fail_against_a_finite_oracle(perturbed):
    for naive in (moved(0.0), moved(perturbed)):  # even where naive is no better
        with pytest.raises(AssertionError, match=r"at \(1, 3\)"):
            three_way(moved(perturbed), naive, ORACLE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_infinities_agree_only_with_the_same(value):
    oracle, finite = moved(value, dtype=np.float64), moved(0.0)
    three_way(moved(value), finite, oracle)
    with pytest.raises(AssertionError):
        three_way(finite, finite, oracle)
    if not np.isnan(value):
        with pytest.raises(AssertionError):
            three_way(moved(-value), finite, oracle)


def test_a_naive_that_overflows_grants_nothing():
    with pytest.raises(AssertionError):
        three_way(moved(0.5), moved(np.inf, (0, 0)), ORACLE)


def test_another_shape_fails_even_where_it_would_broadcast():
    with pytest.raises(AssertionError, match=r"shape \(5,\) must be \(3, 5\)"):
        three_way(np.zeros(5, np.float32), np.zeros((3, 5)), np.zeros((3, 5)), "o")


def test_nothing_agrees_with_nothing():
    none = np.zeros((0, 4), np.float32)
    three_way(none, none, none)


def test_kernels_import_neither_model_nor_framework():
    code = (
        "import sys, pallas_kernels, pallas_kernels.sink_attention.cases\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert {"pallas_kernels", "jax"} <= loaded
    assert not loaded & {"jaxmoe", "flax", "optax", "torch", "transformers"}
