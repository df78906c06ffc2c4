# SPDX-License-Identifier: Apache-2.0
"""Alerts: each fires just past its bound, not at it, and says where to look."""

import math

import pytest

from jaxmoe.observe.alerts import (
    RULES,
    collapse_repeats,
    count_bad_steps,
    count_logged_bad_steps,
    find_alerts,
)

UP, DOWN = math.inf, -math.inf
ABS_DIFF, MEAN = "train_rollout_logprob_abs_diff", "rollout_corr/rollout_is_mean"
ENGINE = "the engine's weights: does it run the newest weights, in the same dtype?"
# metric, a healthy value, its last good one, which way is bad, its bound, the first suspect
HACKS = "files_written tests_read timers_touched modules_patched exits always_equal"
CASES = [
    (ABS_DIFF, 0.01, 0.1, UP, "> 0.1 nats", ENGINE),
    ("rollout_corr/kl", 0.001, 0.1, UP, "beyond ±0.1 nats", ENGINE),
    ("rollout_corr/kl", -0.001, -0.1, DOWN, "beyond ±0.1 nats", ENGINE),
    ("rollout_corr/chi2_token", 0.05, 1.0, UP, "> 1", "python -m jaxmoe.samples: a few"),
    ("rollout_corr/ess", 0.95, 0.3, DOWN, "< 0.3 of the tokens", "rollout_corr/ratio_p99"),
    (MEAN, 1.0, 2.0, UP, "outside [0.5, 2]", ABS_DIFF),
    (MEAN, 1.0, 0.5, DOWN, "outside [0.5, 2]", ABS_DIFF),
    ("rollout_corr/rollout_is_std", 0.2, 1.0, UP, "> 1", "rollout_corr/ratio_p99"),
    ("rollout_corr/rollout_rs_masked_fraction", 0.1, 0.5, UP, "> 0.5", "the rejection bounds"),
    ("grad/norm", 0.3, 5e-324, DOWN, "exactly 0", "reward/zero_std_groups_frac, policy/clip_frac"),
    ("policy/clip_frac", 0.05, 0.3, UP, "> 0.3", "optim.lr, loss.epochs and loss.minibatches"),
    ("policy/kl_ref", 0.05, 1.0, UP, "> 1 nat per token", "loss.kl_coef and optim.lr"),
    ("reward/zero_std_groups_frac", 0.57, 0.9, UP, "> 0.9", "python -m jaxmoe.samples: rows"),
    ("reward/swapped", 0.0, 0.1, UP, "> 0.1, and > 0.3 of reward/mean", "python -m jaxmoe.samples"),
    ("reward/second_grader_disagrees", 0.0, 0.1, UP, "> 0.1 of the answers", "python -m jaxmoe.s"),
    ("reward/second_grader_failed_frac", 0.0, 0.1, UP, "> 0.1 of its answers", "reward/second_gra"),
    ("reward/faulty_frac", 0.0, 0.05, UP, "> 0.05 of the answers", "reward/NAME/late_frac"),
    ("response_len/mean", 5.0, 1.5, DOWN, "< 1.5 tokens", "python -m jaxmoe.samples: the policy"),
    ("stop/max_tokens_frac", 0.1, 0.5, UP, "> 0.5", "rollout.max_new_tokens"),
    ("lost/frac", 0.0, 0.05, UP, "> 0.05 of the episodes", "lost/CAUSE_frac and python -m jax"),
    ("hack/forged_turn", 0.0, 0.05, UP, "> 0.05 an episode", "python -m jaxmoe.samples: the poli"),
    *(
        (
            f"hack/{kind}",
            0.0,
            0.05,
            UP,
            "> 0.05 of the answers",
            "python -m jaxmoe.samples: code th",
        )
        for kind in HACKS.split()
    ),
    ("batch/padding_frac", 0.1, 0.5, UP, "> 0.5 of the tokens", "optim.tokens_per_microbatch"),
    ("router/unknown_experts_frac", 0.0, 0.05, UP, "> 0.05 of the tokens", "the engine's expert"),
    ("router/replay_agreement", 0.97, 0.5, DOWN, "< 0.5 (1: equal", "python -m jaxmoe.doctor"),
    ("quant/moved_frac", 1e-3, 1e-6, DOWN, "< 1e-6 of the experts' values", "optim.lr and quant/"),
    ("quant/saturated_frac", 0.04, 0.1, UP, "> 0.1 of the experts' values", "optim.lr: these"),
    ("rollout/incidents", 0.0, 0.0, UP, "> 0", "the alerts after this one in metrics.jsonl"),
    ("gate/closed", 0.0, 0.0, UP, "> 0", "gate.* in the config: this batch was skipped"),
]


def alerts_of(metrics, steps=3):
    """The alerts of the last of several steps with the same metrics."""
    bad_steps, metrics = {}, {"reward/mean": 0.2} | metrics
    for _ in range(steps):
        bad_steps = count_bad_steps(metrics, bad_steps)
    return find_alerts(metrics, bad_steps)


@pytest.mark.parametrize(("metric", "healthy", "last", "bad", "bound", "suspect"), CASES)
def test_rules_fire_past_their_bound_with_advice(metric, healthy, last, bad, bound, suspect):
    assert alerts_of({metric: healthy}) == {} and alerts_of({metric: last}) == {}
    past = math.nextafter(last, bad)
    (text,) = alerts_of({metric: past}).values()
    assert text.startswith(f"{metric} is {past:.3g} ({bound}"), text
    assert f"); check first: {suspect}" in text
    assert "\n" not in text


def test_every_rule_is_tried_above():
    assert {rule.metric for rule in RULES} == {case[0] for case in CASES}


def test_only_measured_values_out_of_bounds_alert():
    healthy = {case[0]: case[1] for case in CASES} | {"loss": 1e9}
    assert alerts_of(healthy) == {} and alerts_of({}) == {}
    assert list(alerts_of(healthy | {"policy/clip_frac": 0.5, "gate/closed": 1.0})) == [
        "policy/clip_frac",
        "gate/closed",
    ]


@pytest.mark.parametrize(
    ("mean", "last"), [(0.2, 0.1), (-1.0, 0.1), (0.5, 0.3 * 0.5), (1.0, 0.3), (10.0, 3.0)]
)
def test_the_swapped_rewards_bound_follows_the_mean_reward(mean, last):
    def alerts(swapped):
        return alerts_of({"reward/mean": mean, "reward/swapped": swapped})

    assert alerts(last) == {} and list(alerts(math.nextafter(last, UP))) == ["reward/swapped"]
    bad = {"reward/swapped": 1.0}
    assert count_bad_steps(bad, {}) == {}, "a rule needs all of its metrics"
    assert alerts_of({"reward/mean": 1.0, "reward/swapped": 1.0}, steps=1) == {}


def test_a_varying_share_alerts_at_the_third_step():
    """tiny.py samples 128 groups a step; a few steps of a good run are above the bound."""
    bad, good = {"reward/zero_std_groups_frac": 0.95}, {"reward/zero_std_groups_frac": 0.8}
    assert alerts_of(bad, steps=2) == {}
    (text,) = alerts_of(bad, steps=3).values()
    assert "is 0.95 (> 0.9 in 3 steps in a row); check first" in text
    bad_steps = {}
    for metrics in (bad, bad, good, bad, bad, {}, bad, bad):
        bad_steps = count_bad_steps(metrics, bad_steps)
        assert find_alerts(metrics, bad_steps) == {}
    assert alerts_of({"gate/closed": 1.0}, steps=1)


@pytest.mark.parametrize(
    ("name", "good"), [("reward/swapped", 0.0), ("reward/second_grader_disagrees", 0.1)]
)
def test_an_unmeasured_step_keeps_a_rewards_count(name, good):
    """Each step decides by its rows whether it can measure them."""
    paid = {"reward/mean": 1.0}
    counts, alerts = {}, []
    for value in (1.0, None, 1.0, None, good, 1.0, None):
        metrics = paid if value is None else paid | {name: value}
        counts = count_bad_steps(metrics, counts)
        alerts.append(find_alerts(metrics, counts))
    assert [list(names) for names in alerts] == [[], [], [name], [], [], [], []]
    assert " in 2 measured steps in a row); check first" in alerts[2][name]
    rows = [{"stage": "rl", "step": 1, **paid, name: 1.0}, {"stage": "rl", "step": 2, **paid}]
    assert count_logged_bad_steps(rows) == {name: 1}


def test_an_absent_count_of_rare_events_is_good():
    """A metric of rare events is logged in steps that had one."""
    assert count_bad_steps({}, {"lost/frac": 1, "hack/exits": 4}) == {}


def test_a_resumed_run_counts_from_its_log():
    name = "reward/zero_std_groups_frac"
    rows: list[dict] = [
        {"stage": "rl", "step": step, "alerts": [], "gate/closed": None, name: value}
        for step, value in enumerate((0.95, 0.8, 0.95, 0.95), 1)
    ]
    rows.insert(0, {"stage": "warmup", "step": 9, name: 0.95})
    assert count_logged_bad_steps(rows) == {name: 2} and count_logged_bad_steps([]) == {}
    repeated_evaluation = {"stage": "rl", "step": 4, "eval/accuracy": 0.5}
    assert count_logged_bad_steps([*rows, repeated_evaluation]) == {name: 2}
    assert count_logged_bad_steps(rows[:3]) == {}


def test_a_repeated_line_is_printed_once_with_count():
    assert collapse_repeats(["a", "b", "a", "c", "a"]) == ["a (×3)", "b", "c"]
