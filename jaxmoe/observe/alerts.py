# SPDX-License-Identifier: Apache-2.0
"""Alerts: bounds of metrics, and what to check first. Next: jaxmoe/run/job.py prints them.

Thresholds: verl's documentation of rollout correction (kl, chi2_token, ESS, weight mean and
deviation), slime's CI gate (|Δlogp| 0.1), NeMo-RL's (the mean of exp|Δlogp| above 1.05).
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


def collapse_repeats(lines: Iterable[str]) -> list[str]:
    """Each line once, in order; a repeated line ends with its count."""
    return [line if n == 1 else f"{line} (×{n})" for line, n in Counter(lines).items()]


@dataclass(frozen=True)
class Rule:
    """A metric, its bound, and what to check first if it is out of bounds."""

    metric: str
    bound: str  # of bad values, "> 0.1 nats"; words if it has a function of its own
    suspect: str
    steps: int = 1  # the alert comes when the metric is out of bounds in this many steps in a row
    needs: tuple[str, ...] = ()  # other metrics that the bound depends on
    is_bad: Callable[..., bool] | None = None  # of the metric's value and those in `needs`
    # True: some steps cannot measure the metric, and are passed over in the count of steps. False:
    # a metric that is absent, such as that of a rare event, is within bounds.
    passes_unmeasured: bool = False

    @property
    def counted(self) -> str:
        """Name of what `steps` counts."""
        return "measured step" if self.passes_unmeasured else "step"

    def is_measured(self, metrics: Mapping[str, float]) -> bool:
        """True if the metrics contain all that the rule needs."""
        return all(name in metrics for name in (self.metric, *self.needs))

    def is_broken(self, metrics: Mapping[str, float]) -> bool:
        """True if the metrics contain all that the rule needs, and are out of bounds."""
        if not self.is_measured(metrics):
            return False
        if self.is_bad is not None:
            return self.is_bad(*(metrics[name] for name in (self.metric, *self.needs)))
        sign, number, *_ = self.bound.split()
        compare = {">": operator.gt, "<": operator.lt}[sign]
        return compare(metrics[self.metric], float(number))


_ENGINE_WEIGHTS = "the engine's weights: does it run the newest weights, in the same dtype?"
RULES = (
    Rule("train_rollout_logprob_abs_diff", "> 0.1 nats", _ENGINE_WEIGHTS),
    Rule("rollout_corr/kl", "beyond ±0.1 nats", _ENGINE_WEIGHTS, is_bad=lambda x: abs(x) > 0.1),
    Rule(
        "rollout_corr/chi2_token",
        "> 1",
        "python -m jaxmoe.samples: a few tokens that are likely for the engine only",
    ),
    Rule(
        "rollout_corr/ess",
        "< 0.3 of the tokens",
        "rollout_corr/ratio_p99; then try loss.rollout_correction=token_is",
    ),
    Rule(
        "rollout_corr/rollout_is_mean",
        "outside [0.5, 2]",
        "train_rollout_logprob_abs_diff; importance weights should average 1",
        is_bad=lambda x: not 0.5 <= x <= 2.0,
    ),
    Rule(
        "rollout_corr/rollout_is_std",
        "> 1",
        "rollout_corr/ratio_p99; then try a lower bound in loss.rollout_correction",
    ),
    Rule(
        "rollout_corr/rollout_rs_masked_fraction",
        "> 0.5",
        "the rejection bounds in loss.rollout_correction: most of the batch is masked",
    ),
    Rule(
        "grad/norm",
        "exactly 0",
        "reward/zero_std_groups_frac, policy/clip_frac and gate/closed: this batch changed "
        "no weight",
        is_bad=lambda x: x == 0.0,
    ),
    Rule(
        "policy/clip_frac",
        "> 0.3",
        "optim.lr, loss.epochs and loss.minibatches, and with loss.old_logp=rollout the engine: "
        "the policy moves too far within one batch",
    ),
    Rule(
        "policy/kl_ref",
        "> 1 nat per token",
        "loss.kl_coef and optim.lr: the policy is far from the reference policy",
    ),
    Rule(
        "reward/zero_std_groups_frac",
        "> 0.9",
        "python -m jaxmoe.samples: rows that are too hard or too easy give no gradient; "
        "rollout.max_gen_batches > 1 samples other rows",
        steps=3,
    ),
    Rule(
        "reward/swapped",
        "> 0.1, and > 0.3 of reward/mean",
        "python -m jaxmoe.samples: answers are paid for whatever is asked. See "
        "docs/reward_hacking.md",
        steps=2,
        needs=("reward/mean",),
        is_bad=lambda x, mean: x > max(0.1, 0.3 * mean),
        passes_unmeasured=True,
    ),
    Rule(
        "reward/second_grader_disagrees",
        "> 0.1 of the answers",
        "python -m jaxmoe.samples: what one grader pays and the other does not. See "
        "docs/reward_hacking.md",
        steps=2,
        passes_unmeasured=True,
    ),
    Rule(
        "reward/second_grader_failed_frac",
        "> 0.1 of its answers",
        "reward/second_grader_late_frac, _bad_value_frac, _raised_frac and _undecided_frac",
    ),
    Rule(
        "reward/faulty_frac",
        "> 0.05 of the answers",
        "reward/NAME/late_frac, _raised_frac and _bad_value_frac: these answers have no reward",
    ),
    Rule(
        "response_len/mean",
        "< 1.5 tokens",
        "python -m jaxmoe.samples: the policy stops almost at once",
    ),
    Rule(
        "stop/max_tokens_frac",
        "> 0.5",
        "rollout.max_new_tokens: most answers are truncated, and scored unfinished",
    ),
    Rule(
        "lost/frac",
        "> 0.05 of the episodes",
        "lost/CAUSE_frac and python -m jaxmoe.samples: the environment, a sandbox or a machine "
        "failed. These episodes have no reward",
    ),
    Rule(
        "hack/forged_turn",
        "> 0.05 an episode",
        "python -m jaxmoe.samples: the policy writes messages in the name of another role",
    ),
    *(
        Rule(
            metric,
            "> 0.05 of the answers",
            f"python -m jaxmoe.samples: code that {act}. See docs/reward_hacking.md",
        )
        for metric, act in (
            ("hack/files_written", "writes files"),
            ("hack/tests_read", "looks for the tests or its caller"),
            ("hack/timers_touched", "touches clocks or alarms"),
            ("hack/modules_patched", "replaces parts of modules"),
            ("hack/exits", "ends its interpreter"),
            ("hack/always_equal", "has values that are equal to all"),
        )
    ),
    Rule(
        "batch/padding_frac",
        "> 0.5 of the tokens",
        "optim.tokens_per_microbatch: a value above 0 packs sequences and saves padding",
    ),
    Rule(
        "router/unknown_experts_frac",
        "> 0.05 of the tokens",
        "the engine's expert kernel: it does not record the experts of these tokens, so the "
        "trainer routes them again (for vLLM: try another --moe-backend, or "
        "--no-enable-prefix-caching)",
    ),
    Rule(
        "router/replay_agreement",
        "< 0.5 (1: equal experts, 0: chance)",
        "python -m jaxmoe.doctor: the replayed experts are not those that the trainer chooses for "
        "the same tokens. Expected only with a large router.noise, or weights that differ much",
    ),
    Rule(
        "quant/moved_frac",
        "< 1e-6 of the experts' values",
        "optim.lr and quant/distance: the masters move, and no four-bit value changes, so the "
        "experts learn nothing that is sampled or exported. Try quant.rounding=stochastic",
        steps=3,
    ),
    Rule(
        "quant/saturated_frac",
        "> 0.1 of the experts' values",
        "optim.lr: these masters are above the largest value of their group and get no gradient",
    ),
    Rule(
        "rollout/incidents",
        "> 0",
        "the alerts after this one in metrics.jsonl: the engine failed and was reconnected",
    ),
    Rule("gate/closed", "> 0", "gate.* in the config: this batch was skipped"),
)


def count_bad_steps(metrics: Mapping[str, float], previous: Mapping[str, int]) -> dict[str, int]:
    """Number of steps in a row, this one included, in which each metric was out of bounds.

    `previous` are the counts of the step before. A metric that this step lacks begins again, unless
    its rule passes over steps that did not measure it.
    """
    counts: dict[str, int] = {}
    for rule in RULES:
        before = previous.get(rule.metric, 0)
        if rule.is_broken(metrics):
            counts[rule.metric] = before + 1
        elif before and rule.passes_unmeasured and not rule.is_measured(metrics):
            counts[rule.metric] = before
    return counts


def count_logged_bad_steps(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The counts of `count_bad_steps` after the last RL step in the rows of metrics.jsonl, which
    a resumed run continues."""
    metrics_of_steps: dict[int, dict[str, float]] = {}
    # An evaluation that is repeated after a resume has a row of its own.
    for row in rows:
        if row["stage"] == "rl":
            numbers = {k: float(v) for k, v in row.items() if isinstance(v, int | float)}
            metrics_of_steps.setdefault(row["step"], {}).update(numbers)
    counts: dict[str, int] = {}
    for step in sorted(metrics_of_steps):
        counts = count_bad_steps(metrics_of_steps[step], counts)
    return counts


def find_alerts(metrics: Mapping[str, float], bad_steps: Mapping[str, int]) -> dict[str, str]:
    """One line for each metric that is out of bounds in as many steps as its rule says, by name.

    `bad_steps` are the counts of `count_bad_steps`.
    """
    return {
        rule.metric: f"{rule.metric} is {metrics[rule.metric]:.3g} ({rule.bound}"
        + (f" in {rule.steps} {rule.counted}s in a row" if rule.steps > 1 else "")
        + f"); check first: {rule.suspect}"
        for rule in RULES
        if rule.is_broken(metrics) and bad_steps.get(rule.metric, 0) >= rule.steps
    }
