# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels on four-bit weights, interpreted: against the formula on decoded ones.

Half of D and F end within a tile, as at GPT-OSS' sizes. Tests of one shape share a program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mxfp4
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_mxfp4
from tests.pallas_kernels.grouped_matmul.matmul_oracle import (
    check_all,
    exact,
    exact_swiglu,
    hopper,
    hopper_swiglu,
    knows_transposes,
    mark_slow,
    naive,
    naive_swiglu,
)

M, D, F = 300, 320, 384
SIZES = {
    "a tile and more, tails, none": (1, 210, 17, 0, 37, 24, 3),
    "rows past the sum": (5, 0, 33, 16, 0, 2, 9),
    "all to the last": (0, 0, 0, 0, 0, 0, 300),
    "none used": (0,) * 7,
}


def make(sizes, n_rows=M, width=F, out_width=None):
    rng = np.random.default_rng(0)
    E = len(sizes)
    nibbles = rng.integers(0, 256, (E, D // 2, width), np.uint8)
    scales = rng.integers(118, 124, (E, D // mxfp4.GROUP, width), np.uint8)
    lhs, bias, dout = (
        jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16)
        for i, shape in enumerate(((n_rows, D), (E, width), (n_rows, out_width or width)))
    )
    packed = mxfp4.Mxfp4(jnp.asarray(nibbles), jnp.asarray(scales))
    return lhs, packed, jnp.asarray(sizes, jnp.int32), bias, dout


@knows_transposes
@pytest.mark.parametrize(
    "name", mark_slow(SIZES, "a tile and more, tails, none", "rows past the sum")
)
def test_values_and_gradients_match_decoded_weights(name):
    check_all(hopper, naive, exact, make(SIZES[name]), name)


@pytest.mark.slow
@knows_transposes
@pytest.mark.parametrize("name", SIZES)
def test_both_gradients_of_the_fused_activation(name):
    args = make(SIZES[name], out_width=F // 2)
    check_all(hopper_swiglu, naive_swiglu, exact_swiglu, args, name)


@pytest.mark.slow
@knows_transposes
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "dlhs"])
def test_no_warpgroup_races_with_another(races, monkeypatch, transposed):
    """Five of them, on one core; whole tiles, as two that overlap would write the same there."""
    monkeypatch.setattr(pallas_gpu_mxfp4, "count_gpu_cores", lambda: 1)
    lhs, rhs, sizes, bias, dout = make((70, 0, 5, 0, 130), n_rows=330)
    rhs = mxfp4.Mxfp4(rhs.nibbles_EDF[:, :128], rhs.scales_EDF[:, :8])
    rows, bias = (dout, None) if transposed else (lhs[:, :256], bias)
    jax.block_until_ready(
        pallas_gpu_mxfp4.multiply_rows_mxfp4_hopper(rows, rhs, sizes, bias, transposed, True)
    )
    assert not races()
