# SPDX-License-Identifier: Apache-2.0
"""A change of low rank in XLA and the chips' kernels, interpreted: as good as merged matrices, in
any part of a larger stack, and each of its pieces needed."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import (
    LowRank,
    grouped_matmul,
    pallas_gpu,
    pallas_tpu,
    reference,
    xla,
)
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense
from tests.pallas_kernels.grouped_matmul.matmul_oracle import knows_transposes, plain_swiglu
from tests.pallas_kernels.three_way import three_way

pytestmark = pytest.mark.usefixtures("small_tpu_tiles")

M, D, F, R = 118, 192, 256, 5
SIZES = (0, 67, 1, 23, 9)  # an empty group, rows past the sum
FIRST = 2  # of the matrices meant, in a stack of 8
SCALE, ALPHA, LIMIT = 0.7, 1.3, 4.0
NAMES = ("out", "dlhs", "da", "db")

SLOW_GPU = pytest.param("gpu", marks=[knows_transposes, pytest.mark.slow])


KERNELS = {
    "xla": (xla.grouped_matmul_xla, xla.grouped_swiglu_xla),
    "gpu": (pallas_gpu.grouped_matmul_mosaic_gpu, pallas_gpu.grouped_swiglu_mosaic_gpu),
    "tpu": (pallas_tpu.grouped_matmul_mosaic_tpu, pallas_tpu.grouped_swiglu_mosaic_tpu),
}


@cache
def draw_inputs(swiglu):
    """Sizes, lhs, matrices, bias, a, b and a cotangent; matrices that are not meant are NaN."""
    keys = iter(jax.random.split(jax.random.key(5), 8))

    def draw(*shape):
        return jax.random.normal(next(keys), shape)

    E, dtype = len(SIZES), jnp.bfloat16
    scales = jax.random.randint(next(keys), (E + 3, D // 32, F), 120, 124).astype(jnp.uint8)
    meant = (jnp.arange(E + 3) >= FIRST) & (jnp.arange(E + 3) < FIRST + E)
    stack = Mxfp4(
        jax.random.bits(next(keys), (E + 3, D // 2, F), jnp.uint8),
        jnp.where(meant[:, None, None], scales, jnp.uint8(255)),
    )
    part = stack._replace(first=jnp.int32(FIRST))
    a_ERD, b_ERF = draw(E, R, D) / D**0.5, draw(E, R, F)
    dout_MF = draw(M, F // 2 if swiglu else F).astype(dtype)
    lhs_MD = draw(M, D).astype(dtype)
    return jnp.array(SIZES, jnp.int32), lhs_MD, part, draw(E, F), a_ERD, b_ERF, dout_MF


def select_part(part):
    """The matrices that a part means, by themselves."""
    return Mxfp4(*(x[FIRST : FIRST + len(SIZES)] for x in part.codes))


@partial(jax.jit, static_argnums=(0, 1))
def values_and_gradients(run, swiglu, sizes, lhs, rhs, bias, a, b, dout):
    """The value and the gradients of lhs, a and b."""
    options = (ALPHA, LIMIT) if swiglu else ()
    out, pull = jax.vjp(
        lambda lhs, a, b: run(lhs, rhs, sizes, bias, *options, LowRank(a, b, SCALE)), lhs, a, b
    )
    return out, *pull(dout.astype(out.dtype))


def merged(lhs, rhs, sizes, bias, *options_and_change):
    """Naively, by whole matrices, everything in lhs's dtype."""
    *options, (a, b, scale) = options_and_change
    merged_weights = (mxfp4_to_dense(rhs) + scale * jnp.einsum("erd,erf->edf", a, b)).astype(
        lhs.dtype
    )
    h = reference.grouped_matmul_reference(lhs, merged_weights, sizes, bias)
    if not options:
        return h
    return plain_swiglu(h, ALPHA, LIMIT)


def kernel(chip, swiglu):
    run = KERNELS[chip][swiglu]
    return run if chip == "xla" else partial(run, interpret=True)


@cache
def on_chip(chip, swiglu):
    return values_and_gradients(kernel(chip, swiglu), swiglu, *draw_inputs(swiglu))


@cache
def naive_and_right(swiglu):
    sizes, lhs, part, *others, dout = draw_inputs(swiglu)
    oracle = reference.grouped_swiglu_reference if swiglu else reference.grouped_matmul_reference
    wide = (lhs.astype(jnp.float32), select_part(part), *others)
    return (
        values_and_gradients(merged, swiglu, sizes, lhs, select_part(part), *others, dout),
        values_and_gradients(oracle, swiglu, sizes, *wide, dout.astype(jnp.float32)),
    )


def check(actual, swiglu):
    for name, x, plain, exact in zip(NAMES, actual, *naive_and_right(swiglu), strict=True):
        three_way(x, plain, exact, name)


@pytest.mark.parametrize(
    "chip, swiglu",
    [
        pytest.param("gpu", False, marks=[knows_transposes, pytest.mark.slow], id="gpu-matmul"),
        pytest.param("gpu", True, marks=knows_transposes, id="gpu-swiglu"),
        pytest.param("tpu", False, id="tpu-matmul"),
        pytest.param("tpu", True, marks=pytest.mark.slow, id="tpu-swiglu"),
        pytest.param("xla", False, id="xla-matmul"),
        pytest.param("xla", True, id="xla-swiglu"),
    ],
)
def test_values_and_gradients_match_merged_matrices(chip, swiglu):
    actual = on_chip(chip, swiglu)
    assert [x.dtype for x in actual] == [jnp.bfloat16] * 2 + [jnp.float32] * 2
    check(actual, swiglu)
    assert not np.asarray(actual[0], np.float32)[sum(SIZES) :].any()


@pytest.mark.parametrize("chip", [SLOW_GPU, "tpu", "xla"])
def test_a_part_of_a_stack_equals_its_matrices(chip):
    sizes, lhs, part, *others = draw_inputs(False)
    alone = values_and_gradients(kernel(chip, False), False, sizes, lhs, select_part(part), *others)
    for x, y in zip(on_chip(chip, False), alone, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("chip", [SLOW_GPU, "tpu", "xla"])
def test_b_of_zero_changes_no_bit(chip):
    """A run begins at its base, and the change is added before anything is rounded."""
    sizes, lhs, part, bias, a, b, _ = draw_inputs(True)
    run = partial(kernel(chip, True), alpha=ALPHA, limit=LIMIT)
    zero = LowRank(a, jnp.zeros_like(b), SCALE)
    none = jax.jit(lambda lhs: run(lhs, part, sizes, bias, low_rank=zero))(lhs)
    base = jax.jit(run)(lhs, select_part(part), sizes, bias)
    np.testing.assert_array_equal(np.asarray(none, np.float32), np.asarray(base, np.float32))


FAULTS = {
    "scale left out": lambda x: [*x[:4], x[4] / SCALE, *x[5:]],
    "b of another group": lambda x: [*x[:5], jnp.roll(x[5], 1, 0), x[6]],
    "another part of the stack": lambda x: [*x[:2], x[2]._replace(first=x[2].first - 1), *x[3:]],
    "a rank too few": lambda x: [*x[:5], x[5].at[:, -1].set(0), x[6]],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault):
    """Of the TPU's program, which is compiled already."""
    faulty = values_and_gradients(
        kernel("tpu", False), False, *FAULTS[fault](list(draw_inputs(False)))
    )
    with pytest.raises(AssertionError, match=r"out: error"):
        check(faulty, False)


def test_the_reference_is_the_formula():
    sizes, lhs, part, *others = draw_inputs(False)
    lhs, rhs, bias, a, b, dout = (
        np.asarray(x.astype(jnp.float32), np.float64)
        for x in (lhs, mxfp4_to_dense(select_part(part)), *others)
    )
    out, dlhs, da, db = (np.zeros_like(x) for x in (dout, lhs, a, b))
    for e, (begin, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        rows = slice(begin, begin + size)
        low, dlow = lhs[rows] @ a[e].T, dout[rows] @ b[e].T
        out[rows] = lhs[rows] @ rhs[e] + bias[e] + SCALE * low @ b[e]
        dlhs[rows] = dout[rows] @ rhs[e].T + SCALE * dlow @ a[e]
        da[e], db[e] = SCALE * dlow.T @ lhs[rows], SCALE * low.T @ dout[rows]
    for x, exact in zip(naive_and_right(False)[1], (out, dlhs, da, db), strict=True):
        np.testing.assert_allclose(x, exact, rtol=1e-5, atol=1e-4 * np.abs(exact).max())


def test_frozen_matrices_have_no_gradient_program():
    sizes, lhs, part, *others, dout = draw_inputs(False)
    lhs, rhs, dout = lhs.astype(jnp.float32), mxfp4_to_dense(select_part(part)), dout.astype("f4")
    compiled = values_and_gradients.lower(
        kernel("xla", False), False, sizes, lhs, rhs, *others, dout
    ).compile()
    for x, exact in zip(
        compiled(sizes, lhs, rhs, *others, dout), naive_and_right(False)[1], strict=True
    ):
        np.testing.assert_allclose(x, exact, rtol=1e-5, atol=1e-4 * np.abs(exact).max())
    of_rhs = f"f32[{len(SIZES)},{D},{F}]"  # matrices are read; who sums them writes tiles
    text = compiled.as_text()
    assert f"f32[{D},{F}]" in text
    assert not [x for x in text.splitlines() if "dynamic-update-slice(" in x and of_rhs in x]


def test_a_change_that_does_not_fit_is_refused():
    sizes, lhs, part, bias, a, b, _ = draw_inputs(False)
    for unsupported in (LowRank(b, a, SCALE), LowRank(a[:, :0], b[:, :0], SCALE)):
        with pytest.raises(
            ValueError, match=r"low_rank must have a of shape .5, 'R', 192.*\[groups"
        ):
            grouped_matmul(lhs, part, sizes, bias_EF=bias, low_rank=unsupported)
