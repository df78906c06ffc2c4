# SPDX-License-Identifier: Apache-2.0
"""Optimizers in optax. Next: jaxmoe/rl/streamed.py; jaxmoe/rl/step.py applies them."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey

from jaxmoe.config import Config, OptimConfig, require
from jaxmoe.config.function_specs import parse_function
from jaxmoe.rl.muon import make_muon
from jaxmoe.rl.state import Trained
from jaxmoe.rl.streamed import stream_state
from jaxmoe.shapes import Leaf


def make_optimizer(
    cfg: OptimConfig, *, steps: int, lr: float | None = None, router_lr_scale: float = 1.0
) -> optax.GradientTransformation:
    """Clip by global norm, then the optimizer `cfg.name`.

    Its learning rate follows `learning_rate_schedule` over `steps` updates. Only matrices have
    weight decay (`weight_decay_mask`). The updates of routers are multiplied by `router_lr_scale`.
    Raises: ConfigError if `cfg.name` names no optimizer.
    """
    tx = make_named_optimizer(cfg, learning_rate_schedule(cfg, steps=steps, lr=lr))
    # Clipping needs the norm of all gradients, so it stays outside of `stream_state`, which updates
    # one layer of each stack at a time. identity() has the same empty state, so that
    # optim.clip_norm does not change the structure of a checkpoint.
    clip = optax.identity() if cfg.clip_norm is None else optax.clip_by_global_norm(cfg.clip_norm)
    if router_lr_scale != 1.0:
        tx = _scale_updates_of_routers(tx, router_lr_scale)
    return optax.chain(clip, stream_state(tx))


def make_named_optimizer(
    cfg: OptimConfig, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Return the transformation that `cfg.name` names, with this learning rate.

    AdamW and Muon have the config's betas, eps and weight decay; a function of the user's has the
    options that are written with it. Raises: ConfigError if it is no optimizer.
    """
    mask = weight_decay_mask if cfg.weight_decay else None

    def adamw(learning_rate: optax.Schedule) -> optax.GradientTransformation:
        return optax.adamw(
            learning_rate,
            b1=cfg.beta1,
            b2=cfg.beta2,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            mask=mask,
        )

    def muon(
        learning_rate: optax.Schedule, *, momentum: float = 0.95
    ) -> optax.GradientTransformation:
        return make_muon(
            learning_rate,
            adamw(learning_rate),
            momentum=momentum,
            weight_decay=cfg.weight_decay,
            mask=mask,
        )

    builtins = {"adamw": adamw, "muon": muon}
    function = parse_function(cfg.name, "optim.name", ("learning_rate",), builtins)
    require(
        cfg.weight_decay == 0 or ":" not in cfg.name.partition("(")[0],
        f"optim.weight_decay ({cfg.weight_decay:g}) is that of adamw and muon, and optim.name is "
        f"{cfg.name}. Try --set optim.weight_decay=0.0, and write its own decay in optim.name.",
    )
    require(
        cfg.moments == "device" or ":" not in cfg.name.partition("(")[0],
        "optim.moments=host updates one layer of each stack at a time, which adamw and muon allow, "
        f"and optim.name is {cfg.name}. Try --set optim.moments=device.",
    )
    tx = function(schedule)
    require(
        isinstance(tx, optax.GradientTransformation),
        f"optim.name ({cfg.name}) must return an optax.GradientTransformation, got "
        f"{type(tx).__name__}. Try --set optim.name=adamw.",
    )
    return tx


def _scale_updates_of_routers(
    tx: optax.GradientTransformation, scale: float
) -> optax.GradientTransformation:
    """Return `tx` with the updates of router weights and biases, and their adapters, scaled."""

    def update(updates: Leaf, state: Leaf, params: Leaf = None) -> tuple[Leaf, Leaf]:
        updates, state = tx.update(updates, state, params)

        def scale_if_router(path: Any, x: Any) -> Any:
            return x * jnp.asarray(scale, x.dtype) if is_router_path(path) else x

        return jax.tree_util.tree_map_with_path(scale_if_router, updates), state

    return optax.GradientTransformation(tx.init, update)


def is_router_path(path: Any) -> bool:
    """True for the tree path of a router's weights or bias, or of an adapter of them."""
    names = [key.key for key in path if isinstance(key, DictKey)]
    return any(name in ("w_router", "b_router") for name in names)


def learning_rate_schedule(
    cfg: OptimConfig, *, steps: int, lr: float | None = None
) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then cosine decay up to update number `steps`.

    `optim.lr_warmup_steps` counts updates too, of which a step of RL has `loss.updates`.
    """
    peak = cfg.lr if lr is None else lr
    # optax refuses a decay over 0 steps, which a run of warm-up alone would ask for.
    decay = max(steps - cfg.lr_warmup_steps, 1)
    return optax.join_schedules(
        [
            # The first update has one share of the peak and not 0, because an update with rate 0
            # would be lost.
            optax.linear_schedule(peak / max(cfg.lr_warmup_steps, 1), peak, cfg.lr_warmup_steps),
            optax.cosine_decay_schedule(peak, decay, alpha=cfg.lr_end_fraction),
        ],
        [cfg.lr_warmup_steps],
    )


def count_policy_updates(cfg: Config) -> int:
    """Number of policy updates in a run; steps that pretrain the critic have none."""
    pretrain = cfg.critic.pretrain_steps if cfg.critic.backbone != "none" else 0
    return (cfg.steps - pretrain) * cfg.loss.updates


def policy_learning_rate(cfg: Config, n_updates: int) -> float:
    """Learning rate of the policy's next update, after `n_updates` updates (`TrainState.step`).

    Those that pretrain the critic are among them; those that the gate left out are not.
    """
    n_policy = count_policy_updates(cfg)
    update = max(n_updates - (cfg.steps * cfg.loss.updates - n_policy), 0)
    return float(jnp.asarray(learning_rate_schedule(cfg.optim, steps=n_policy)(update)))


def weight_decay_mask(params: Leaf) -> Leaf:
    """Return True for parameters with weight decay: embedding, head, matrices, adapters.

    Norm scales, biases and attention sinks have none, as is usual since GPT-2's code. The router
    has none either (our choice): smaller logits would make the routing more uniform.
    """

    def decay(path: Any, _: Any) -> bool:
        names = [key.key for key in path if isinstance(key, DictKey)]
        return not any(
            name.endswith("norm") or name.startswith("b_") or name in ("sinks", "w_router")
            for name in names
        )

    return jax.tree_util.tree_map_with_path(decay, params)


def rl_optimizer(cfg: Config) -> optax.GradientTransformation:
    """Optimizer of RL; with a critic, one for the policy and one for the critic.

    Each has its own clipping and learning rate. While only the critic is pretrained, the policy
    and its moments do not change.
    """
    updates = cfg.loss.updates
    policy = make_optimizer(
        cfg.optim, steps=count_policy_updates(cfg), router_lr_scale=cfg.router.lr_scale
    )
    if cfg.critic.backbone == "none":
        return policy
    pretrain = cfg.critic.pretrain_steps * updates
    if pretrain:
        # While the policy waits its optimizer is not called, so its warm-up and decay begin with
        # its own first update.
        policy = optax.transforms.conditionally_mask(
            policy, lambda step, **_: jnp.asarray(step) >= pretrain
        )
    # The critic is also trained while the policy waits, so its schedule covers all steps.
    critic = make_optimizer(cfg.optim, steps=cfg.steps * updates, lr=cfg.critic.lr)
    sides: dict[Hashable, optax.GradientTransformation] = {"policy": policy, "critic": critic}
    return optax.partition(sides, Trained("policy", "critic"))
