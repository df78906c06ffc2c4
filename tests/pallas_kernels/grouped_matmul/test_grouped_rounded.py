# SPDX-License-Identifier: Apache-2.0
"""Four-bit matrices with masters: values, and gradients that go straight through to the masters."""

import inspect
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import (
    LowRank,
    Mxfp4,
    grouped_matmul,
    grouped_swiglu,
    pallas_tpu,
    rounded,
)
from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4
from tests.pallas_kernels.grouped_matmul.rounded_oracle import (
    ALPHA,
    FIRST,
    IDLE,
    LIMIT,
    SIZES,
    D,
    F,
    M,
    check,
    draw_inputs,
    own_matrices,
    values_and_gradients,
)

pytestmark = pytest.mark.usefixtures("small_tpu_tiles")


@cache
def implementation(name, swiglu):
    if name == "mosaic_tpu":
        ops = pallas_tpu.grouped_matmul_mosaic_tpu, pallas_tpu.grouped_swiglu_mosaic_tpu
        options = (ALPHA, LIMIT) if swiglu else ()
        return lambda sizes, lhs, rhs, bias: ops[swiglu](
            lhs, rhs, sizes, bias, *options, interpret=True
        )
    op = partial(grouped_swiglu, alpha=ALPHA, limit=LIMIT) if swiglu else grouped_matmul
    return lambda sizes, lhs, rhs, bias: op(lhs, rhs, sizes, bias_EF=bias, impl=name)


@cache
def results_of(name, swiglu, dtype):
    return values_and_gradients(implementation(name, swiglu), *draw_inputs(dtype, swiglu))


@pytest.mark.parametrize(
    "swiglu, dtype",
    [
        pytest.param(False, jnp.float32, id="matmul-float32"),
        pytest.param(True, jnp.bfloat16, id="swiglu-bfloat16"),
        pytest.param(False, jnp.bfloat16, id="matmul-bfloat16", marks=pytest.mark.slow),
        pytest.param(True, jnp.float32, id="swiglu-float32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["reference", "xla", "xla_invariant", "mosaic_tpu"])
def test_values_and_gradients_match_decoded_matrices(name, swiglu, dtype):
    check(results_of(name, swiglu, dtype), dtype, swiglu)


@pytest.mark.parametrize("name", ["xla", "mosaic_tpu"])
def test_masters_in_bfloat16_have_a_gradient_in_bfloat16(name):
    dtype = jnp.bfloat16
    actual = values_and_gradients(implementation(name, False), *draw_inputs(dtype, False, dtype))
    check(actual, dtype, False, dtype)


@pytest.mark.parametrize("name", ["xla", "xla_invariant", "mosaic_tpu"])
def test_a_part_of_a_stack_equals_its_matrices(name):
    dout, sizes, lhs, rhs, bias = draw_inputs(jnp.bfloat16, True)
    alone = own_matrices(rhs)._replace(master_EDF=rhs.master_EDF)
    actual = values_and_gradients(implementation(name, True), dout, sizes, lhs, alone, bias)
    for x, y in zip(results_of(name, True, jnp.bfloat16), actual, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("name", ["xla", "xla_invariant", "mosaic_tpu"])
def test_values_equal_frozen_matrices_bitwise(name):
    """An engine reads packed matrices without masters."""
    _, sizes, lhs, rhs, bias = draw_inputs(jnp.bfloat16, True)
    frozen = jax.jit(implementation(name, True))(sizes, lhs, rhs._replace(master_EDF=None), bias)
    trained = jax.jit(implementation(name, True))(sizes, lhs, rhs, bias)
    np.testing.assert_array_equal(np.asarray(frozen, np.float32), np.asarray(trained, np.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda x: x.__name__)
def test_masters_train_up_to_their_groups_largest(dtype):
    limit = 6.0 * 2.0 ** np.array([0, -20, -126])  # 2^e of a column; the last is of subnormals
    up = np.float32(1 + float(jnp.finfo(dtype).eps))
    column = np.zeros((64, 3), np.float32)
    column[0], column[1], column[2] = 7 / 6 * limit, limit, -limit
    column[3], column[4], column[5] = up * limit, -up * limit, 0.9 * limit
    master = jnp.asarray(column[None]).astype(dtype)
    lhs = jnp.ones((2, 64), dtype)

    def total(master):
        rhs = encode_mxfp4(jax.lax.stop_gradient(master))._replace(master_EDF=master)
        return grouped_matmul(lhs, rhs, jnp.array([2], jnp.int32), impl="xla").sum()

    trains = np.asarray(jax.grad(total)(master), np.float32)[0] != 0
    np.testing.assert_array_equal(trains[6:], True)
    np.testing.assert_array_equal(trains[:6].T, [[False, True, True, False, False, True]] * 3)


@pytest.mark.parametrize("name", ["xla", "mosaic_tpu"])
def test_no_dense_copy_of_experts_is_made(name):
    """The masters are float32, and all else in bfloat16 would be a copy."""
    dout, sizes, lhs, rhs, bias = draw_inputs(jnp.bfloat16, True)
    run = implementation(name, True)

    def saved(lhs, rhs, bias):
        return jax.vjp(partial(run, sizes), lhs, rhs, bias)[1]

    experts = (len(SIZES), D, F)
    residuals = jax.tree.leaves(jax.eval_shape(saved, lhs, rhs, bias))
    assert [x.dtype for x in residuals if x.size >= np.prod(experts)] == [jnp.float32]
    text = str(jax.make_jaxpr(partial(run, sizes))(lhs, rhs, bias))
    assert f"bf16[{','.join(map(str, experts))}]" not in text


def test_adapters_train_together_with_masters():
    dout, sizes, lhs, rhs, bias = draw_inputs(jnp.float32, False)
    keys = jax.random.split(jax.random.key(5))
    a = jax.random.normal(keys[0], (len(SIZES), 3, D)) / D**0.5
    b = jax.random.normal(keys[1], (len(SIZES), 3, F))

    @partial(jax.jit, static_argnums=0)
    def run(name, *arrays):
        def f(lhs, master, a, b):
            stack = rhs._replace(master_EDF=master)
            return grouped_matmul(
                lhs, stack, sizes, bias_EF=bias, low_rank=LowRank(a, b, 0.7), impl=name
            )

        out, pull = jax.vjp(f, *arrays)
        return out, *pull(dout)

    arrays = lhs, rhs.master_EDF, a, b
    for x, y in zip(run("xla", *arrays), run("reference", *arrays), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * float(jnp.abs(y).max()))


@pytest.mark.parametrize("name", ["xla", "mosaic_tpu"])
def test_an_infinite_master_shows_in_its_expert(name):
    """An expert without rows has one too."""
    dout, sizes, lhs, rhs, bias = draw_inputs(jnp.float32, False)
    master = rhs.master_EDF.at[1, 40, 5].set(jnp.nan).at[IDLE, 70, 9].set(-jnp.inf)
    stack = (
        x.at[FIRST : FIRST + len(SIZES)].set(own)
        for x, own in zip(rhs.codes, encode_mxfp4(master).codes, strict=True)
    )
    whole = Mxfp4(*stack, rhs.first, master)
    actual = values_and_gradients(implementation(name, False), dout, sizes, lhs, whole, bias)
    out, dlhs, dmaster, dbias = (np.array(x) for x in results_of(name, False, jnp.float32))
    rows = slice(SIZES[0], SIZES[0] + SIZES[1])
    out[rows, 5] = dlhs[rows, 32:64] = np.nan
    dmaster[1, 32:64, 5] = actual[2][1, 32:64, 5]  # nothing saturates where there is no scale
    assert np.isfinite(dmaster).all() and dmaster[1, 32:64, 5].all()
    for x, expected in zip(actual, (out, dlhs, dmaster, dbias), strict=True):
        np.testing.assert_array_equal(x, expected)


def test_no_rows_give_no_rows_and_zero_gradients():
    _, _, lhs, rhs, bias = draw_inputs(jnp.float32, False)
    for name in ("xla", "mosaic_tpu"):
        args = jnp.zeros(len(SIZES), jnp.int32), lhs[:0], rhs, bias
        out, _, dmaster, dbias = values_and_gradients(
            implementation(name, False), lhs[:0, :1] @ bias[:1], *args
        )
        assert out.shape == (0, F) and dmaster.shape == rhs.shape
        assert not dmaster.any() and not dbias.any()


INPUT_FAULTS = {
    "another part of the stack": lambda rhs: rhs._replace(first=rhs.first - 1),
    "masters of another expert": lambda rhs: rhs._replace(
        master_EDF=jnp.roll(rhs.master_EDF, 1, axis=0)
    ),
    "masters half as large": lambda rhs: rhs._replace(master_EDF=rhs.master_EDF / 2),
    "masters a tenth larger": lambda rhs: rhs._replace(master_EDF=rhs.master_EDF * 1.1),
    "halves of the rows swapped": lambda rhs: rhs._replace(
        nibbles_EDF=(rhs.nibbles_EDF << 4) | (rhs.nibbles_EDF >> 4)
    ),
}


@pytest.mark.parametrize("fault", INPUT_FAULTS)
def test_a_planted_fault_of_the_inputs_is_seen(fault):
    """Of the TPU's program, which is compiled already."""
    dout, sizes, lhs, rhs, bias = draw_inputs(jnp.float32, False)
    faulty = values_and_gradients(
        implementation("mosaic_tpu", False), dout, sizes, lhs, INPUT_FAULTS[fault](rhs), bias
    )
    with pytest.raises(AssertionError, match=r"error|saturated"):
        check(faulty, jnp.float32, False)


def whole_stack(rhs):
    """The first matrices of the stack, whichever part is meant."""
    return Mxfp4(*(x[: rhs.shape[0]] for x in rhs.codes))


def rolled_groups(rhs, right=rounded._own_matrices):
    """The scales of the group of rows before."""
    own = right(rhs)
    return own._replace(scales_EDF=jnp.roll(own.scales_EDF, 1, axis=1))


CODE_FAULTS = {
    "nothing saturates": ("is_saturated", lambda master, _: jnp.zeros(master.shape, bool)),
    "negative values never saturate": (
        "is_saturated",
        lambda master, scales, right=rounded.is_saturated: right(jnp.maximum(master, 0), scales),
    ),
    "saturates at 4": (
        "is_saturated",
        lambda master, scales, right=rounded.is_saturated: right(master * 1.5, scales),
    ),
    "scales of another part": ("_own_matrices", whole_stack),
    "scales of another group": ("_own_matrices", rolled_groups),
    "values of zero train nothing": (
        "_mask_saturated",
        lambda gradient, master, packed: jnp.where(mxfp4_to_dense(packed) != 0, gradient, 0),
    ),
    "masters that train nothing": ("_mask_saturated", lambda _, master, __: master * 0),
}


@pytest.mark.parametrize("name", ["xla", pytest.param("mosaic_tpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", CODE_FAULTS)
def test_a_planted_fault_of_the_code_is_seen(fault, name, monkeypatch):
    part, fault_of_codes = CODE_FAULTS[fault]
    monkeypatch.setattr(rounded, part, fault_of_codes)
    matmul = implementation(name, False)
    actual = values_and_gradients(
        lambda *x: matmul(*x), *draw_inputs(jnp.float32, False)
    )  # traced anew
    with pytest.raises(AssertionError, match="dmaster|saturated"):
        check(actual, jnp.float32, False)


def test_masters_that_do_not_fit_are_named():
    raw = inspect.unwrap(grouped_matmul)
    _, sizes, lhs, rhs, bias = draw_inputs(jnp.float32, False)
    alone = own_matrices(rhs)._replace(master_EDF=rhs.master_EDF)
    for unsupported in (
        alone._replace(master_EDF=rhs.master_EDF[:, :, :-1]),
        alone._replace(master_EDF=rhs.master_EDF[1:]),
        rhs._replace(master_EDF=jnp.concatenate([rhs.master_EDF] * 2)),
    ):
        with pytest.raises(ValueError, match="must have the shape of its packed matrices") as error:
            raw(lhs, unsupported, sizes, bias_EF=None)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="floating-point"):
        raw(lhs, alone._replace(master_EDF=rhs.master_EDF.astype(jnp.int32)), sizes)
    with pytest.raises(ValueError, match="must have scales"):
        raw(lhs, alone._replace(scales_EDF=alone.scales_EDF[:, 1:]), sizes)
    with pytest.raises(ValueError, match="one size for each of the 5 matrices"):
        raw(lhs, rhs, sizes[:-1])
    assert FIRST + len(SIZES) <= len(rhs.nibbles_EDF) and M > sum(SIZES)
