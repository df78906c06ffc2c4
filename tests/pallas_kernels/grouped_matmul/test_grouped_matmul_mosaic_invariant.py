# SPDX-License-Identifier: Apache-2.0
"""The grouped matmuls by a chip's kernels, interpreted: a row's bits in every company.

What is undone is seen on a TPU alone: a Hopper kernel has one tile whatever the rows.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import LowRank, grouped_matmul, grouped_swiglu, pallas_tpu_rows
from pallas_kernels.grouped_matmul.mosaic_invariant import (
    grouped_matmul_mosaic_invariant,
    grouped_swiglu_mosaic_invariant,
)

E, D, F, R = 3, 192, 256, 4
SIZES = (70, 0, 261)  # on a TPU 256 + 64 rows of one group at once
OLD = jax.__version_info__ < (0, 11)
GPU = pytest.param("mosaic_gpu", marks=[
    pytest.mark.slow, pytest.mark.skipif(OLD, reason="jax 0.10 interprets a block in 10 s")
])  # fmt: skip
CHIPS = ("mosaic_tpu", GPU)


def inputs():
    keys = jax.random.split(jax.random.key(5), 5)
    shapes = (sum(SIZES), D), (E, D, F), (E, F), (E, R, D), (E, R, F)
    made = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    made = [x if i < 3 else 0.1 * x for i, x in enumerate(made)]
    return [x.astype(jnp.bfloat16) if i < 2 else x for i, x in enumerate(made)]


arrays = pytest.fixture(scope="module")(inputs)


def result(fn, lhs, rhs, sizes, bias, change, how):
    run = partial(fn, **how)
    low = LowRank(*change, 0.5) if change else None
    out = jax.jit(lambda *x: run(*x[:3], bias_EF=x[3], low_rank=low))(
        lhs, rhs, jnp.asarray(sizes), bias
    )
    return np.asarray(out.astype(jnp.float32))


def differing(fn, arrays, chip, lora=False, interpret=True):
    """How many numbers of rows of the first and last group differ where others are not there."""
    lhs, rhs, bias, *change = arrays
    with_these = change if lora else None, dict(impl=chip, interpret=interpret)
    whole = result(fn, lhs, rhs, SIZES, bias, *with_these)
    some = np.r_[3:20, 100:140]
    fewer = result(fn, lhs[some], rhs, (17, 0, 40), bias, *with_these)
    one = result(fn, lhs[330:331], rhs, (0, 0, 1), bias, *with_these)
    return int((fewer != whole[some]).sum() + (one != whole[330:331]).sum()), whole


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("fn", [grouped_matmul_mosaic_invariant, grouped_swiglu_mosaic_invariant])
@pytest.mark.parametrize("chip", CHIPS)
def test_a_rows_bits_do_not_depend_on_the_others(arrays, chip, fn, lora):
    if chip == "mosaic_gpu" and lora:
        pytest.skip("interpreting it takes a quarter of a minute; test_on_chip.py has it on a chip")
    found, whole = differing(fn, arrays, chip, lora)
    assert found == 0
    lhs, rhs, bias, *change = (x.astype(jnp.float32) for x in arrays)
    plain = grouped_matmul if fn is grouped_matmul_mosaic_invariant else grouped_swiglu
    low = LowRank(*change, 0.5) if lora else None
    right = plain(lhs, rhs, jnp.asarray(SIZES), bias_EF=bias, low_rank=low, impl="reference")
    assert np.abs(whole - right).max() < 1e-2 * np.abs(right).max()


@pytest.mark.parametrize("undone", [False, True])
def test_where_a_group_with_more_rows_has_larger_products_they_do(arrays, undone, monkeypatch):
    """Small ones, whose sums XLA for CPU orders by their rows."""
    tiles, wide = pallas_tpu_rows.tiles, [x.astype(jnp.float32) for x in arrays]
    counts = tiles.count_products
    monkeypatch.setattr(tiles, "product_sizes", lambda: (64, 16))
    if undone:
        monkeypatch.setattr(tiles, "count_products", lambda rows, most, _: counts(rows, most))
    jax.clear_caches()
    found, _ = differing(grouped_matmul_mosaic_invariant, wide, "mosaic_tpu")
    assert (found > 0) == undone
    jax.clear_caches()


@pytest.mark.parametrize("fn", [grouped_matmul_mosaic_invariant, grouped_swiglu_mosaic_invariant])
def test_gradients_are_the_kernels_own(arrays, fn):
    wide = [x.astype(jnp.float32) for x in arrays[:3]]
    plain = grouped_matmul if fn is grouped_matmul_mosaic_invariant else grouped_swiglu
    sizes = jnp.asarray(SIZES)
    out = F if fn is grouped_matmul_mosaic_invariant else F // 2
    weights = jax.random.normal(jax.random.key(6), (sum(SIZES), out))

    def total(run, lhs, rhs, bias):
        return jnp.sum(run(lhs, rhs, sizes, bias_EF=bias) * weights)

    ours = partial(fn, impl="mosaic_tpu", interpret=True)
    got = jax.grad(partial(total, ours), argnums=(0, 1, 2))(*wide)
    right = jax.grad(partial(total, partial(plain, impl="reference")), argnums=(0, 1, 2))(*wide)
    for mine, theirs in zip(got, right, strict=True):
        assert np.abs(mine - theirs).max() < 2e-5 * np.abs(theirs).max()
