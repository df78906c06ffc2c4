# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels on four-bit weights, interpreted: against the formula on decoded ones.

Half of D and F end within a tile, as at GPT-OSS' sizes. Tests of one shape share a program.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mxfp4, pallas_gpu
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_mxfp4
from tests.pallas_kernels.grouped_matmul.matmul_oracle import (
    check_all,
    exact,
    exact_swiglu,
    forward,
    hopper,
    hopper_swiglu,
    knows_transposes,
    mark_slow,
    naive,
    naive_swiglu,
    values_and_gradients,
)
from tests.pallas_kernels.three_way import three_way

M, D, F = 300, 320, 384
SIZES = {
    "a tile and more, tails, none": (1, 210, 17, 0, 37, 24, 3),
    "rows past the sum": (5, 0, 33, 16, 0, 2, 9),
    "all to the last": (0, 0, 0, 0, 0, 0, 300),
    "none used": (0,) * 7,
}

OLD = jax.__version_info__ < (0, 11)


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
@pytest.mark.parametrize("name", SIZES)
def test_the_fused_activation_matches_naive_masks(name):
    lhs, rhs, sizes, bias, _ = make(SIZES[name])
    got, simple = (forward(f, sizes, lhs, rhs, bias) for f in (hopper_swiglu, naive_swiglu))
    up = lhs.astype(jnp.float32), rhs, bias.astype(jnp.float32)
    three_way(got, simple, forward(exact_swiglu, sizes, *up), name)


@pytest.mark.slow
@knows_transposes
@pytest.mark.parametrize("name", SIZES)
def test_both_gradients_of_the_fused_activation(name):
    args = make(SIZES[name], out_width=F // 2)
    check_all(hopper_swiglu, naive_swiglu, exact_swiglu, args, name)


@knows_transposes
def test_a_nan_stays_in_its_group():
    sizes = SIZES["rows past the sum"]
    lhs, rhs, sizes_E, bias, dout = make(sizes)
    used, row, group, column = sum(sizes), 30, 3, 7
    assert sum(sizes[:2]) <= row < sum(sizes[:3])  # of group 2
    first = sum(sizes[:group])
    scales = rhs.scales_EDF.at[group, 9, column].set(255)
    lhs = lhs.at[used:].set(jnp.nan).at[row].set(jnp.nan)
    dout = dout.at[used:].set(jnp.nan)
    args = sizes_E, lhs, rhs._replace(scales_EDF=scales), bias
    got = values_and_gradients(hopper, dout, *args)
    out, dlhs, dbias = (np.isnan(np.asarray(x, np.float32)) for x in got)
    wanted = np.zeros((M, F), bool)
    wanted[row] = True
    wanted[first : first + sizes[group], column] = True
    np.testing.assert_array_equal(out, wanted)
    wanted = np.zeros((M, D), bool)
    wanted[first : first + sizes[group], 9 * mxfp4.GROUP : 10 * mxfp4.GROUP] = True
    np.testing.assert_array_equal(dlhs, wanted)
    assert not dbias.any()
    for x in got[:2]:
        assert not np.asarray(x, np.float32)[used:].any()


@pytest.mark.skipif(OLD, reason="jax 0.10 takes 15 seconds to interpret it")
def test_fewer_rows_than_a_tile_and_no_bias():
    lhs, rhs, sizes, bias, _ = make((2, 0, 1, 4, 0, 1, 0), n_rows=9)
    got = jax.jit(partial(pallas_gpu.grouped_matmul_mosaic_gpu, interpret=True))(lhs, rhs, sizes)
    assert got.shape == (9, F) and got.dtype == jnp.bfloat16
    zero = jnp.zeros_like(bias)
    simple = forward(naive, sizes, lhs, rhs, zero)
    wanted = forward(exact, sizes, lhs.astype(jnp.float32), rhs, zero)
    three_way(got, simple, wanted, "out")


@knows_transposes
def test_four_bit_weights_have_no_gradient():
    lhs, rhs, sizes, bias, dout = make(SIZES["rows past the sum"])
    drhs = jax.eval_shape(
        lambda rhs: jax.vjp(partial(hopper, sizes), lhs, rhs, bias)[1](dout), rhs
    )[1]
    assert {x.dtype for x in jax.tree.leaves(drhs)} == {jax.dtypes.float0}


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
