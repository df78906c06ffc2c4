# SPDX-License-Identifier: Apache-2.0
"""What a run trains, what it holds still, the optimizer's state, and the count of updates.

Random numbers need no state: each step folds its number into the run's seed.
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
    """What has a gradient."""

    policy: Leaf  # Params
    critic: Leaf = None  # Params, or None


@struct.dataclass
class Frozen:
    """What a loss reads and nothing changes."""

    reference: Leaf = None  # Params of the KL term, or None
    base: Leaf = None  # Params beside which adapters are trained, while a step runs, or None


@struct.dataclass
class TrainState:
    params: Leaf  # Trained
    frozen: Frozen
    opt_state: Leaf
    step: Leaf  # int32 []: updates made


def init_state(
    trained: Trained, tx: optax.GradientTransformation, frozen: Frozen | None = None
) -> TrainState:
    """The state before the first update.

    Raises ConfigError for weights that have no gradient: experts in four bits.
    """
    params: Leaf = trained
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        require(
            jnp.issubdtype(x.dtype, jnp.floating),
            f"what is trained must be floating point, got {x.dtype} of "
            f"{jax.tree_util.keystr(path, simple=True, separator='/')}: experts in four bits stay "
            "as they are. Try --set lora.attention_rank=16, which trains adapters beside them, or "
            'load_params without experts="packed".',
        )
    return TrainState(
        params=params, frozen=frozen or Frozen(), opt_state=tx.init(params),
        step=jnp.zeros((), jnp.int32),
    )  # fmt: skip


def init_run_adapters(cfg: Config, base: Params) -> Params:
    """Those that change nothing yet, of the run's seed."""
    return init_adapters(jax.random.key(cfg.seed), cfg.model, cfg.lora, base)


def init_rl_state(policy: Params, cfg: Config, tx: optax.GradientTransformation) -> TrainState:
    """The state before RL's first update.

    A new critic where the config has one; the policy's copy as reference where it has a KL term.
    With LoRA the policy is its adapters, and the base is the reference.
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
    """Shapes of the state in each stage of a run, and on a mesh where they lie."""
    policy = trained = abstract_params(cfg.model, cfg.optim.param_dtype)
    if cfg.lora.ranks:
        trained = adapter_shapes(cfg.model, cfg.lora)
    shapes = {
        "warmup": jax.eval_shape(lambda p: init_state(Trained(p), supervised), policy),
        "rl": jax.eval_shape(lambda p: init_rl_state(p, cfg, tx), trained),
    }
    mesh, at = state_mesh(mesh, cfg.optim), cfg.optim.moments
    return {stage: sharded_shapes(state, cfg.model, mesh, at) for stage, state in shapes.items()}
