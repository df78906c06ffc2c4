# SPDX-License-Identifier: Apache-2.0
"""What training changes: parameters, optimizer state, and the count of steps.

Random numbers need no state: each step folds its number into the run's seed.
Next: jaxmoe/rl/step.py.
"""

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import PRNGKeyArray

from jaxmoe.config import ModelConfig
from jaxmoe.model.params import abstract_params, init_params
from jaxmoe.shapes import Leaf, Params


@struct.dataclass
class TrainState:
    params: Params
    opt_state: Leaf
    step: Leaf  # int32 []: updates made


def new_state(params: Params, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    return TrainState(params=params, opt_state=tx.init(params), step=jnp.zeros((), jnp.int32))


def random_state(
    key: PRNGKeyArray, cfg: ModelConfig, tx: optax.GradientTransformation, dtype: str
) -> TrainState:
    """`new_state` of random weights."""
    return new_state(init_params(key, cfg, dtype), tx)


def abstract_state(cfg: ModelConfig, tx: optax.GradientTransformation, dtype: str) -> TrainState:
    """Shapes of the state; costs no memory at any size."""
    return jax.eval_shape(lambda p: new_state(p, tx), abstract_params(cfg, dtype))
