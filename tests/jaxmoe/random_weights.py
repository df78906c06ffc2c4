# SPDX-License-Identifier: Apache-2.0
"""Weights of a model that routes and attends for real, of which no two seeds agree anywhere."""

import jax.numpy as jnp
import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.model.params import map_specs


def random_weights(cfg: ModelConfig, seed: int):
    """Every leaf random, biases too; numpy compiles nothing."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        wide = spec.init == "normal"
        fan = spec.shape[-1] if spec.axes[-1:] == ("width",) else spec.shape[-2] if wide else 1
        x = rng.normal(size=spec.shape) * (1 / np.sqrt(fan) if wide else 0.0)
        x = x + (spec.init == "ones") + 0.1 * rng.normal(size=spec.shape)
        return jnp.asarray(x, jnp.float32)

    return map_specs(leaf, cfg)
