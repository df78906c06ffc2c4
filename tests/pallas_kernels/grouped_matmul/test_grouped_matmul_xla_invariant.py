# SPDX-License-Identifier: Apache-2.0
"""Batch invariance of XLA's grouped matmuls, and the sum over experts.

Values and gradients of the shared cases: test_grouped_matmul.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import LowRank, grouped_swiglu
from pallas_kernels.grouped_matmul.routing import combine_rows
from pallas_kernels.grouped_matmul.xla_invariant import ROWS, combine_rows_xla_invariant

D, F, E, R = 24, 20, 3, 5
SIZES = jnp.array([37, 0, 22], jnp.int32)


def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((59, D), (E, D, 2 * F), (E, 2 * F), (E, R, D), (E, R, 2 * F))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("change", [False, True], ids=["plain", "low_rank"])
def test_values_and_gradients_are_those_of_the_reference(change):
    given = arrays()

    def loss(given, fn):
        lhs, rhs, bias, a, b = given
        low = {"low_rank": LowRank(a, b, 0.5)} if change else {}
        return jnp.sum(jnp.sin(fn(lhs, rhs, SIZES, bias_EF=bias, **low)))

    got, want = (
        jax.jit(jax.value_and_grad(partial(loss, fn=partial(grouped_swiglu, impl=impl))))(given)
        for impl in ("xla_invariant", "xla")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)


def test_a_rows_bits_ignore_its_group():
    lhs, rhs, bias, *_ = arrays()
    invariant = partial(grouped_swiglu, bias_EF=bias, impl="xla_invariant")
    run = jax.jit(lambda lhs, sizes: invariant(lhs, rhs, sizes))
    every = run(lhs, SIZES)
    alone = run(lhs[40:41], jnp.array([0, 0, 1], jnp.int32))
    assert np.array_equal(alone[0], every[40])
    few = run(lhs[30 : 30 + ROWS + 3], jnp.array([7, 0, ROWS - 4], jnp.int32))
    assert np.array_equal(few, every[30 : 30 + ROWS + 3])


def test_the_sum_over_experts_is_the_plain_one():
    y, inverse = jax.random.normal(jax.random.key(1), (33, D)), jnp.arange(33)[::-1]
    weights = jax.nn.softmax(jax.random.normal(jax.random.key(2), (11, 3)))

    def loss(y, weights, fn):
        return jnp.sum(jnp.cos(fn(y, inverse, weights)))

    got = jax.value_and_grad(loss, (0, 1))(y, weights, combine_rows_xla_invariant)
    want = jax.value_and_grad(loss, (0, 1))(y, weights, combine_rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
