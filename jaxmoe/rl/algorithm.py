# SPDX-License-Identifier: Apache-2.0
"""An RL algorithm: pure functions with their options bound, and which log-probs they compare.

    Algorithm(objective=partial(gspo_terms, clip_high=4e-4), aggregation=seq_mean_token_mean)

is GSPO. A config's is read by jaxmoe/rl/from_config.py; what cannot work is refused by
jaxmoe/rl/validate.py. Next: jaxmoe/rl/update.py applies it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.losses import (
    clipped_terms,
    group_advantages,
    kl_k3,
    token_mean,
    token_rewards,
)
from jaxmoe.losses.ratios import log_ratios, sequence_sum
from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.model.check_ops import name_of
from jaxmoe.rl.batch import Batch, Scored
from jaxmoe.rl.function_specs import arguments, asked

Function = Callable[..., Any]

# what a function of each kind may ask for, by name
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


@dataclass(frozen=True)
class Algorithm:
    """What a step optimises. The defaults are GRPO with the mean over tokens, on-policy."""

    objective: Function = clipped_terms
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
        """Optimizer updates a step."""
        return self.epochs * self.minibatches

    @property
    def recomputes(self) -> bool:
        """Whether the step scores the batch before its first gradient."""
        return self.old_logp == "recomputed" or (self.kl_coef > 0 and self.kl_in == "reward")


def advantages_of(
    a: Algorithm,
    rewards_B: Array,
    mask_BT: Array,
    kl_BT: Array | None,
    values_BT: Array | None,
    bootstrap_B: Array | None = None,
    *,
    samples: int,
) -> tuple[Array, Array | None]:
    """(advantages, returns or None) at every token; 0 at false ones.

    The `samples` rows of a group adjoin. A row without a true token is compared with the rest of
    its group all the same.
    """
    totals_B = rewards_B.astype(jnp.float32)
    if kl_BT is not None:
        totals_B = totals_B - a.kl_coef * sequence_sum(kl_BT, mask_BT)[:, 0]
    rewards_BT = token_rewards(rewards_B, mask_BT, kl_BT, kl_coef=a.kl_coef)
    found = a.advantages(**arguments(
        a.advantages,
        {
            "rewards_PR": totals_B.reshape(-1, samples),
            "rewards_BT": rewards_BT, "values_BT": values_BT, "bootstrap_B": bootstrap_B,
            "mask_BT": mask_BT,
        },
    ))  # fmt: skip
    advantages, returns = found if isinstance(found, tuple) else (found, None)
    of_samples = (len(rewards_B) // samples, samples)
    shape = jnp.shape(advantages)
    returned = mask_BT.shape if returns is None else jnp.shape(returns)
    if shape not in (of_samples, mask_BT.shape) or returned != mask_BT.shape:
        raise ValueError(
            f"{name_of(a.advantages)} must return advantages [P, R] = {of_samples} or [B, T] = "
            f"{mask_BT.shape}, and returns [B, T] if any; got {shape}"
            + ("" if returns is None else f" and {returned}")
        )
    if shape != mask_BT.shape:
        advantages = jnp.broadcast_to(advantages.reshape(-1, 1), mask_BT.shape)
    return jnp.where(mask_BT, advantages, 0.0), returns


def old_logp_of(a: Algorithm, batch: Batch, scored: Scored, now_BT: Array) -> Array:
    """What the ratio compares with; `now_BT` are the current log-probs, detached."""
    return {
        "detached": now_BT, "recomputed": scored.old_logp_BT, "rollout": batch.rollout_logp_BT
    }[a.old_logp]  # fmt: skip


def objective_arrays(
    batch: Batch, scored: Scored, logp_BT: Array, old_logp_BT: Array, entropy_BT: Array
) -> dict[str, Any]:
    """What an objective may ask for."""
    return {
        "logp_BT": logp_BT, "old_logp_BT": old_logp_BT, "entropy_BT": entropy_BT,
        "rollout_logp_BT": batch.rollout_logp_BT, "advantages_BT": scored.advantages_BT,
        "mask_BT": batch.loss_mask_BT,
    }  # fmt: skip


def corrected(
    a: Algorithm,
    old_logp_BT: Array,
    rollout_logp_BT: Array,
    advantages_BT: Array,
    mask_BT: Array,
    batch_mask_BT: Array | None,
) -> Correction:
    """All of an algorithm's rollout corrections in order: the last weights, every rejection."""
    arrays: dict[str, Any] = {
        "log_ratio_BT": log_ratios(old_logp_BT, rollout_logp_BT, mask_BT),
        "old_logp_BT": old_logp_BT, "rollout_logp_BT": rollout_logp_BT,
        "advantages_BT": advantages_BT, "mask_BT": mask_BT,
    }  # fmt: skip
    if batch_mask_BT is not None:
        arrays["batch_mask_BT"] = batch_mask_BT
    total = Correction()
    for function in a.rollout_correction:
        found = function(**arguments(function, arrays))
        known = {name: x for name, x in found._asdict().items() if x is not None}
        if total.keep_BT is not None and found.keep_BT is not None:
            known["keep_BT"] = found.keep_BT & total.keep_BT
        if "weights_BT" in known and "weights_BT" not in asked(function):
            known["bounded_BT"] = found.weights_BT
        total = total._replace(**known)
        arrays |= {name: known[name] for name in ("weights_BT", "ratio_BT") if name in known}
    return total
