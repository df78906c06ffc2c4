# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from studies.float64 import in_float64


def run_loops(x_T):
    """A scan, a while loop, a branch, a scatter and constants, all in float32."""
    total, partial_sums = lax.scan(lambda c, x: (c + jnp.float32(0.1) * x, c), jnp.float32(0), x_T)
    doubled = lax.while_loop(lambda c: c < 10.0, lambda c: 2.0 * c, total)
    chosen = lax.cond(doubled > 0.0, jnp.sqrt, jnp.square, doubled)
    placed = jnp.zeros(5, jnp.float32).at[jnp.array([1, 1])].add(x_T[:2])
    return chosen + jnp.sum(partial_sums) + jnp.sum(placed * placed)


def test_every_operation_is_evaluated_in_float64():
    x_T = np.random.default_rng(0).uniform(0.5, 1.0, 6)
    narrow = run_loops(jnp.asarray(x_T, jnp.float32))
    with jax.enable_x64(True):
        wide = jax.jit(in_float64(run_loops))(x_T)
    tenth, total, sums = np.float64(np.float32(0.1)), 0.0, 0.0
    for x in x_T:
        sums, total = sums + total, total + tenth * x
    while total < 10.0:
        total *= 2.0
    expected = np.sqrt(total) + sums + (x_T[0] + x_T[1]) ** 2
    assert wide.dtype == np.float64 and narrow.dtype == np.float32
    assert abs(float(wide) - expected) < 1e-14 * expected
    assert 1e-10 < abs(float(narrow) - expected) < 1e-5  # float32 would not pass the line above


def test_a_derivative_inside_the_function_is_in_float64():
    x_T = np.linspace(0.1, 1.0, 4)
    with jax.enable_x64(True):
        gradient = in_float64(jax.grad(lambda x: jnp.sum(jax.nn.softplus(x))))(x_T)
    np.testing.assert_allclose(gradient, 1.0 / (1.0 + np.exp(-x_T)), rtol=1e-15)


def test_integers_and_masks_stay_what_they_are():
    def split(x_T, n):
        return jnp.arange(3), x_T > 0.5, n + 1

    with jax.enable_x64(True):
        indices, mask, count = in_float64(split)(np.array([0.2, 0.8]), np.int32(1))
    assert indices.dtype == count.dtype == np.int32 and mask.tolist() == [False, True]


def test_a_function_of_the_bits_of_float32_is_refused():
    def hash_bits(x):
        return lax.bitcast_convert_type(x, jnp.uint32)

    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="bitcast_convert_type"):
        in_float64(hash_bits)(np.array([1.0]))
