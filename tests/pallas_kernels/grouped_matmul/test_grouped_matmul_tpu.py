# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels, interpreted on a CPU: values and every gradient against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tpu
from pallas_kernels.grouped_matmul import cases, mxfp4, pallas_tpu
from pallas_kernels.grouped_matmul import pallas_tpu_tiles as tiles
from tests.pallas_kernels.grouped_matmul.matmul_oracle import (
    NAMES,
    naive,
    plain_swiglu,
    values_and_gradients,
)
from tests.pallas_kernels.grouped_matmul.released import pack_released
from tests.pallas_kernels.three_way import three_way

pytestmark = pytest.mark.usefixtures("small_tpu_tiles")

ALPHA, LIMIT = 1.3, 2.5
# Half of 384 columns is 1.5 registers, like half of 5760; 192 rows are two halves of 3 groups.
MATMUL, SWIGLU = (131, 192, 640), (131, 192, 384)
SIZES = {
    "uneven": (1, 17, 53, 0, 29, 24, 7),  # 33 … 48 rows take two calls, fewer may begin in others
    "rows_past_the_sum": (5, 0, 33, 16, 0, 2, 9),
    "all_to_the_last": (0, 0, 0, 0, 0, 0, 131),
    "all_to_one": (0, 0, 131, 0, 0, 0, 0),
    "no_rows_used": (0,) * 7,
}


def dense(swiglu, *operands):
    """Every expert on every row, in the inputs' dtype, differentiated by JAX."""
    h = naive(*operands)
    return plain_swiglu(h, ALPHA, LIMIT) if swiglu else h


def kernel(swiglu, sizes, lhs, rhs, bias):
    if swiglu:
        return pallas_tpu.grouped_swiglu_mosaic_tpu(
            lhs, rhs, sizes, bias, ALPHA, LIMIT, interpret=True
        )
    return pallas_tpu.grouped_matmul_mosaic_tpu(lhs, rhs, sizes, bias, interpret=True)


# One function for each, so that tests share what is compiled for it.
DENSE, KERNEL = ({swiglu: partial(f, swiglu) for swiglu in (False, True)} for f in (dense, kernel))


def inputs(shape, sizes, dtype, swiglu):
    n_rows, width, columns = shape
    case = cases.MatmulCase("", n_rows, width, columns, sizes)
    lhs, rhs, sizes, bias = cases.init_matmul_inputs(case, dtype)
    columns = columns // 2 if swiglu else columns
    dout = jax.random.normal(jax.random.key(9), (n_rows, columns)).astype(dtype)
    return dout, sizes, lhs, rhs, bias * 2 + 1


def oracle(swiglu, dout, sizes, *args):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x.astype(jnp.float32), np.float64)) for x in (dout, *args)]
        actual = values_and_gradients(DENSE[swiglu], wide[0], sizes, *wide[1:])
        return [np.asarray(x) for x in actual]


def check(swiglu, dout, sizes, *args):
    exact = oracle(swiglu, dout, sizes, *args)
    plain = values_and_gradients(DENSE[swiglu], dout, sizes, *args)
    actual = values_and_gradients(KERNEL[swiglu], dout, sizes, *args)
    for name, a, b, c in zip(NAMES, actual, plain, exact, strict=True):
        assert a.dtype == dout.dtype
        three_way(a, b, c, name)


# Sizes are data: one compiled kernel for all of them is part of what is tested.
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_values_and_gradients_match_the_dense_formula(sizes):
    check(False, *inputs(MATMUL, sizes, jnp.float32, False))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_fused_swiglu_matches_the_dense_formula(sizes):
    check(True, *inputs(SWIGLU, sizes, jnp.float32, True))


def test_undivided_tiles_match_the_dense_formula(monkeypatch):
    """Half of 1152 columns in tiles of 384, products of 256; the second tile is half empty."""
    monkeypatch.setattr(tiles, "window_bytes", lambda _: 192 * (2 * 384 + 128) * 4)
    monkeypatch.setattr(tiles, "columns_at_once", lambda _: 256)
    dout, sizes, *args = inputs((131, 192, 1152), SIZES["uneven"], jnp.float32, True)
    exact = oracle(True, dout, sizes, *args)[0]
    plain = values_and_gradients(DENSE[True], dout, sizes, *args)[0]
    three_way(jax.jit(partial(kernel, True))(sizes, *args), plain, exact, "out")


@pytest.mark.slow
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(
    "shape, sizes",
    [(SWIGLU, x) for x in SIZES.values()]
    + [
        (MATMUL, SIZES["uneven"]),
        ((9, 192, 256), (2, 0, 1, 4, 0, 1, 1)),
        ((131, 192, 128), (119,)),
    ],
)
def test_bfloat16_is_as_good_as_the_dense_formula(shape, sizes, swiglu):
    check(swiglu, *inputs(shape, sizes, jnp.bfloat16, swiglu))


def test_bfloat16_uneven_groups():
    check(True, *inputs(SWIGLU, SIZES["uneven"], jnp.bfloat16, True))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_a_single_tile_may_end_inside_a_register(case):
    shape = case.M, case.D, case.F
    check(False, *inputs(shape, case.group_sizes, jnp.float32, False))


def test_two_cores_share_the_rows(monkeypatch):
    monkeypatch.setattr(tpu, "count_tpu_cores", lambda: 2)
    dout, sizes, lhs, rhs, bias = inputs((131, 48, 40), SIZES["uneven"], jnp.float32, False)
    run = jax.jit(partial(kernel, False))
    for sizes in SIZES.values():
        sizes = jnp.asarray(sizes, jnp.int32)
        exact = oracle(False, dout, sizes, lhs, rhs, bias)[0]
        plain = values_and_gradients(DENSE[False], dout, sizes, lhs, rhs, bias)[0]
        three_way(run(sizes, lhs, rhs, bias), plain, exact, "out")


def random_mxfp4(n_groups, width, columns):
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (n_groups, columns, width // 32, 16), np.uint8)
    scales = rng.integers(119, 127, (n_groups, columns, width // 32), np.uint8)
    return pack_released(jnp.asarray(blocks), jnp.asarray(scales))


@pytest.mark.parametrize("swiglu", [pytest.param(False, marks=pytest.mark.slow), True])
def test_four_bit_weights_equal_their_decoded_values(swiglu):
    dout, sizes, lhs, _, bias = inputs(SWIGLU, SIZES["uneven"], jnp.bfloat16, swiglu)
    packed = random_mxfp4(7, 192, 384)
    actual = values_and_gradients(KERNEL[swiglu], dout, sizes, lhs, packed, bias)
    decoded = mxfp4.mxfp4_to_dense(packed, jnp.bfloat16)
    out, dlhs, _, dbias = values_and_gradients(KERNEL[swiglu], dout, sizes, lhs, decoded, bias)
    exact = oracle(swiglu, dout, sizes, lhs, decoded, bias)
    np.testing.assert_array_equal(actual[0], out)
    np.testing.assert_array_equal(actual[1], dlhs)
    three_way(actual[2], dbias, exact[3], "dbias")


@pytest.mark.parametrize("swiglu", [False, True])
def test_a_nan_stays_in_its_group(swiglu):
    sizes = SIZES["rows_past_the_sum"]
    used, group = sum(sizes), 2
    begin = sum(sizes[:group])
    shape = SWIGLU if swiglu else MATMUL
    dout, sizes, lhs, rhs, bias = inputs(shape, sizes, jnp.float32, swiglu)
    lhs = lhs.at[begin + 3].set(jnp.nan).at[used:].set(jnp.nan)
    dout = dout.at[used:].set(jnp.nan)
    out, dlhs, drhs, dbias = values_and_gradients(KERNEL[swiglu], dout, sizes, lhs, rhs, bias)
    assert np.isnan(out).any(axis=1).nonzero()[0].tolist() == [begin + 3]
    assert np.isnan(drhs).any(axis=(1, 2)).nonzero()[0].tolist() == [group]
    assert not np.any(out[used:]) and not np.any(dlhs[used:])
    assert np.isfinite(np.asarray(dbias)[[0, 1, 3, 4, 5, 6]]).all()


def test_no_rows_give_no_rows_and_zero_gradients():
    dout, sizes, lhs, rhs, bias = inputs((0, 48, 40), (0,) * 7, jnp.float32, False)
    actual = values_and_gradients(KERNEL[False], dout, sizes, lhs, rhs, bias)
    assert actual[0].shape == (0, 40) and not np.any(actual[2]) and not np.any(actual[3])


def test_fewer_rows_than_a_tile_and_no_bias():
    dout, sizes, lhs, rhs, bias = inputs((9, 48, 40), (2, 0, 1, 4, 0, 1, 1), jnp.float32, False)
    zero = jnp.zeros_like(bias)
    plain = values_and_gradients(DENSE[False], dout, sizes, lhs, rhs, zero)
    exact = oracle(False, dout, sizes, lhs, rhs, zero)
    f = lambda lhs, rhs: kernel(False, sizes, lhs, rhs, None)  # noqa: E731
    out, pull = jax.jit(partial(jax.vjp, f))(lhs, rhs)
    for name, value, a, b in zip(NAMES, (out, *pull(dout)), plain, exact, strict=False):
        three_way(value, a, b, name)


def test_shapes_without_tiles_are_refused_with_the_reason(monkeypatch):
    struct = jax.ShapeDtypeStruct
    lhs = struct((64, 192), jnp.float32)
    rhs = struct((3, 192, 384), jnp.float32)
    assert pallas_tpu.grouped_matmul_mosaic_tpu_unsupported(lhs, rhs) is None
    assert pallas_tpu.grouped_swiglu_mosaic_tpu_unsupported(lhs, rhs) is None
    assert "float16" in str(
        pallas_tpu.grouped_matmul_mosaic_tpu_unsupported(struct((64, 192), jnp.float16), rhs)
    )
    assert "rhs is bfloat16" in str(
        pallas_tpu.grouped_matmul_mosaic_tpu_unsupported(lhs, struct(rhs.shape, jnp.bfloat16))
    )
    odd_matrix = struct((3, 192, 500), jnp.float32)
    assert "do not end at 128" in str(
        pallas_tpu.grouped_matmul_mosaic_tpu_unsupported(lhs, odd_matrix)
    )
    assert "not a multiple of 128" in str(
        pallas_tpu.grouped_swiglu_mosaic_tpu_unsupported(lhs, odd_matrix)
    )
    packed = mxfp4.Mxfp4(struct((3, 48, 384), jnp.uint8), struct((3, 3, 384), jnp.uint8))
    assert "four-bit" in str(
        pallas_tpu.grouped_matmul_mosaic_tpu_unsupported(struct((64, 96), jnp.float32), packed)
    )
