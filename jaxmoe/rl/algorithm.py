# SPDX-License-Identifier: Apache-2.0
"""An RL algorithm: pure functions with their options bound, and which log-probs they compare.

    Algorithm(objective=partial(gspo_terms, clip_high=4e-4), mean=sequence_mean_weights)

is GSPO. `algorithm(cfg)` reads one from a config; everything it can refuse it refuses there.
Next: jaxmoe/rl/update.py applies it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.config import Config, ConfigError, LossConfig, require
from jaxmoe.losses import (
    clipped_terms,
    group_advantages,
    kl_k3,
    sequence_rewards,
    token_mean_weights,
    token_rewards,
)
from jaxmoe.losses.correction import log_ratios
from jaxmoe.losses.recipes import Correction
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.named import ask, asked, read, read_several
from jaxmoe.rl.presets import preset

Function = Callable[..., Any]

# what a function of each kind may ask for, by name
ARRAYS = {
    "objective": (
        "logp_BT", "old_logp_BT", "rollout_logp_BT", "entropy_BT", "advantages_BT", "mask_BT",
    ),
    "advantages": ("rewards_PR", "rewards_BT", "values_BT", "mask_BT"),
    "mean": ("mask_BT", "keep_BT"),
    "correction": (
        "log_ratio_BT", "old_logp_BT", "rollout_logp_BT", "advantages_BT", "mask_BT",
        "weights_BT", "ratio_BT", "batch_mask_BT",
    ),
    "kl": ("logp_BT", "logq_BT"),
}  # fmt: skip


@dataclass(frozen=True)
class Algorithm:
    """What a step optimises. The defaults are GRPO with the mean over tokens, on-policy."""

    objective: Function = clipped_terms
    advantages: Function = group_advantages
    mean: Function = token_mean_weights
    correction: tuple[Function, ...] = ()
    old_logp: str = "detached"  # or "recomputed", "rollout"
    epochs: int = 1
    minibatches: int = 1
    samples_per_prompt: int = 1
    kl: Function = kl_k3
    kl_coef: float = 0.0
    kl_in: str = "loss"
    entropy_coef: float = 0.0
    critic: str = "none"
    value_coef: float = 0.5
    value_clip: float = 0.5

    @property
    def updates(self) -> int:
        """Optimizer updates a step."""
        return self.epochs * self.minibatches

    @property
    def recomputes(self) -> bool:
        """Whether the step scores the batch before its first gradient."""
        return self.old_logp == "recomputed" or (self.kl_coef > 0 and self.kl_in == "reward")


def algorithm(cfg: Config) -> Algorithm:
    """The algorithm of a config, tried on arrays of the run's shapes.

    Raises ConfigError for what could not run: unknown names and options, arrays that are not
    there, groups too small, two corrections of the same thing.
    """
    loss = with_preset(cfg.loss)
    functions = {
        name: read(getattr(loss, name), f"loss.{name}", ARRAYS[name])
        for name in ("objective", "advantages", "mean", "kl")
    }
    made = Algorithm(
        **functions,
        correction=read_several(loss.correction, "loss.correction", ARRAYS["correction"]),
        old_logp=loss.old_logp, epochs=loss.epochs, minibatches=loss.minibatches,
        samples_per_prompt=cfg.rollout.samples_per_prompt,
        kl_coef=loss.kl_coef, kl_in=loss.kl_in, entropy_coef=loss.entropy_coef,
        critic=cfg.critic.backbone, value_coef=cfg.critic.loss_coef, value_clip=cfg.critic.clip,
    )  # fmt: skip
    check(made)
    check_stale(made, cfg.rollout.max_staleness)
    return made


def with_preset(loss: LossConfig) -> LossConfig:
    """The settings with those of `loss.preset` filled in; they may not be given twice."""
    if not loss.preset:
        return loss
    fields = preset(loss.preset)
    plain = LossConfig()
    if fields["old_logp"] == "trainer" and loss.old_logp != "rollout":
        # with one update a batch, detaching gives the same number for a forward less
        fields["old_logp"] = "recomputed" if loss.updates > 1 else loss.old_logp
        loss = replace(loss, old_logp=plain.old_logp)
    for name, value in fields.items():
        given = getattr(loss, name)
        require(
            given in (getattr(plain, name), value),
            f"loss.preset={loss.preset} sets loss.{name}={value!r}, and the config {given!r}. "
            f"Try --set loss.{name}={getattr(plain, name)}, or --set loss.preset=''.",
        )
    return replace(loss, preset="", **fields)


def check(a: Algorithm) -> None:
    """Run every function on abstract arrays. Raises ConfigError with what it said."""
    p, r, t = 2, a.samples_per_prompt, 3
    needs_values = "values_BT" in asked(a.advantages)
    require(
        not needs_values or a.critic != "none",
        f"loss.advantages: {_name(a.advantages)} asks for values_BT, and there is no critic. "
        "Try --set critic.backbone=own.",
    )
    require(
        needs_values or a.critic == "none",
        f"critic.backbone={a.critic} needs advantages that ask for values; {_name(a.advantages)} "
        "does not. Try --set loss.advantages=gae, or --set critic.backbone=none.",
    )
    require(
        a.updates == 1 or a.old_logp != "detached" or "old_logp_BT" not in asked(a.objective),
        f"loss.old_logp=detached needs one update a batch, got {a.epochs} epochs of "
        f"{a.minibatches} minibatches: after the first update the batch is off-policy and its "
        "ratio is not 1. Try --set loss.old_logp=recomputed.",
    )
    require(
        r > 1 or "rewards_PR" not in asked(a.advantages),
        f"loss.advantages: {_name(a.advantages)} compares the samples of a prompt, and "
        f"rollout.samples_per_prompt is {r}. Try --set rollout.samples_per_prompt=8.",
    )

    def tried() -> Correction:
        x_BT, mask_BT = jnp.zeros((p * r, t)), jnp.ones((p * r, t), bool)
        advantages_BT, _ = advantages_of(a, jnp.zeros(p * r), mask_BT, None, x_BT)
        arrays = dict.fromkeys(ARRAYS["objective"], x_BT) | {"mask_BT": mask_BT}
        terms = ask(a.objective, arrays | {"advantages_BT": advantages_BT})
        ask(a.kl, {"logp_BT": x_BT, "logq_BT": x_BT})
        _must_be_tokens(terms, mask_BT, a.objective)
        known_early = a.old_logp == "recomputed"
        found = corrected(a, x_BT, x_BT, advantages_BT, mask_BT, mask_BT if known_early else None)
        keep = {"keep_BT": mask_BT} if known_early else {}
        _must_be_tokens(ask(a.mean, {"mask_BT": mask_BT} | keep), mask_BT, a.mean)
        return found

    try:
        found = jax.eval_shape(tried)
    except KeyError as error:
        raise ConfigError(
            f"loss: a function asks for {error.args[0]}, which is known only before the gradient "
            "of a batch that was scored first. Try --set loss.old_logp=recomputed."
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"loss: {' '.join(str(error).split())}") from error  # one line
    require(
        not (a.old_logp == "rollout" and found.weights_BT is not None),
        "loss.old_logp=rollout and importance weights in loss.correction correct the same "
        "mismatch, which squares it. Try --set loss.old_logp=recomputed, or a rejection alone.",
    )


def check_stale(a: Algorithm, most: int) -> None:
    """Raises ConfigError where tokens may be `most` versions old and the loss would not see it.

    A token was drawn by μ, and rollout_logp is log μ of that token: of the version that drew it,
    also where several drew its rollout. π is the policy, π_old the trainer before the step's
    updates. What is right for μ ≠ π_old:

    - old_logp="detached" and weights: ρ = π/μ, so E_μ[min(ρ, high)·A·∇log π], the policy gradient
      wherever ρ < high. There is no clip: π may leave μ as far as `high` lets it.
    - old_logp="recomputed" and weights: ρ = π_old/μ is for the age, the clipped ratio π/π_old for
      the updates. Source: decoupled PPO, arXiv:2110.00641; AReaL, arXiv:2505.24298.
    - old_logp="rollout": the ratio is π/μ, and its clip bounds age and updates together.

    A rejection keeps tokens near π, which bounds the bias and leaves it. Without any of these the
    gradient is E_μ[A·∇log π], as if π had drawn the tokens: the ratio is 1 and hides their age.
    """
    names = asked(a.objective)
    sees = "rollout_logp_BT" in names or (a.old_logp == "rollout" and "old_logp_BT" in names)
    require(
        most == 0 or sees or bool(a.correction),
        f"rollout.max_staleness={most} trains on tokens that older weights drew, and nothing in "
        f"the loss sees it: {_name(a.objective)}, loss.old_logp={a.old_logp}, no loss.correction. "
        'Try --set "loss.correction=token_is(high=2.0)".',
    )


def advantages_of(
    a: Algorithm,
    rewards_B: Array,
    mask_BT: Array,
    kl_BT: Array | None,
    values_BT: Array | None,
) -> tuple[Array, Array | None]:
    """(advantages, returns or None) at every token; 0 at false ones. Rows of a group adjoin."""
    rewards_BT = token_rewards(rewards_B, mask_BT, kl_BT, kl_coef=a.kl_coef)
    found = ask(
        a.advantages,
        {
            "rewards_PR": sequence_rewards(rewards_BT, mask_BT).reshape(-1, a.samples_per_prompt),
            "rewards_BT": rewards_BT, "values_BT": values_BT, "mask_BT": mask_BT,
        },
    )  # fmt: skip
    advantages, returns = found if isinstance(found, tuple) else (found, None)
    if advantages.shape != mask_BT.shape:
        advantages = jnp.broadcast_to(advantages.reshape(-1, 1), mask_BT.shape)
    return jnp.where(mask_BT, advantages, 0.0), returns


def old_logp_of(a: Algorithm, batch: Batch, now_BT: Array) -> Array:
    """What the ratio compares with; `now_BT` are the current log-probs, detached."""
    return {
        "detached": now_BT, "recomputed": batch.old_logp_BT, "rollout": batch.rollout_logp_BT
    }[a.old_logp]  # fmt: skip


def terms_of(
    a: Algorithm, batch: Batch, logp_BT: Array, old_logp_BT: Array, entropy_BT: Array
) -> Array:
    """The objective at every token."""
    return ask(
        a.objective,
        {
            "logp_BT": logp_BT, "old_logp_BT": old_logp_BT, "entropy_BT": entropy_BT,
            "rollout_logp_BT": batch.rollout_logp_BT, "advantages_BT": batch.advantages_BT,
            "mask_BT": batch.loss_mask_BT,
        },
    )  # fmt: skip


def corrected(
    a: Algorithm,
    old_logp_BT: Array,
    rollout_logp_BT: Array,
    advantages_BT: Array,
    mask_BT: Array,
    batch_mask_BT: Array | None,
) -> Correction:
    """All of an algorithm's corrections in their order: the last weights, every rejection."""
    arrays: dict[str, Any] = {
        "log_ratio_BT": log_ratios(old_logp_BT, rollout_logp_BT, mask_BT),
        "old_logp_BT": old_logp_BT, "rollout_logp_BT": rollout_logp_BT,
        "advantages_BT": advantages_BT, "mask_BT": mask_BT,
    }  # fmt: skip
    if batch_mask_BT is not None:
        arrays["batch_mask_BT"] = batch_mask_BT

    def then(so_far: Correction, function: Function) -> Correction:
        have: Mapping[str, Any] = arrays
        if so_far.weights_BT is not None:
            have = arrays | {"weights_BT": so_far.weights_BT, "ratio_BT": so_far.ratio_BT}
        require(
            "weights_BT" in have or "weights_BT" not in asked(function),
            f"loss.correction: {_name(function)} asks for weights_BT, and nothing before it makes "
            f'any. Try --set "loss.correction=token_is(high=2.0) + {_name(function)}".',
        )
        new: Correction = ask(function, have)
        require(
            isinstance(new, Correction),
            f"loss.correction: {_name(function)} must return a Correction, as token_is does.",
        )
        if new.weights_BT is not None and so_far.weights_BT is not None:
            require(
                "weights_BT" in asked(function),
                f"loss.correction: {_name(function)} would weight tokens that are weighted "
                "already, which squares the correction. Leave one out.",
            )
        keep_BT = so_far.keep_BT if new.keep_BT is None else new.keep_BT & _all(so_far.keep_BT)
        return Correction(
            so_far.weights_BT if new.weights_BT is None else new.weights_BT,
            keep_BT,
            so_far.ratio_BT if new.ratio_BT is None else new.ratio_BT,
        )

    return reduce(then, a.correction, Correction())


def _must_be_tokens(x: Any, mask_BT: Array, function: Function) -> None:
    if getattr(x, "shape", None) != mask_BT.shape:
        raise ValueError(f"{_name(function)} must return [B, T]")


def _all(keep_BT: Array | None) -> Any:
    return True if keep_BT is None else keep_BT


def _name(function: Function) -> str:
    return getattr(getattr(function, "func", function), "__name__", str(function))
