# SPDX-License-Identifier: Apache-2.0
"""The two small layers against float64 formulas; the dtype's own rounding is the tolerance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model.layers import dot_in_float32, linear, rms_norm
from jaxmoe.model.moe.router import FEW_ROWS, SUMMANDS, _dot_in_parts, router_dot

EPS = float(np.finfo(np.float32).eps)
B, T, D, F = 2, 24, 48, 40
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def draw_array(seed, *shape, scale=1.0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), dtype)


def to_float64(x):
    return np.asarray(x, np.float64)


def assert_near(actual, want, size, terms):
    """One rounding to the output's dtype, and `terms` float32 roundings of numbers of `size`."""
    bound = float(jnp.finfo(actual.dtype).eps) * np.abs(want) + terms * EPS * size
    worst = np.max(np.abs(to_float64(actual) - want) - bound)
    assert worst <= 0, worst


@DTYPES
def test_rms_norm_is_its_formula(dtype):
    x, scale = draw_array(0, B, T, D, scale=3, dtype=dtype), draw_array(1, D)
    actual = rms_norm(x, scale, 1e-5)
    v = to_float64(x)
    want = v / np.sqrt(np.mean(v**2, -1, keepdims=True) + 1e-5) * to_float64(scale)
    assert actual.dtype == x.dtype
    assert_near(actual, want, np.abs(want), D)


def test_rms_norm_scales_before_it_rounds():
    # 1 + 2^-8 is not a bfloat16; 1.5 times it, rounded once, is not 1.5
    x = jnp.asarray([[1 + 2.0**-7, 1.0]], jnp.bfloat16)
    scale = jnp.asarray([1.5, 1.5], jnp.float32)
    v = to_float64(x)
    normed = v / np.sqrt(np.mean(v**2) + 1e-5)
    expected = jnp.asarray(normed * 1.5, jnp.bfloat16)
    twice = jnp.asarray(normed, jnp.bfloat16) * jnp.bfloat16(1.5)
    assert (
        to_float64(expected).tolist() != to_float64(twice).tolist()
    )  # the example tells them apart
    assert to_float64(rms_norm(x, scale, 1e-5)).tolist() == to_float64(expected).tolist()


def test_a_row_of_zeros_stays_zero():
    assert not np.any(to_float64(rms_norm(jnp.zeros((1, D)), jnp.ones(D), 1e-5)))


@DTYPES
def test_linear_adds_its_bias_before_it_rounds(dtype):
    x, w, b = draw_array(0, B, T, D, dtype=dtype), draw_array(1, D, F), draw_array(2, F)
    actual = linear(x, w, b)
    w_used = to_float64(w.astype(x.dtype))
    want = to_float64(x) @ w_used + to_float64(b)
    assert actual.dtype == x.dtype
    assert_near(actual, want, np.abs(to_float64(x)) @ np.abs(w_used) + np.abs(to_float64(b)), D + 1)


@DTYPES
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e4])
def test_rms_norm_has_its_gradient_at_every_size(dtype, size):
    """dx = r·(dy·s) − x·r³·Σ(dy·s·x)/D, r = 1/√(mean(x²) + ε)."""
    x, scale, dy = (
        draw_array(0, T, D, scale=size, dtype=dtype),
        draw_array(1, D),
        draw_array(2, T, D, dtype=dtype),
    )
    (actual,) = jax.vjp(lambda x: rms_norm(x, scale, 1e-5), x)[1](dy)
    v, g = to_float64(x), to_float64(dy) * to_float64(scale)
    r = 1 / np.sqrt(np.mean(v**2, -1, keepdims=True) + 1e-5)
    terms = r * np.abs(g) + np.abs(v) * r**3 * np.mean(np.abs(g * v), -1, keepdims=True)
    assert_near(actual, r * g - v * r**3 * np.mean(g * v, -1, keepdims=True), terms, D)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_linear_match_the_plain_product(dtype):
    keys = jax.random.split(jax.random.key(3), 4)
    x, w, b, dy = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(keys, ((2, 5, 48), (48, 20), (20,), (2, 5, 20)), strict=True)
    )

    def plain(x, w, b):
        y = jnp.dot(x, w, preferred_element_type=jnp.float32)
        return (y + b.astype(jnp.float32)[None, None]).astype(dtype)

    def sums(fn):
        return jax.grad(lambda *a: jnp.vdot(fn(*a), dy).astype(jnp.float32), (0, 1, 2))(x, w, b)

    assert jnp.array_equal(linear(x, w, b), plain(x, w, b))
    for actual, expected in zip(sums(linear), sums(plain), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(
            np.asarray(actual, np.float64),
            np.asarray(expected, np.float64),
            rtol=2 * float(jnp.finfo(dtype).eps),
            atol=2 * float(jnp.finfo(dtype).eps),
        )


def test_linears_backward_multiplies_arrays_of_16_bits():
    x, w = jnp.ones((3, 8), jnp.bfloat16), jnp.ones((8, 4), jnp.bfloat16)
    grads = jax.grad(lambda x, w: dot_in_float32(x, w).sum(), (0, 1))
    text = str(jax.make_jaxpr(grads)(x, w))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 2 and not any("f32[3,4] " in line.split("=")[1] for line in products)
    assert "convert_element_type[new_dtype=bfloat16" in text


@pytest.mark.parametrize("rows", [1, FEW_ROWS])
def test_router_logits_in_parts_are_float32_sums(rows):
    keys, width = jax.random.split(jax.random.key(5)), 30 * SUMMANDS
    h = jax.random.normal(keys[0], (rows, 1, width)) * 3
    w = jax.random.normal(keys[1], (width, 32)) * 0.05
    exact = np.asarray(h, np.float64) @ np.asarray(w, np.float64)
    naive = np.abs(np.asarray(router_dot(h, w), np.float64) - exact).max()
    parts = np.abs(np.asarray(jax.jit(_dot_in_parts)(h, w), np.float64) - exact).max()
    assert parts <= 2 * naive + 2 * np.finfo(np.float32).eps * np.abs(exact).max()
