# SPDX-License-Identifier: Apache-2.0
"""An RL algorithm: pure functions with their options bound, and the log-probs that they compare.

GSPO with a KL term, for example, is

    Algorithm(objective=partial(gspo, clip_high=4e-4), aggregation=seq_mean_token_mean,
              terms=(kl_term(1e-3),))

jaxmoe/rl/from_config.py makes one from a config, and jaxmoe/rl/validate.py refuses those that
cannot work. Next: jaxmoe/rl/loss.py applies it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxmoe import losses
from jaxmoe.batches.batch import Batch
from jaxmoe.config.function_specs import array_parameters
from jaxmoe.losses import group_advantages, ppo_clip, token_mean
from jaxmoe.rl.terms import OLD_ROUTING, TERM_ARRAYS, Function, Term

# The arrays that a function of each kind may take, by name; in addition to those in `Batch.extra`
# and `Batch.shared`, and recorded ones (`Ops.record`), except in "kl".
ARRAYS = {
    "objective": TERM_ARRAYS,
    "terms": TERM_ARRAYS,
    "advantages": (
        "rewards_PR",
        "rewards_BT",
        "values_BT",
        "bootstrap_B",
        "turn_ends_BJ",
        "state_ids_BJ",
        "mask_BT",
        "token_mask_BT",
        "rollout_logp_BT",
        "old_logp_BT",
        "ref_logp_BT",
        "teacher_logp_BT",
        "step",
    ),
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
        "turn_return_advantages",
        "turn_rloo_advantages",
        "turn_group_advantages",
        "gigpo",
        "gigpo_rloo",
        "turn_gae",
        "whitened_turn_gae",
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


class ArrayNames(NamedTuple):
    """Names of the arrays that the functions of an algorithm take, in the order of parameters."""

    objective: tuple[str, ...]
    advantages: tuple[str, ...]
    aggregation: tuple[str, ...]
    rollout_correction: tuple[tuple[str, ...], ...]


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
    reward_coef: float = 1.0  # weight of the advantages that `advantages` estimates
    teacher_coef: float = 0.0  # weight of those of a teacher, which are added to them
    anneal_steps: int = 0  # steps in which teacher_coef falls to 0; 0: never
    array_names: ArrayNames = field(
        init=False, compare=False, repr=False
    )  # those of a term are in the term

    def __post_init__(self) -> None:
        # A signature is read here, once, and never while a step is traced.
        names = ArrayNames(
            array_parameters(self.objective),
            array_parameters(self.advantages),
            array_parameters(self.aggregation),
            tuple(map(array_parameters, self.rollout_correction)),
        )
        object.__setattr__(self, "array_names", names)

    @property
    def updates(self) -> int:
        """Number of optimizer updates in a step."""
        return self.epochs * self.minibatches

    @property
    def needs_scoring(self) -> bool:
        """True if the step computes old log-probs of the batch before its first gradient."""
        takes_old = any(self.takes_array(name) for name in OLD_ROUTING)
        takes_old |= "old_logp_BT" in self.array_names.advantages
        return self.old_logp == "recomputed" or self.reward_kl is not None or takes_old

    @property
    def needs_reference(self) -> bool:
        """True if a function of the loss takes the log-probs of the frozen reference."""
        return "ref_logp_BT" in self.array_names.advantages or self.takes_array("ref_logp_BT")

    @property
    def needs_teacher_logp(self) -> bool:
        """True if the loss takes a teacher's log-probs of the sampled tokens."""
        in_advantages = "teacher_logp_BT" in self.array_names.advantages
        return self.teacher_coef > 0 or in_advantages or self.takes_array("teacher_logp_BT")

    @property
    def needs_divergences(self) -> bool:
        """True if a function of the loss takes a teacher's divergence over the vocabulary."""
        return any(map(self.takes_array, ("teacher_reverse_kl_BT", "teacher_forward_kl_BT")))

    @property
    def needs_old_experts(self) -> bool:
        """True if a function of the loss takes the trainer's experts before the first update."""
        corrected = self.corrects_before_updates and self.corrects_switches
        return corrected or any(map(self.takes_array, ("old_experts_BTLA", "old_switched_BT")))

    @property
    def corrects_switches(self) -> bool:
        """True if a rollout correction takes switched_BT."""
        return any("switched_BT" in names for names in self.array_names.rollout_correction)

    @property
    def corrects_before_updates(self) -> bool:
        """True if the rollout correction compares the engine with the old log-probs, which are
        known before the first gradient."""
        return self.old_logp == "recomputed"

    def takes_array(self, name: str) -> bool:
        """True if the objective, a term, or the reward's KL takes the array of that name."""
        reward = () if self.reward_kl is None else (self.reward_kl,)
        terms = (*self.terms, *reward)
        return name in self.array_names.objective or any(name in term.array_names for term in terms)

    @property
    def normalizes_late(self) -> bool:
        """True if the loss divides by retained tokens that are known only after the gradient."""
        return not self.corrects_before_updates and "keep_BT" in self.array_names.aggregation

    def recorded_before_updates(self, batch: Batch) -> set[str]:
        """Names of the arrays of `Ops.record` that functions take before the first gradient."""
        corrections = self.array_names.rollout_correction if self.corrects_before_updates else ()
        names = {*self.array_names.advantages}.union(*corrections)
        of_step = {*ARRAYS["advantages"], *ARRAYS["rollout_correction"]}
        return names - of_step - {*batch.extra, *batch.shared}


def list_functions(a: Algorithm) -> list[tuple[str, Function, tuple[str, ...]]]:
    """Return (key in a config, function, names of the arrays that it takes) of each function."""
    names = a.array_names
    corrections = zip(a.rollout_correction, names.rollout_correction, strict=True)
    return [
        ("loss.advantages", a.advantages, names.advantages),
        ("loss.aggregation", a.aggregation, names.aggregation),
        *(("loss.rollout_correction", fn, arrays) for fn, arrays in corrections),
        ("loss.objective", a.objective, names.objective),
        *(("loss.terms", term.fn, term.array_names) for term in a.terms),
    ]
