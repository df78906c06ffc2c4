# SPDX-License-Identifier: Apache-2.0
"""The three-way rule must be able to fail: a rule that passes everything tests nothing."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.three_way import three_way

ORACLE = np.linspace(-2.0, 2.0, 15).reshape(3, 5)  # the largest is 2
ULP = float(np.finfo(np.float32).eps)
ZERO, ONE = np.zeros((3, 5)), np.ones((3, 5))
NAN, INF = np.nan, np.inf


def moved(change, index=(1, 2), dtype=np.float32):
    """The oracle with one number changed; at (1, 2) it is 0, so adding is exact."""
    out = ORACLE.astype(dtype)
    out[index] += dtype(change)
    return out


def filled(value, dtype=jnp.float32):
    return jnp.full((3, 5), value, dtype)


EXACT = moved(0.0).astype(np.float64)
CLOSE = 1.0 + float(jnp.finfo(jnp.bfloat16).eps)


@pytest.mark.parametrize(
    "right, wrong, naive, oracle",
    [
        (filled(1.9), filled(2.1), filled(1.0), ZERO),  # twice the naive error, no ulps at zero
        (moved(4 * ULP), moved(4.2 * ULP), EXACT, EXACT),  # two ulps of the largest
        (filled(CLOSE, jnp.bfloat16), filled(CLOSE), ONE, ONE),  # of our dtype
        (moved(0.0), moved(0.5), moved(INF, (0, 0)), ORACLE),  # one that overflows grants nothing
        *((moved(0.0), moved(x), moved(x), ORACLE) for x in (NAN, INF, -INF)),
        *((moved(x), moved(0.0), moved(0.0), moved(x, dtype=np.float64)) for x in (NAN, INF, -INF)),
        (moved(INF), moved(-INF), moved(0.0), moved(INF, dtype=np.float64)),
    ],
)
def test_ours_may_err_twice_the_naive_error(right, wrong, naive, oracle):
    three_way(right, naive, oracle)
    with pytest.raises(AssertionError, match="must be at most"):
        three_way(wrong, naive, oracle)


def test_ulps_are_as_many_as_asked_for():
    three_way(moved(4.2 * ULP), EXACT, EXACT, ulps=3.0)
    with pytest.raises(AssertionError):
        three_way(moved(ULP), EXACT, EXACT, ulps=0.0)


def test_the_message_names_the_worst_coordinate():
    actual = moved(0.25, (0, 1))
    actual[2, 4] = 7.0
    with pytest.raises(AssertionError) as failed:
        three_way(actual, moved(0.0), ORACLE, "dsink")
    message = str(failed.value)
    assert message.startswith("dsink: error 5.000e+00 at (2, 4)"), message
    assert "ours 7, naive 2, oracle 2" in message, message


def test_another_shape_fails_even_where_it_would_broadcast():
    three_way(*[np.zeros((0, 4), np.float32)] * 3)
    with pytest.raises(AssertionError, match=r"shape \(5,\) must be \(3, 5\)"):
        three_way(np.zeros(5, np.float32), ZERO, ZERO, "o")


def test_kernels_import_neither_model_nor_framework():
    code = (
        "import sys, pallas_kernels, pallas_kernels.sink_attention.cases\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert {"pallas_kernels", "jax"} <= loaded
    assert not loaded & {"jaxmoe", "flax", "optax", "torch", "transformers"}
