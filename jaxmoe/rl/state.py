# SPDX-License-Identifier: Apache-2.0
"""The training state: trained and frozen parameters, optimizer state, and number of updates.

Random numbers need no state: each step derives them from the run's seed and its number.
Next: jaxmoe/rl/step.py.
"""

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from jaxmoe.config import Config, require
from jaxmoe.model.critic import init_critic
from jaxmoe.model.lora import adapter_shapes, init_adapters
from jaxmoe.model.params import abstract_params
from jaxmoe.parallel.sharding import sharded_shapes, state_mesh
from jaxmoe.shapes import Leaf, Params


@struct.dataclass
class Trained:
    """Parameters with a gradient."""

    policy: Leaf  # Params
    critic: Leaf = None  # Params, or None


@struct.dataclass
class Frozen:
    """Parameters that the loss reads and no update changes."""

    reference: Leaf = None  # Params of the KL term, or None
    base: Leaf = None  # Params of a LoRA run's base, only while a step runs, or None


@struct.dataclass
class TrainState:
    params: Leaf  # Trained
    frozen: Frozen
    opt_state: Leaf
    step: Leaf  # int32 []: number of updates


def init_state(
    trained: Trained, tx: optax.GradientTransformation, frozen: Frozen | None = None
) -> TrainState:
    """Return the state before the first update.

    Raises ConfigError for weights without a gradient, such as experts in four bits.
    """
    params: Leaf = trained
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        require(
            jnp.issubdtype(x.dtype, jnp.floating),
            f"trained parameters must be floating point, got {x.dtype} for "
            f"{jax.tree_util.keystr(path, simple=True, separator='/')}: experts in four bits have "
            "no gradient. Try --set lora.attention_rank=16, which trains adapters instead, or "
            'load_params without experts="packed".',
        )
    return TrainState(
        params=params, frozen=frozen or Frozen(), opt_state=tx.init(params),
        step=jnp.zeros((), jnp.int32),
    )  # fmt: skip


def init_run_adapters(cfg: Config, base: Params) -> Params:
    """Return initial adapters from the run's seed; they do not change the model yet."""
    return init_adapters(jax.random.key(cfg.seed), cfg.model, cfg.lora, base)


def init_rl_state(policy: Params, cfg: Config, tx: optax.GradientTransformation) -> TrainState:
    """Return the state before the first update of RL.

    It has a new critic if the config has one, and a copy of the policy as the reference if the
    loss has a KL term. With LoRA, `policy` is the adapters and the base is the reference.
    """
    critic = None
    if cfg.critic.backbone != "none":
        critic = init_critic(
            policy, cfg.model, cfg.optim.param_dtype, own_backbone=cfg.critic.backbone == "own"
        )
    reference = (
        jax.tree.map(jnp.copy, policy) if cfg.loss.kl_coef > 0 and not cfg.lora.ranks else None
    )
    return init_state(Trained(policy, critic), tx, Frozen(reference))


def stage_shapes(
    cfg: Config,
    supervised: optax.GradientTransformation,
    tx: optax.GradientTransformation,
    mesh: Mesh | None = None,
) -> dict[str, TrainState]:
    """Shapes of the state in each stage of a run, with shardings on a mesh."""
    policy = trained = abstract_params(cfg.model, cfg.optim.param_dtype)
    if cfg.lora.ranks:
        trained = adapter_shapes(cfg.model, cfg.lora)
    shapes = {
        "warmup": jax.eval_shape(lambda p: init_state(Trained(p), supervised), policy),
        "rl": jax.eval_shape(lambda p: init_rl_state(p, cfg, tx), trained),
    }
    mesh, moments_memory = state_mesh(mesh, cfg.optim), cfg.optim.moments
    return {
        stage: sharded_shapes(state, cfg.model, mesh, moments_memory)
        for stage, state in shapes.items()
    }
