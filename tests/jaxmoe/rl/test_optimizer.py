# SPDX-License-Identifier: Apache-2.0
"""AdamW by hand: the first update is the learning rate, clipping does not change its sign."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe.config import OptimConfig
from jaxmoe.rl.optimizer import make_optimizer


def updates(cfg, steps, gradient=3.0, count=1, **options):
    tx = make_optimizer(cfg, steps=steps, **options)
    params = {"w": jnp.ones(2, jnp.float32)}
    state, found = tx.init(params), []
    for _ in range(count):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            out, state = tx.update({"w": jnp.full(2, gradient, jnp.float32)}, state, params)
        found.append(float(out["w"][0]))
        params = optax.apply_updates(params, out)
    return np.array(found)


def test_constant_gradient_moves_by_the_learning_rate():
    # bias-corrected m / sqrt(v) of a constant is its sign
    found = updates(OptimConfig(lr=0.01), steps=4, count=4)
    np.testing.assert_allclose(found, -0.01, rtol=1e-5)


def test_warm_up_rises_linearly_and_the_cosine_ends_at_its_fraction():
    cfg = OptimConfig(lr=0.01, lr_warmup_steps=2, lr_end_fraction=0.1)
    found = updates(cfg, steps=6, count=7)
    cosine = [0.1 + 0.9 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(5)]
    np.testing.assert_allclose(found, -0.01 * np.array([0.5, 0.75, *cosine]), rtol=1e-5)


def test_lr_argument_replaces_the_config():
    np.testing.assert_allclose(updates(OptimConfig(lr=0.01), 3, lr=0.5), [-0.5], rtol=1e-5)


def test_gradients_are_clipped_by_their_global_norm():
    cfg = OptimConfig(lr=0.01, clip_norm=1e-3, eps=1.0)  # eps 1: the update is m / (1 + sqrt v)
    clipped = 1e-3 / np.sqrt(2)
    np.testing.assert_allclose(updates(cfg, 3), [-0.01 * clipped / (1 + clipped)], rtol=1e-5)
