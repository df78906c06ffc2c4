# SPDX-License-Identifier: Apache-2.0
"""Forms of the Hopper kernels on four-bit weights, interpreted: the same numbers by each of them.

`test_grouped_mxfp4_gpu.py` compares the form that is chosen with the formula.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mxfp4, pallas_gpu
from pallas_kernels.grouped_matmul.hopper import mxfp4_forms, pallas_gpu_mxfp4
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_rows import Swiglu
from tests.pallas_kernels.grouped_matmul.matmul_oracle import knows_transposes

M, D, F, RANK = 131, 192, 128, 64
# Tiles of a few rows, one whose end lies in the next 64, none; steps that no turn divides.
SIZES = (1, 90, 0, 31)
ONE = mxfp4_forms.SINGLE_DECODER
CHOSEN = {x: getattr(mxfp4_forms, x) for x in ("TWO_DECODERS", "FEW_ROWS")}
OTHERS = {x: getattr(mxfp4_forms, x) for x in ("FEW_ROWS_TWO_DECODERS", "FEW_ROWS_ONE_FETCHER")}
FORMS = [
    *CHOSEN.values(),
    *(pytest.param(x, marks=pytest.mark.slow, id=name) for name, x in OTHERS.items()),
]


def make(sizes, n_rows):
    rng, E = np.random.default_rng(0), len(sizes)
    packed = mxfp4.Mxfp4(
        jnp.asarray(rng.integers(0, 256, (E, D // 2, F), np.uint8)),
        jnp.asarray(rng.integers(118, 124, (E, D // mxfp4.GROUP, F), np.uint8)),
    )
    lhs, bias, dout, low, b, a = (
        jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16)
        for i, shape in enumerate(
            ((n_rows, D), (E, F), (n_rows, F), (n_rows, RANK), (E, RANK, F), (E, RANK, D))
        )
    )
    return packed, jnp.asarray(sizes, jnp.int32), lhs, bias, dout, (low, b), (low, a)


@partial(jax.jit, static_argnums=0)
def run(form):
    """out, the activation with its product, and dlhs, the last two with an adapter."""
    rhs, sizes, lhs, bias, dout, adapter, of_gradient = make(SIZES, M)
    matmul = partial(pallas_gpu_mxfp4.multiply_rows_mxfp4_hopper, form=form)
    return (
        matmul(lhs, rhs, sizes, bias, False, True),
        *pallas_gpu_mxfp4.multiply_swiglu_mxfp4_hopper(
            lhs, rhs, sizes, bias, Swiglu(1.702, 7.0, True), True, adapter, form
        ),
        matmul(dout, rhs, sizes, None, True, True, of_gradient),
    )


@pytest.fixture(scope="module")
def by_one_decoder():
    return run(ONE)


@knows_transposes
@pytest.mark.parametrize("form", FORMS, ids=list(CHOSEN) + [None] * len(OTHERS))
def test_a_form_changes_no_digit(form, by_one_decoder):
    for actual, expected in zip(run(form), by_one_decoder, strict=True):
        np.testing.assert_array_equal(actual.view(np.uint16), expected.view(np.uint16))


@pytest.mark.slow
@knows_transposes
@pytest.mark.parametrize("form", [*CHOSEN.values(), *OTHERS.values()], ids=[*CHOSEN, *OTHERS])
def test_no_warpgroup_races_with_another(races, monkeypatch, form):
    monkeypatch.setattr(pallas_gpu_mxfp4, "count_gpu_cores", lambda: 1)
    sizes, n_rows = (70, 0, 5, 0, 130), 330
    rhs, sizes, lhs, bias, *_ = make(sizes, n_rows)
    jax.block_until_ready(
        pallas_gpu_mxfp4.multiply_rows_mxfp4_hopper(lhs, rhs, sizes, bias, False, True, form=form)
    )
    assert not races()


def test_few_rows_a_group_have_their_form():
    assert mxfp4_forms.choose_form(256, 32) == mxfp4_forms.choose_form(2048, 32)
    assert mxfp4_forms.choose_form(256, 32).consumers == 1
    assert mxfp4_forms.choose_form(2049, 32) == mxfp4_forms.choose_form(98304, 32)


def test_batch_invariant_kernels_have_one_form(monkeypatch):
    forms = []
    for name in ("multiply_rows_mxfp4_hopper", "multiply_swiglu_mxfp4_hopper"):

        def record(*_, form):
            forms.append(form)

        monkeypatch.setattr(pallas_gpu, name, record)
    rhs, sizes, lhs, bias, *_ = make(SIZES, M)
    for invariant in (False, True):
        kernels = pallas_gpu.make_mosaic_gpu_kernels(True, invariant)
        kernels.multiply_rows(lhs, rhs, sizes, bias, False, ())
        kernels.swiglu(lhs, rhs, sizes, bias, 1.702, 7.0, False, ())
        kernels.lhs_gradient(lhs, rhs, sizes)
    assert forms == [None] * 3 + [ONE] * 3
