# SPDX-License-Identifier: Apache-2.0
"""A row's bits in a tile are its own; values and gradients are those of the function itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tiles import ROWS, map_tiles


def softmax_of_product(rows, shared):
    x_MD, shift_M = rows
    return jax.nn.softmax(x_MD @ shared + shift_M[:, None].astype(x_MD.dtype), axis=-1), shift_M + 1


tiled = jax.jit(lambda rows, shared: map_tiles(softmax_of_product, rows, shared))


def inputs(count, dtype=jnp.float32):
    x_MD = jax.random.normal(jax.random.key(0), (70, 24)).astype(dtype)[:count]
    return (x_MD, jnp.arange(70, dtype=jnp.int32)[:count]), jax.random.normal(
        jax.random.key(1), (24, 19)
    ).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_rows_bits_ignore_neighbours(dtype):
    rows, shared = inputs(70, dtype)
    all_rows, counted = tiled(rows, shared)
    assert all_rows.dtype == dtype and counted.tolist() == list(range(1, 71))
    for first, last in ((0, 1), (5, 9), (3, 3 + ROWS), (30, 70)):
        some_rows, _ = tiled(jax.tree.map(lambda x, a=first, b=last: x[a:b], rows), shared)
        assert np.array_equal(some_rows, all_rows[first:last])


def test_values_and_gradients_are_those_of_the_function():
    rows, shared = inputs(70)

    def loss(x_MD, shared, fn):
        out, _ = fn((x_MD, rows[1]), shared)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    actual = jax.value_and_grad(loss, (0, 1))(rows[0], shared, tiled)
    want = jax.value_and_grad(loss, (0, 1))(rows[0], shared, softmax_of_product)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, want)


def test_the_compiler_cannot_know_the_loop_count():
    """It would inline a loop of one iteration, and fuse the tile with surrounding operations."""
    text = tiled.lower(*inputs(ROWS)).compile().as_text()
    assert " while(" in text and "known_trip_count" not in text


# the flags of users; tests/conftest.py reduces optimisation
USER_FLAGS = {"xla_backend_optimization_level": "3", "xla_llvm_disable_expensive_passes": "False"}


def test_a_tiles_bits_ignore_its_surroundings():
    """The count is hidden, as the compiler would fuse the tile of one iteration with its input."""

    def surroundings(x_MD, shared, scale):
        out, _ = map_tiles(softmax_of_product, (x_MD * scale, jnp.zeros(len(x_MD))), shared)
        return (out + 1.0) * scale

    run = jax.jit(surroundings, compiler_options=USER_FLAGS)
    (x_MD, _), shared = inputs(70)
    all_rows = run(x_MD, shared, 1.7)
    for count in (1, 20, ROWS):
        assert np.array_equal(run(x_MD[:count], shared, 1.7), all_rows[:count]), count
