# SPDX-License-Identifier: Apache-2.0
"""The training state: trained and frozen parameters, optimizer state, and number of updates.

Parameters that `optim.trainable` does not match are frozen: they are in the state, and nothing is
differentiated with respect to them.

Random numbers need no state: each step derives them from the run's seed and its number.
Next: jaxmoe/rl/update.py.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from jaxmoe.checkpoint.peft.init_from import load_initial_adapters
from jaxmoe.config import Config, require
from jaxmoe.model.critic import init_critic
from jaxmoe.model.lora import init_adapters
from jaxmoe.model.params import abstract_params
from jaxmoe.model.trainable import merge_params, split_params
from jaxmoe.model.weights import keeps_reference, trained_shapes
from jaxmoe.parallel.sharding import sharded_shapes, state_mesh
from jaxmoe.shapes import Leaf, Params


@struct.dataclass
class Trained:
    """Parameters with a gradient."""

    policy: Leaf  # Params, with None in place of frozen ones
    critic: Leaf = None  # Params, or None


@struct.dataclass
class Frozen:
    """Parameters that the loss reads and no update changes."""

    reference: Leaf = None  # the trained Params as they were before RL, for the KL term; or None
    base: Leaf = None  # Params of a LoRA run's base, only while a step runs, or None
    policy: Leaf = None  # Params, with None in place of trained ones; None if all are trained
    # Params of the policy with experts in four bits, only while an update runs, or None
    packed: Leaf = None
    teacher: Leaf = None  # Params of a second model, only while a step runs, or None


@struct.dataclass
class TrainState:
    params: Leaf  # Trained
    frozen: Frozen
    opt_state: Leaf
    step: Leaf  # int32 []: number of updates

    @property
    def policy(self) -> Params:
        """The complete policy (of a LoRA run the adapters): trained and frozen parameters."""
        return merge_params(self.params.policy, self.frozen.policy)

    @property
    def parts(self) -> dict[str, Leaf]:
        """The state as a checkpoint stores it; whoever only uses the policy reads that part."""
        return {
            "policy": self.policy,
            "critic": self.params.critic,
            "reference": self.frozen.reference,
            "optimizer": {"state": self.opt_state, "updates": self.step},
        }

    def replace_parts(self, parts: dict[str, Leaf]) -> "TrainState":
        """Return the state with these parts; the same parameters of the policy are trained."""

        def select(like: Leaf) -> Leaf:
            return (
                None
                if like is None
                else jax.tree.map(
                    lambda x, y: None if x is None else y,
                    like,
                    parts["policy"],
                    is_leaf=lambda x: x is None,
                )
            )

        return TrainState(
            Trained(select(self.params.policy), parts["critic"]),
            replace(self.frozen, reference=parts["reference"], policy=select(self.frozen.policy)),
            parts["optimizer"]["state"],
            parts["optimizer"]["updates"],
        )


def init_state(
    trained: Trained,
    tx: optax.GradientTransformation,
    frozen: Frozen | None = None,
    *,
    trainable: str = ".*",
) -> TrainState:
    """Return the state before the first update.

    trainable: regular expression of the paths in `trained.policy` that train; the others become
        part of the frozen parameters.

    Raises ConfigError for weights without a gradient, such as experts in four bits.
    """
    policy, frozen_policy = split_params(trained.policy, trainable)
    params: Leaf = replace(trained, policy=policy)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        require(
            jnp.issubdtype(x.dtype, jnp.floating),
            f"trained parameters must be floating point, got {x.dtype} for "
            f"{jax.tree_util.keystr(path, simple=True, separator='/')}: experts in four bits have "
            "no gradient. Try --set lora.attention_rank=16, which trains adapters instead, or "
            'load_params without experts="packed".',
        )
    return TrainState(
        params=params,
        frozen=replace(frozen or Frozen(), policy=frozen_policy),
        opt_state=tx.init(params),
        step=jnp.zeros((), jnp.int32),
    )


def init_run_adapters(cfg: Config, base: Params) -> Params:
    """Return the adapters of `lora.init_from`, or else new ones that do not change the model.

    New adapters, and parameters that are trained in full, are determined by seed and base.
    """
    adapters = init_adapters(jax.random.key(cfg.seed), cfg.model, cfg.lora, base)
    loaded = jax.tree.map(jnp.asarray, load_initial_adapters(cfg)["layers"])
    layers = {kind: layer | loaded.get(kind, {}) for kind, layer in adapters["layers"].items()}
    return adapters | {"layers": layers}


def init_warmup_state(policy: Params, cfg: Config, tx: optax.GradientTransformation) -> TrainState:
    """Return the state before the first supervised update."""
    return init_state(Trained(policy), tx, trainable=cfg.trainable)


def init_rl_state(policy: Params, cfg: Config, tx: optax.GradientTransformation) -> TrainState:
    """Return the state before the first update of RL.

    It has a new critic if the config has one, and a copy of the policy as the reference if the
    loss has a KL term. With LoRA, `policy` is the adapters; the base is the reference of new ones.
    `optim.trainable` selects parameters of the policy; a critic trains in full.
    """
    critic = None
    if cfg.critic.backbone != "none":
        critic = init_critic(
            policy, cfg.model, cfg.optim.param_dtype, own_backbone=cfg.critic.backbone == "own"
        )
    trainable, reference = cfg.trainable, None
    if keeps_reference(cfg):
        # A step donates the state as a whole, and a buffer that is in it twice cannot be donated.
        reference = jax.tree.map(jnp.copy, split_params(policy, trainable)[0])
    return init_state(Trained(policy, critic), tx, Frozen(reference), trainable=trainable)


def stage_shapes(
    cfg: Config,
    supervised: optax.GradientTransformation,
    tx: optax.GradientTransformation,
    mesh: Mesh | None = None,
) -> dict[str, TrainState]:
    """Shapes of the state in each stage of a run, with shardings on a mesh."""
    policy, trained = abstract_params(cfg.model, cfg.optim.param_dtype), trained_shapes(cfg)
    shapes = {
        "warmup": jax.eval_shape(lambda p: init_warmup_state(p, cfg, supervised), policy),
        "rl": jax.eval_shape(lambda p: init_rl_state(p, cfg, tx), trained),
    }
    mesh, moments_memory = state_mesh(mesh, cfg.optim), cfg.optim.moments
    return {
        stage: sharded_shapes(state, cfg.model, mesh, moments_memory)
        for stage, state in shapes.items()
    }
