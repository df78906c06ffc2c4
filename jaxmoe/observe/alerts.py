# SPDX-License-Identifier: Apache-2.0
"""Numbers that mean trouble, and what to look at first. Next: jaxmoe/train.py shows them.

Thresholds: verl's documentation of rollout correction (kl, chi2_token, ESS, weight mean and
deviation), slime's CI gate (|Δlogp| 0.1), NeMo-RL's (the mean of exp|Δlogp| above 1.05).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


def counted(lines: Iterable[str]) -> list[str]:
    """Each line once, in order; one that came several times says how often."""
    return [line if n == 1 else f"{line} (×{n})" for line, n in Counter(lines).items()]


@dataclass(frozen=True)
class Rule:
    """A metric, when it is bad, and the first suspect."""

    metric: str
    bad: Callable[[float], bool]
    bound: str
    first: str


_ENGINE = "the engine's weights: were the newest ones loaded, and the same dtype used?"
RULES = (
    Rule("train_rollout_logprob_abs_diff", lambda x: x > 0.1, "> 0.1 nats", _ENGINE),
    Rule("rollout_corr/kl", lambda x: abs(x) > 0.1, "beyond ±0.1 nats", _ENGINE),
    Rule("rollout_corr/chi2_token", lambda x: x > 1.0, "> 1",
         "samples.jsonl: a few tokens the engine finds likely and the trainer does not"),
    Rule("rollout_corr/ess", lambda x: x < 0.3, "< 0.3 of the tokens",
         "rollout_corr/ratio_p99; then loss.rollout_correction=token_is"),
    Rule("rollout_corr/rollout_is_mean", lambda x: not 0.5 <= x <= 2.0, "outside [0.5, 2]",
         "train_rollout_logprob_abs_diff; the weights should average 1"),
    Rule("rollout_corr/rollout_is_std", lambda x: x > 1.0, "> 1",
         "rollout_corr/ratio_p99; a lower bound in loss.rollout_correction"),
    Rule("rollout_corr/rollout_rs_masked_fraction", lambda x: x > 0.5, "> 0.5",
         "the rejection's bounds: most of the batch is thrown away"),
    Rule("grad/norm", lambda x: x == 0.0, "exactly 0",
         "reward/zero_std_groups_frac, policy/clip_frac and gate/closed: this batch taught "
         "nothing, whatever optim.lr is"),
    Rule("policy/clip_frac", lambda x: x > 0.3, "> 0.3",
         "optim.lr, loss.epochs and loss.minibatches, with loss.old_logp=rollout the engine: "
         "the policy leaves its batch"),
    Rule("policy/kl_ref", lambda x: x > 1.0, "> 1 nat a token",
         "loss.kl_coef and optim.lr: the reference would hardly say what the policy says"),
    Rule("reward/zero_std_groups_frac", lambda x: x > 0.9, "> 0.9",
         "python -m jaxmoe.samples: rows too hard or too easy teach nothing; "
         "rollout.max_gen_batches samples others"),
    Rule("response_len/mean", lambda x: x < 1.5, "< 1.5 tokens",
         "python -m jaxmoe.samples: the policy stops before it answers"),
    Rule("stop/max_tokens_frac", lambda x: x > 0.5, "> 0.5",
         "rollout.max_new_tokens: most answers are cut off, and scored unfinished"),
    Rule("batch/padding_frac", lambda x: x > 0.5, "> 0.5 of the tokens",
         "optim.tokens_per_microbatch: above 0, sequences share rows"),
    Rule("router/unknown_experts_frac", lambda x: x > 0.05, "> 0.05 of the tokens",
         "the engine's expert kernel: it does not record what it routes, and these tokens are "
         "routed anew (for vLLM: another --moe-backend, or --no-enable-prefix-caching)"),
    Rule("rollout/incidents", lambda x: x > 0.0, "> 0",
         "the lines after this one in metrics.jsonl; the engine failed and was mended"),
    Rule("gate/closed", lambda x: x > 0.0, "> 0", "gate.*: this batch was not trained on"),
)  # fmt: skip


def alerts(metrics: Mapping[str, float]) -> dict[str, str]:
    """By metric, one line for each that is out of bounds."""
    return {
        rule.metric: f"{rule.metric} is {metrics[rule.metric]:.3g} ({rule.bound}); look first at "
        f"{rule.first}"
        for rule in RULES
        if rule.metric in metrics and rule.bad(metrics[rule.metric])
    }
