# SPDX-License-Identifier: Apache-2.0
"""What training changes: parameters, optimizer state, and the count of steps.

Random numbers need no state: each step folds its number into the run's seed.
Next: jaxmoe/rl/step.py.
"""

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxmoe.config import Config
from jaxmoe.model.critic import new_critic
from jaxmoe.model.params import abstract_params
from jaxmoe.shapes import Leaf, Params


@struct.dataclass
class TrainState:
    params: Params  # of the policy; with a critic {"policy": …, "critic": …}
    opt_state: Leaf
    step: Leaf  # int32 []: updates made


def new_state(params: Params, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    return TrainState(params=params, opt_state=tx.init(params), step=jnp.zeros((), jnp.int32))


def policy_of(params: Params) -> Params:
    """The policy's parameters, with or without a critic beside them."""
    return params["policy"] if "policy" in params else params


def critic_of(params: Params) -> Params:
    """The critic's parameters."""
    return params["critic"]


def with_critic(policy: Params, cfg: Config) -> Params:
    """What the RL stage trains: the policy, and a new critic where the config has one."""
    if cfg.critic.backbone == "none":
        return policy
    critic = new_critic(
        policy, cfg.model, cfg.optim.param_dtype, own_backbone=cfg.critic.backbone == "own"
    )
    return {"policy": policy, "critic": critic}


def stage_shapes(
    cfg: Config, supervised: optax.GradientTransformation, tx: optax.GradientTransformation
) -> dict[str, TrainState]:
    """Shapes of the state in each stage of a run."""
    policy = abstract_params(cfg.model, cfg.optim.param_dtype)
    return {
        "warmup": jax.eval_shape(lambda p: new_state(p, supervised), policy),
        "rl": jax.eval_shape(lambda p: new_state(with_critic(p, cfg), tx), policy),
    }
