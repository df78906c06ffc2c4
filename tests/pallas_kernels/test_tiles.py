# SPDX-License-Identifier: Apache-2.0
"""A row's bits in a tile are its own; values and gradients are those of the function itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tiles import ROWS, in_tiles


def softmax_of_product(rows, whole):
    x_MD, shift_M = rows
    return jax.nn.softmax(x_MD @ whole + shift_M[:, None].astype(x_MD.dtype), axis=-1), shift_M + 1


tiled = jax.jit(lambda rows, whole: in_tiles(softmax_of_product, rows, whole))


def inputs(count, dtype=jnp.float32):
    x_MD = jax.random.normal(jax.random.key(0), (70, 24)).astype(dtype)[:count]
    return (x_MD, jnp.arange(70, dtype=jnp.int32)[:count]), jax.random.normal(
        jax.random.key(1), (24, 19)
    ).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_has_the_same_bits_beside_any_others(dtype):
    rows, whole = inputs(70, dtype)
    every, counted = tiled(rows, whole)
    assert every.dtype == dtype and counted.tolist() == list(range(1, 71))
    for first, last in ((0, 1), (5, 9), (3, 3 + ROWS), (30, 70)):
        some, _ = tiled(jax.tree.map(lambda x, a=first, b=last: x[a:b], rows), whole)
        assert np.array_equal(some, every[first:last])


def test_values_and_gradients_are_those_of_the_function():
    rows, whole = inputs(70)

    def loss(x_MD, whole, fn):
        out, _ = fn((x_MD, rows[1]), whole)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    got = jax.value_and_grad(loss, (0, 1))(rows[0], whole, tiled)
    want = jax.value_and_grad(loss, (0, 1))(rows[0], whole, softmax_of_product)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_the_compiler_does_not_know_how_often_the_loop_turns():
    """Of one turn it would make none, and fuse the tile with what is around it."""
    text = tiled.lower(*inputs(ROWS)).compile().as_text()
    assert " while(" in text and "known_trip_count" not in text


# as users compile: tests/conftest.py has LLVM optimise little
AS_USERS = {
    "xla_backend_optimization_level": "3", "xla_llvm_disable_expensive_passes": "False",
}  # fmt: skip


def test_a_tile_alone_has_the_bits_it_has_among_others_whatever_is_around_it():
    """Why the count is hidden: of one turn the compiler fuses the tile with what is before it."""

    def around(x_MD, whole, scale):
        out, _ = in_tiles(softmax_of_product, (x_MD * scale, jnp.zeros(len(x_MD))), whole)
        return (out + 1.0) * scale

    run = jax.jit(around, compiler_options=AS_USERS)
    (x_MD, _), whole = inputs(70)
    every = run(x_MD, whole, 1.7)
    for count in (1, 20, ROWS):
        assert np.array_equal(run(x_MD[:count], whole, 1.7), every[:count]), count
