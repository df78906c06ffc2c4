# SPDX-License-Identifier: Apache-2.0
"""The clamped SwiGLU against its float64 formula; the dtype's own rounding is the tolerance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.swiglu import clamped_swiglu

EPS = float(np.finfo(np.float32).eps)
T, F = 24, 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_swiglu_is_its_formula(dtype):
    h = jnp.asarray(np.random.default_rng(0).normal(scale=6, size=(T, 2 * F)), dtype)
    ours = clamped_swiglu(h, 1.702, 7.0)
    gate, up = np.split(np.asarray(h, np.float64), 2, -1)
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    want = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    assert ours.dtype == h.dtype and ours.shape == (T, F)
    # one rounding to the dtype; exp of z carries |z| ulp of its argument's rounding
    size = np.abs(want) * (8 + 1.702 * np.abs(gate)) + np.abs(gate)
    bound = float(jnp.finfo(ours.dtype).eps) * np.abs(want) + EPS * size
    assert np.max(np.abs(np.asarray(ours, np.float64) - want) - bound) <= 0


def test_swiglu_clamps_gate_above_up_on_both_sides():
    def one(gate, up):
        return float(clamped_swiglu(jnp.asarray([[gate, up]]), 1.702, 7.0)[0, 0])

    assert one(100.0, 2.0) == one(7.0, 2.0) != one(6.0, 2.0)
    assert one(1.0, 100.0) == one(1.0, 7.0) and one(1.0, -100.0) == one(1.0, -7.0)
    assert one(-9.0, 2.0) != one(-7.0, 2.0)
    assert abs(one(-1000.0, 2.0)) < 1e-30  # its place is taken by −80/α, see `activate`


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gate_far_below_zero_has_a_gradient(dtype):
    gates = jnp.asarray([-1e4, -1e3, -60.0, -52.2, -52.0, -30.0, -3.0, 0.0, 3.0, 7.5, 1e4], dtype)
    h = jnp.stack([gates, jnp.full_like(gates, 2.0)], 1)
    got = jax.grad(lambda h: clamped_swiglu(h, 1.702, 7.0).astype(jnp.float32).sum())(h)
    gate = np.asarray(gates, np.float64)
    z = 1.702 * np.minimum(gate, 7)
    sigma = 1 / (1 + np.exp(-np.maximum(z, -700)))
    want = np.stack(
        [3 * sigma * (1 + z * (1 - sigma)) * (gate < 7), np.minimum(gate, 7) * sigma], 1
    )
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2 * eps, atol=60 * EPS)
