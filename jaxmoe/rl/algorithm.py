# SPDX-License-Identifier: Apache-2.0
"""An RL algorithm: pure functions with their options bound, and the log-probs that they compare.

GSPO with a KL term, for example, is

    Algorithm(objective=partial(gspo, clip_high=4e-4), aggregation=seq_mean_token_mean,
              terms=(kl_term(1e-3),))

jaxmoe/rl/from_config.py makes one from a config, and jaxmoe/rl/validate.py refuses those that
cannot work. Next: jaxmoe/rl/loss.py applies it.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe import losses
from jaxmoe.config import ConfigError, require
from jaxmoe.config.function_specs import array_parameters, select_arrays
from jaxmoe.losses import group_advantages, ppo_clip, token_mean, token_rewards
from jaxmoe.losses.ratios import log_ratios, sequence_sum
from jaxmoe.losses.rollout_correction import Correction
from jaxmoe.model.check_ops import function_name
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.terms import TERM_ARRAYS, Function, Term

# The arrays that a function of each kind may take, by name.
ARRAYS = {
    "objective": TERM_ARRAYS,
    "terms": TERM_ARRAYS,
    "advantages": ("rewards_PR", "rewards_BT", "values_BT", "bootstrap_B", "mask_BT"),
    "aggregation": ("mask_BT", "keep_BT"),
    "rollout_correction": (
        "log_ratio_BT", "old_logp_BT", "rollout_logp_BT", "advantages_BT", "mask_BT",
        "weights_BT", "ratio_BT", "batch_mask_BT",
    ),
    "kl": ("logp_BT", "logq_BT", "old_logp_BT"),
}  # fmt: skip
LOSSES = {name: getattr(losses, name) for name in losses.__all__}  # what a config may name
# Those of each kind, which error messages suggest.
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
    "terms": (),
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
    terms: tuple[Term, ...] = ()  # added to the objective: kl_term, entropy_term, value_term, yours
    reward_kl: Term | None = None  # KL from the reference, subtracted from the tokens' rewards
    critic: str = "none"  # "own" or "shared" backbone

    @property
    def updates(self) -> int:
        """Number of optimizer updates in a step."""
        return self.epochs * self.minibatches

    @property
    def needs_scoring(self) -> bool:
        """True if the step computes old log-probs of the batch before its first gradient."""
        return self.old_logp == "recomputed" or self.reward_kl is not None

    @property
    def needs_reference(self) -> bool:
        """True if a function of the loss takes the log-probs of the frozen reference."""
        reward = () if self.reward_kl is None else (self.reward_kl,)
        functions = [self.objective, *(term.fn for term in (*self.terms, *reward))]
        return any("ref_logp_BT" in array_parameters(f) for f in functions)


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
    kl_coef = 0.0 if a.reward_kl is None else a.reward_kl.weight
    if kl_BT is not None:
        totals_B = totals_B - kl_coef * sequence_sum(kl_BT, mask_BT)[:, 0]
    rewards_BT = token_rewards(rewards_B, mask_BT, kl_BT, kl_coef=kl_coef)
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


def select_old_logp(a: Algorithm, batch: Batch, detached_logp_BT: Array) -> Array:
    """The log-probs that the ratio compares with; `detached_logp_BT` are the current ones."""
    return {
        "detached": detached_logp_BT, "recomputed": batch.old_logp_BT,
        "rollout": batch.rollout_logp_BT,
    }[a.old_logp]  # fmt: skip


def compute_correction(
    a: Algorithm,
    old_logp_BT: Array,
    rollout_logp_BT: Array,
    advantages_BT: Array,
    mask_BT: Array,
    batch_mask_BT: Array | None,
) -> Correction:
    """Apply an algorithm's rollout corrections in order.

    The result has the last weights, and keeps a token that every rejection keeps. Raises
    ConfigError for a correction that does not fit those before it: only one may set weights, and
    others modify them.
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
        modifies_weights = "weights_BT" in array_parameters(function)
        require(
            "weights_BT" in arrays or not modifies_weights,
            f"loss.rollout_correction: {function_name(function)} takes weights_BT, and no "
            "correction before it sets them. Try "
            f'--set "loss.rollout_correction=token_is(high=2.0) + {function_name(function)}".',
        )
        step = function(**select_arrays(function, arrays))
        _check_correction(step, function, modifies_weights, "weights_BT" in arrays)
        updates = {name: x for name, x in step._asdict().items() if x is not None}
        if total.keep_BT is not None and step.keep_BT is not None:
            updates["keep_BT"] = step.keep_BT & total.keep_BT
        if "weights_BT" in updates and not modifies_weights:
            updates["bounded_BT"] = step.weights_BT
        total = total._replace(**updates)
        arrays |= {name: updates[name] for name in ("weights_BT", "ratio_BT") if name in updates}
    return total


def _check_correction(
    correction: Any, function: Function, modifies_weights: bool, has_weights: bool
) -> None:
    """Raise ConfigError unless a rollout correction returned what its place allows."""
    name = f"loss.rollout_correction: {function_name(function)}"
    if not isinstance(correction, Correction):
        raise ConfigError(f"{name} must return a Correction, as token_is does.")
    if correction.weights_BT is None or modifies_weights:
        return
    require(
        not has_weights,
        f"{name} would weight tokens that already have weights, and correct twice. Leave one out.",
    )
    require(
        correction.ratio_BT is not None and correction.above_BT is not None,
        f"{name} must return ratio_BT and above_BT with its weights, as token_is does.",
    )
