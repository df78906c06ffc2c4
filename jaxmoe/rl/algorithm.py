# SPDX-License-Identifier: Apache-2.0
"""An RL algorithm: pure functions with their options bound, and the log-probs that they compare.

GSPO with a KL term, for example, is

    Algorithm(objective=partial(gspo, clip_high=4e-4), aggregation=seq_mean_token_mean,
              terms=(kl_term(1e-3),))

jaxmoe/rl/from_config.py makes one from a config, and jaxmoe/rl/validate.py refuses those that
cannot work. Next: jaxmoe/rl/loss.py applies it.
"""

from dataclasses import dataclass

from jaxtyping import Array

from jaxmoe import losses
from jaxmoe.config.function_specs import array_parameters
from jaxmoe.losses import group_advantages, ppo_clip, token_mean
from jaxmoe.rl.batch import Batch
from jaxmoe.rl.terms import OLD_ROUTING, TERM_ARRAYS, Function, Term

# The arrays that a function of each kind may take, by name.
ARRAYS = {
    "objective": TERM_ARRAYS,
    "terms": TERM_ARRAYS,
    "advantages": ("rewards_PR", "rewards_BT", "values_BT", "bootstrap_B", "mask_BT"),
    "aggregation": ("mask_BT", "keep_BT"),
    "rollout_correction": (
        "log_ratio_BT",
        "old_logp_BT",
        "rollout_logp_BT",
        "advantages_BT",
        "mask_BT",
        "weights_BT",
        "ratio_BT",
        "batch_mask_BT",
        "switched_BT",
    ),
    "kl": ("logp_BT", "logq_BT", "old_logp_BT"),
}
# Only the exported losses have short names in a config, so that a helper function of the same
# modules cannot be named by accident.
LOSSES = {name: getattr(losses, name) for name in losses.__all__}
# Those of each kind, which error messages suggest.
CHOICES = {
    "objective": (
        "ppo_clip",
        "gspo",
        "cispo",
        "sapo",
        "dppo_tv",
        "reinforce",
        "rspo",
        "erpo",
        "switch_aware_clip",
        "length_scaled_clip",
    ),
    "advantages": (
        "group_advantages",
        "rloo_advantages",
        "reinforce_pp_advantages",
        "reinforce_pp_baseline_advantages",
        "discounted_returns",
        "gae",
        "bootstrapped_gae",
        "whitened_gae",
        "whitened_bootstrapped_gae",
    ),
    "aggregation": (
        "token_mean",
        "seq_mean_token_mean",
        "seq_mean_token_sum_norm",
        "kept_token_mean",
    ),
    "rollout_correction": (
        "token_is",
        "sequence_is",
        "geometric_is",
        "token_icepop",
        "sequence_icepop",
        "normalize",
        "rejection",
        "veto",
        "drift_mask",
        "mask_switched",
    ),
    # The terms that are built in have settings of their own, such as loss.kl_coef, so loss.terms
    # names only functions of the user's modules.
    "terms": (),
    "kl": ("kl_k1", "kl_k2", "kl_k3", "kl_k3_importance", "kl_k3_with_k2_gradient"),
}


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
        takes_old_routing = any(self.takes_array(name) for name in OLD_ROUTING)
        return self.old_logp == "recomputed" or self.reward_kl is not None or takes_old_routing

    @property
    def needs_reference(self) -> bool:
        """True if a function of the loss takes the log-probs of the frozen reference."""
        return self.takes_array("ref_logp_BT")

    @property
    def needs_old_experts(self) -> bool:
        """True if a function of the loss takes the trainer's experts before the first update."""
        corrected = self.corrects_before_updates and any(
            "switched_BT" in array_parameters(f) for f in self.rollout_correction
        )
        return corrected or any(map(self.takes_array, ("old_experts_BTLA", "old_switched_BT")))

    @property
    def corrects_before_updates(self) -> bool:
        """True if the rollout correction compares the engine with the old log-probs, which are
        known before the first gradient."""
        return self.old_logp == "recomputed"

    def takes_array(self, name: str) -> bool:
        """True if the objective, a term, or the reward's KL takes the array of that name."""
        reward = () if self.reward_kl is None else (self.reward_kl,)
        functions = [self.objective, *(term.fn for term in (*self.terms, *reward))]
        return any(name in array_parameters(f) for f in functions)


def select_old_logp(a: Algorithm, batch: Batch, detached_logp_BT: Array) -> Array:
    """The log-probs that the ratio compares with; `detached_logp_BT` are the current ones."""
    return {
        "detached": detached_logp_BT,
        "recomputed": batch.old_logp_BT,
        "rollout": batch.rollout_logp_BT,
    }[a.old_logp]
