# SPDX-License-Identifier: Apache-2.0
"""Batch invariance of grouped matmuls by the GPU and TPU kernels, interpreted.

Only the TPU's products depend on the number of rows: a Hopper kernel always has one tile size.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import LowRank, grouped_matmul, grouped_swiglu, pallas_tpu_rows
from tests.pallas_kernels.interpreted import INVARIANT, TPU, interpreted

E, D, F, R = 3, 192, 256, 4
SIZES = (70, 0, 261)  # on a TPU 256 + 64 rows of one group at once
FUNCTIONS = (grouped_matmul, grouped_swiglu)


def inputs():
    keys = jax.random.split(jax.random.key(5), 5)
    shapes = (sum(SIZES), D), (E, D, F), (E, F), (E, R, D), (E, R, F)
    arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    arrays = [x if i < 3 else 0.1 * x for i, x in enumerate(arrays)]
    return [x.astype(jnp.bfloat16) if i < 2 else x for i, x in enumerate(arrays)]


arrays = pytest.fixture(scope="module")(inputs)


def result(fn, lhs, rhs, sizes, bias, change, impl):
    run = partial(fn, impl=impl)
    low = LowRank(*change, 0.5) if change else None
    out = jax.jit(lambda *x: run(*x[:3], bias_EF=x[3], low_rank=low))(
        lhs, rhs, jnp.asarray(sizes), bias
    )
    return np.asarray(out.astype(jnp.float32))


def differing(fn, arrays, impl, lora=False):
    """Count the numbers of some rows that differ in a batch without the other rows."""
    lhs, rhs, bias, *change = arrays
    with_these = change if lora else None, impl
    complete = result(fn, lhs, rhs, SIZES, bias, *with_these)
    rows = np.r_[3:20, 100:140]
    fewer = result(fn, lhs[rows], rhs, (17, 0, 40), bias, *with_these)
    single = result(fn, lhs[330:331], rhs, (0, 0, 1), bias, *with_these)
    return int((fewer != complete[rows]).sum() + (single != complete[330:331]).sum()), complete


@pytest.mark.parametrize(
    "fn, lora",
    [
        (grouped_matmul, False),
        (grouped_swiglu, True),
        pytest.param(grouped_matmul, True, marks=pytest.mark.slow),
        pytest.param(grouped_swiglu, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("impl", INVARIANT)
def test_a_rows_bits_ignore_other_rows(arrays, impl, fn, lora):
    if "gpu" in impl and lora:
        pytest.skip("interpreting it takes a quarter of a minute; test_on_chip.py has it on a chip")
    with interpreted(impl):
        n_different, complete = differing(fn, arrays, impl, lora)
    assert n_different == 0
    lhs, rhs, bias, *change = (x.astype(jnp.float32) for x in arrays)
    low = LowRank(*change, 0.5) if lora else None
    expected = fn(lhs, rhs, jnp.asarray(SIZES), bias_EF=bias, low_rank=low, impl="reference")
    assert np.abs(complete - expected).max() < 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize("undone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_larger_products_change_a_rows_bits(arrays, undone, monkeypatch):
    """Small ones, whose sums XLA for CPU orders by their rows."""
    tiles, wide = pallas_tpu_rows.tiles, [x.astype(jnp.float32) for x in arrays]
    counts = tiles.count_products
    monkeypatch.setattr(tiles, "product_sizes", lambda: (64, 16))
    if undone:
        monkeypatch.setattr(tiles, "count_products", lambda rows, most, _: counts(rows, most))
    jax.clear_caches()
    with interpreted(TPU):
        n_different, _ = differing(grouped_matmul, wide, TPU)
    assert (n_different > 0) == undone
    jax.clear_caches()


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradients_are_those_of_the_reference(arrays, fn):
    wide = [x.astype(jnp.float32) for x in arrays[:3]]
    sizes = jnp.asarray(SIZES)
    weights = jax.random.normal(
        jax.random.key(6), (sum(SIZES), F if fn is grouped_matmul else F // 2)
    )

    def total(impl, lhs, rhs, bias):
        return jnp.sum(fn(lhs, rhs, sizes, bias_EF=bias, impl=impl) * weights)

    with interpreted(TPU):
        actual = jax.jit(jax.grad(partial(total, TPU), argnums=(0, 1, 2)))(*wide)
    expected = jax.jit(jax.grad(partial(total, "reference"), argnums=(0, 1, 2)))(*wide)
    for a, b in zip(actual, expected, strict=True):
        assert np.abs(a - b).max() < 2e-5 * np.abs(b).max()
