# SPDX-License-Identifier: Apache-2.0
"""An RL algorithm: pure functions with their options bound, and the log-probs that they compare.

GSPO, for example, is

    Algorithm(objective=partial(gspo, clip_high=4e-4), aggregation=seq_mean_token_mean)

jaxmoe/rl/from_config.py makes one from a config, and jaxmoe/rl/validate.py refuses those that
cannot work. Next: jaxmoe/rl/update.py applies it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.losses import (
    group_advantages,
    kl_k3,
    ppo_clip,
    token_mean,
    token_rewards,
)
from jaxmoe.losses.ratios import log_ratios, sequence_sum
from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.model.check_ops import function_name
from jaxmoe.rl.batch import Batch, Scored
from jaxmoe.rl.function_specs import array_parameters, select_arrays

Function = Callable[..., Any]

# The arrays that a function of each kind may take, by name.
ARRAYS = {
    "objective": (
        "logp_BT", "old_logp_BT", "rollout_logp_BT", "entropy_BT", "advantages_BT", "mask_BT",
    ),
    "advantages": ("rewards_PR", "rewards_BT", "values_BT", "bootstrap_B", "mask_BT"),
    "aggregation": ("mask_BT", "keep_BT"),
    "rollout_correction": (
        "log_ratio_BT", "old_logp_BT", "rollout_logp_BT", "advantages_BT", "mask_BT",
        "weights_BT", "ratio_BT", "batch_mask_BT",
    ),
    "kl": ("logp_BT", "logq_BT", "old_logp_BT"),
}  # fmt: skip
# The functions of jaxmoe.losses of each kind, which error messages suggest.
CHOICES = {
    "objective": ("ppo_clip", "gspo", "cispo", "sapo", "dppo_tv", "reinforce"),
    "advantages": (
        "group_advantages", "rloo_advantages", "reinforce_pp_advantages",
        "reinforce_pp_baseline_advantages", "discounted_returns", "gae", "bootstrapped_gae",
        "whitened_gae", "whitened_bootstrapped_gae",
    ),
    "aggregation": (
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "kept_token_mean",
    ),
    "rollout_correction": (
        "token_is", "sequence_is", "geometric_is", "token_icepop", "sequence_icepop", "normalize",
        "rejection", "veto", "drift_mask",
    ),
    "kl": ("kl_k1", "kl_k2", "kl_k3", "kl_k3_importance", "kl_k3_with_k2_gradient"),
}  # fmt: skip


@dataclass(frozen=True)
class Algorithm:
    """The loss of a step. The defaults are on-policy GRPO with the mean over tokens."""

    objective: Function = ppo_clip
    advantages: Function = group_advantages
    aggregation: Function = token_mean
    rollout_correction: tuple[Function, ...] = ()
    old_logp: str = "detached"  # or "recomputed", "rollout"
    epochs: int = 1
    minibatches: int = 1
    kl: Function = kl_k3
    kl_coef: float = 0.0
    kl_in: str = "loss"
    entropy_coef: float = 0.0
    critic: str = "none"
    value_coef: float = 0.5
    value_clip: float = 0.5

    @property
    def updates(self) -> int:
        """Number of optimizer updates in a step."""
        return self.epochs * self.minibatches

    @property
    def needs_scoring(self) -> bool:
        """True if the step computes old log-probs of the batch before its first gradient."""
        return self.old_logp == "recomputed" or (self.kl_coef > 0 and self.kl_in == "reward")


def compute_advantages(
    a: Algorithm,
    rewards_B: Array,
    mask_BT: Array,
    kl_BT: Array | None,
    values_BT: Array | None,
    bootstrap_B: Array | None = None,
    *,
    samples: int,
) -> tuple[Array, Array | None]:
    """Return (advantages, returns or None) at every token; 0 at masked tokens.

    The `samples` rows of a prompt are neighbours. A row whose mask is all False still counts as a
    member of its group.
    """
    totals_B = rewards_B.astype(jnp.float32)
    if kl_BT is not None:
        totals_B = totals_B - a.kl_coef * sequence_sum(kl_BT, mask_BT)[:, 0]
    rewards_BT = token_rewards(rewards_B, mask_BT, kl_BT, kl_coef=a.kl_coef)
    result = a.advantages(**select_arrays(
        a.advantages,
        {
            "rewards_PR": totals_B.reshape(-1, samples),
            "rewards_BT": rewards_BT, "values_BT": values_BT, "bootstrap_B": bootstrap_B,
            "mask_BT": mask_BT,
        },
    ))  # fmt: skip
    advantages, returns = result if isinstance(result, tuple) else (result, None)
    group_shape = (len(rewards_B) // samples, samples)
    shape = jnp.shape(advantages)
    returns_shape = mask_BT.shape if returns is None else jnp.shape(returns)
    if shape not in (group_shape, mask_BT.shape) or returns_shape != mask_BT.shape:
        raise ValueError(
            f"{function_name(a.advantages)} must return advantages [P, R] = {group_shape} or "
            f"[B, T] = {mask_BT.shape}, and returns [B, T] if any; got {shape}"
            + ("" if returns is None else f" and {returns_shape}")
        )
    if shape != mask_BT.shape:
        advantages = jnp.broadcast_to(advantages.reshape(-1, 1), mask_BT.shape)
    return jnp.where(mask_BT, advantages, 0.0), returns


def select_old_logp(a: Algorithm, batch: Batch, scored: Scored, detached_logp_BT: Array) -> Array:
    """The log-probs that the ratio compares with; `detached_logp_BT` are the current ones."""
    return {
        "detached": detached_logp_BT, "recomputed": scored.old_logp_BT,
        "rollout": batch.rollout_logp_BT,
    }[a.old_logp]  # fmt: skip


def objective_arrays(
    batch: Batch, scored: Scored, logp_BT: Array, old_logp_BT: Array, entropy_BT: Array
) -> dict[str, Any]:
    """The arrays that an objective may take."""
    return {
        "logp_BT": logp_BT, "old_logp_BT": old_logp_BT, "entropy_BT": entropy_BT,
        "rollout_logp_BT": batch.rollout_logp_BT, "advantages_BT": scored.advantages_BT,
        "mask_BT": batch.loss_mask_BT,
    }  # fmt: skip


def compute_correction(
    a: Algorithm,
    old_logp_BT: Array,
    rollout_logp_BT: Array,
    advantages_BT: Array,
    mask_BT: Array,
    batch_mask_BT: Array | None,
) -> Correction:
    """Apply an algorithm's rollout corrections in order.

    The result has the last weights, and keeps a token that every rejection keeps.
    """
    arrays: dict[str, Any] = {
        "log_ratio_BT": log_ratios(old_logp_BT, rollout_logp_BT, mask_BT),
        "old_logp_BT": old_logp_BT, "rollout_logp_BT": rollout_logp_BT,
        "advantages_BT": advantages_BT, "mask_BT": mask_BT,
    }  # fmt: skip
    if batch_mask_BT is not None:
        arrays["batch_mask_BT"] = batch_mask_BT
    total = Correction()
    for function in a.rollout_correction:
        step = function(**select_arrays(function, arrays))
        updates = {name: x for name, x in step._asdict().items() if x is not None}
        if total.keep_BT is not None and step.keep_BT is not None:
            updates["keep_BT"] = step.keep_BT & total.keep_BT
        if "weights_BT" in updates and "weights_BT" not in array_parameters(function):
            updates["bounded_BT"] = step.weights_BT
        total = total._replace(**updates)
        arrays |= {name: updates[name] for name in ("weights_BT", "ratio_BT") if name in updates}
    return total
