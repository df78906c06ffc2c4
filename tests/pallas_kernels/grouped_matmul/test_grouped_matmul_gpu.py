# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels, interpreted: against the formula in float32, and their own promises.

Shapes give several tiles both ways, group sizes are arrays: all that share a shape share a program.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Implementation, select_implementation
from pallas_kernels.grouped_matmul import cases, pallas_gpu
from pallas_kernels.grouped_matmul.hopper import (
    pallas_gpu_rows,
    pallas_gpu_tiles,
    pallas_gpu_weights,
)
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4
from tests.pallas_kernels.grouped_matmul.matmul_oracle import (
    as_float32,
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

M, D, F = 300, 256, 384  # 2 or more row tiles, 2 column tiles; of drhs 2 by 2; 4 or 6 steps
SIZES = {
    "a tile and more, tails, none": (1, 210, 17, 0, 37, 24, 3),
    "rows past the sum": (5, 0, 33, 16, 0, 2, 9),
    "all to one": (0, 0, 0, 300, 0, 0, 0),
    "all to the last": (0, 0, 0, 0, 0, 0, 300),
    "none used": (0,) * 7,
    "whole tiles": (192, 0, 64, 0, 0, 0, 44),
}


def make(sizes, dtype=jnp.bfloat16, n_rows=M, width=F):
    case = cases.MatmulCase("gpu", n_rows, D, width, sizes)
    dout = jax.random.normal(jax.random.key(9), (n_rows, width)).astype(dtype)
    return *cases.init_matmul_inputs(case, dtype), dout


@knows_transposes
@pytest.mark.parametrize(
    "name", mark_slow(SIZES, "a tile and more, tails, none", "rows past the sum")
)
def test_values_and_gradients_match_naive_masks(name):
    check_all(hopper, naive, exact, make(SIZES[name]), name)


@pytest.mark.parametrize("name", mark_slow(SIZES, "a tile and more, tails, none"))
def test_the_fused_activation_matches_naive_masks(monkeypatch, name):
    monkeypatch.setattr(pallas_gpu_tiles, "WIDTHS", (64,))  # two column tiles
    lhs, rhs, sizes, bias, _ = make(SIZES[name], width=256)
    actual = forward(hopper_swiglu, sizes, lhs, rhs, bias)
    simple = forward(naive_swiglu, sizes, lhs, rhs, bias)
    three_way(actual, simple, forward(exact_swiglu, sizes, *as_float32(lhs, rhs, bias)), name)


@knows_transposes
def test_every_gradient_of_the_fused_activation():
    *args, _ = make(SIZES["rows past the sum"])
    dout = jax.random.normal(jax.random.key(8), (M, F // 2)).astype(jnp.bfloat16)
    check_all(hopper_swiglu, naive_swiglu, exact_swiglu, (*args, dout), "swiglu")


@knows_transposes
def test_a_nan_stays_in_its_group():
    sizes = SIZES["rows past the sum"]
    lhs, rhs, sizes_E, bias, dout = make(sizes)
    group, used = 3, sum(sizes)
    bad = sum(sizes[:group]) + 7
    lhs = lhs.at[used:].set(jnp.nan).at[bad].set(jnp.nan)
    dout = dout.at[used:].set(jnp.nan)
    actual = values_and_gradients(hopper, dout, sizes_E, lhs, rhs, bias)
    out, dlhs, drhs, dbias = (np.asarray(x, np.float32) for x in actual)
    assert not out[used:].any() and not dlhs[used:].any()
    assert np.isnan(out).any(axis=1).nonzero()[0].tolist() == [bad]
    assert np.isnan(drhs).any(axis=(1, 2)).nonzero()[0].tolist() == [group]
    assert np.isfinite(dlhs).all() and np.isfinite(dbias).all()
    dout = dout.at[used:].set(0).at[bad].set(jnp.nan)
    _, dlhs, drhs, dbias = values_and_gradients(hopper, dout, sizes_E, lhs, rhs, bias)
    assert np.isnan(np.asarray(dlhs, np.float32)).any(axis=1).nonzero()[0].tolist() == [bad]
    for x in (drhs, dbias):
        axes = tuple(range(1, x.ndim))
        assert np.isnan(np.asarray(x, np.float32)).any(axis=axes).nonzero()[0].tolist() == [group]


def test_fewer_rows_than_a_tile_in_float16():
    lhs, rhs, sizes, bias, _ = make((2, 0, 1, 4, 0, 1, 0), jnp.float16, 9)
    actual = jax.jit(partial(pallas_gpu.grouped_matmul_mosaic_gpu, interpret=True))(lhs, rhs, sizes)
    assert actual.shape == (9, F) and actual.dtype == jnp.float16
    zero = jnp.zeros_like(bias)
    simple = forward(naive, sizes, lhs, rhs, zero)
    three_way(actual, simple, forward(exact, sizes, *as_float32(lhs, rhs, zero)), "out")


@pytest.mark.slow
@knows_transposes
@pytest.mark.parametrize("name", SIZES)
def test_float16_gradients_of_the_fused_activation(name):
    check_all(hopper, naive, exact, make(SIZES[name], jnp.float16), name)
    *args, _ = make(SIZES[name], jnp.float16, width=384)
    dout = jax.random.normal(jax.random.key(8), (M, 192)).astype(jnp.float16)
    check_all(hopper_swiglu, naive_swiglu, exact_swiglu, (*args, dout), f"swiglu {name}")


@knows_transposes
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "dlhs"])
def test_no_copy_races_with_the_tile_after_it(races, monkeypatch, transposed):
    """Short groups and rows past the sum: little or no product hides the copies of a tile, whose
    192 columns are an odd number of pieces."""
    monkeypatch.setattr(pallas_gpu_rows, "count_gpu_cores", lambda: 1)
    sizes, width = (70, 0, 5, 0, 130), 192
    lhs, rhs, sizes, bias, dout = make(sizes, n_rows=330, width=width)
    rows = dout if transposed else lhs
    out = pallas_gpu_rows.multiply_rows_hopper(
        rows, rhs, sizes, None if transposed else bias, transposed, True
    )
    assert np.isfinite(out.astype(jnp.float32)).all()
    assert not races()


@pytest.mark.slow
@knows_transposes
def test_gradient_copies_have_no_races(races, monkeypatch):
    monkeypatch.setattr(pallas_gpu_weights, "count_gpu_cores", lambda: 1)
    lhs, rhs, sizes, _, dout = make((70, 0, 5, 0, 130), n_rows=330, width=192)
    lhs = lhs[:, :192]  # whole tiles: two that overlap would write the same there
    jax.block_until_ready(
        pallas_gpu_weights.weight_gradients_hopper(lhs, dout, sizes, rhs.dtype, False, True)
    )
    assert not races()


def use_device_kind(kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def zeros(*shapes, dtype=jnp.bfloat16):
    return [jnp.zeros(x, dtype) for x in shapes]


@pytest.mark.parametrize(
    "lhs, rhs, dtype, reason",
    [
        ((300, 256), (7, 256, 320), jnp.float32, "not both bfloat16"),
        ((300, 200), (7, 200, 320), jnp.bfloat16, "not multiples of 64"),
        ((300, 256), (7, 256, 300), jnp.bfloat16, "not multiples of 64"),
        ((300, 128), (7, 128, 320), jnp.bfloat16, "needs at least 192"),
        ((0, 256), (7, 256, 320), jnp.bfloat16, "no rows or no groups"),
    ],
)
def test_what_the_kernel_cannot_do_has_a_reason(lhs, rhs, dtype, reason):
    arrays = zeros(lhs, rhs, dtype=dtype)
    impls = {
        "mosaic_gpu": Implementation(
            pallas_gpu.grouped_matmul_mosaic_gpu,
            pallas_gpu.grouped_matmul_mosaic_gpu_unsupported,
            ("gpu",),
        )
    }
    with use_device_kind("NVIDIA H200"), pytest.raises(NotImplementedError, match=reason):
        select_implementation("mosaic_gpu", impls, *arrays)


def test_unsupported_halves_bits_and_chips_have_reasons():
    arrays = zeros((300, 256), (7, 256, 320))
    four = Mxfp4(*zeros((7, 128, 320), (7, 8, 320), dtype=jnp.uint8))
    (half,) = zeros((300, 256), dtype=jnp.float16)
    with use_device_kind("NVIDIA H200"):
        assert pallas_gpu.grouped_matmul_mosaic_gpu_unsupported(*arrays) is None
        assert "half of 320 columns" in pallas_gpu.grouped_swiglu_mosaic_gpu_unsupported(*arrays)
        assert pallas_gpu.grouped_matmul_mosaic_gpu_unsupported(arrays[0], four) is None
        assert "decoded to bfloat16" in pallas_gpu.grouped_matmul_mosaic_gpu_unsupported(half, four)
    with use_device_kind("NVIDIA A100"):
        assert "it needs a Hopper GPU" in pallas_gpu.grouped_matmul_mosaic_gpu_unsupported(*arrays)
