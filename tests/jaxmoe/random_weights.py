# SPDX-License-Identifier: Apache-2.0
"""Weights of a model that routes and attends for real, of which no two seeds agree anywhere."""

import jax
import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.model.params import init_params, map_specs


def random_weights(cfg: ModelConfig, seed: int):
    """Every leaf random, biases too; numpy compiles nothing."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        wide = spec.init == "normal"
        fan = spec.shape[-1] if spec.axes[-1:] == ("width",) else spec.shape[-2] if wide else 1
        x = rng.normal(size=spec.shape) * (1 / np.sqrt(fan) if wide else 0.0)
        x = x + (spec.init == "ones") + 0.1 * rng.normal(size=spec.shape)
        return jax.device_put(x.astype(np.float32))

    return map_specs(leaf, cfg)


def noisy_params(cfg: ModelConfig):
    """Initial weights with noise on every leaf: zero biases and unit norms would hide mistakes."""
    params = init_params(jax.random.key(0), cfg)
    flat, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(flat))
    noise = [0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, flat, strict=True)]
    return jax.tree.unflatten(tree, [x + n for x, n in zip(flat, noise, strict=True)])
