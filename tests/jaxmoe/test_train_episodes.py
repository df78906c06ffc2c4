# SPDX-License-Identifier: Apache-2.0
"""The training loop on episodes with a tool, with each of the settings that change a step."""

import numpy as np
import pytest

from jaxmoe.records import StopReason
from tests.jaxmoe.tool_runs import check_steps, counted_tool, read_rows, run_tools

pytestmark = pytest.mark.slow  # commands, half a minute each; most of it compiling


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without further settings, and the folder of its tool."""
    folder = tmp_path_factory.mktemp("plain")
    return run_tools(folder / "run", data__tools=counted_tool(folder)), folder


def count_calls(folder):
    return len((folder / "calls.txt").read_text().splitlines())


def test_a_run_trains_on_episodes_with_tools(plain):
    run, folder = plain
    check_steps(run)
    metrics = [r.env_metrics for rollouts in run.sampled for r in rollouts]
    n_known = sum(m["tool/calls"] - m["tool/unknown"] for m in metrics)
    assert count_calls(folder) == n_known > 30
    evaluations = [row for row in read_rows(run.work) if "eval/accuracy" in row]
    assert len(evaluations) == 2 and all("eval/tool/calls" in row for row in evaluations)


@pytest.mark.parametrize(
    "changes",
    [{"optim__tokens_per_microbatch": 384}, {"mesh__fsdp": 2}, {"router__replay": "R3"}],
    ids=lambda changes: next(iter(changes)),
)
def test_trainer_and_engine_agree_under_each_setting(tmp_path, changes):
    run = run_tools(tmp_path / "run", devices=changes.get("mesh__fsdp", 1), **changes)
    check_steps(run)
    if "router__replay" in changes:
        assert all(row["router/unknown_experts_frac"] == 0 for row in run.steps)


def test_adapters_are_trained_on_episodes(tmp_path):
    # A base in four bits needs widths that are multiples of 64.
    run = run_tools(
        tmp_path / "run",
        lora__attention_rank=2,
        lora__expert_rank=2,
        model__d_model=64,
        model__d_expert=64,
    )
    check_steps(run)


def test_ppo_with_a_critic_learns_values_of_episodes(tmp_path):
    run = run_tools(
        tmp_path / "run",
        critic__backbone="shared",
        critic__lr=1e-3,
        loss__advantages="gae(trace=0.9)",
        loss__minibatches=2,
        loss__old_logp="recomputed",
    )
    check_steps(run, is_on_policy=False)  # the second minibatch is off-policy


def test_async_episodes_have_the_version_of_each_turn(tmp_path):
    run = run_tools(
        tmp_path / "run", rollout__max_staleness=1, steps=3, loss__rollout_correction="token_is"
    )
    assert len(run.steps) == 3
    for step, (row, rollouts) in enumerate(zip(run.steps, run.batches, strict=True), start=1):
        versions = [set(r.weight_versions[r.sampled_mask].tolist()) for r in rollouts]
        # The native engine ends a batch with the weights that it began with.
        assert all(len(v) == 1 for v in versions)
        assert set.union(*versions) <= {step - 1, step - 2}
        staleness = np.mean([step - 1 - max(v) for v in versions])
        assert row["staleness/max"] <= 1 and row["staleness/mixed_frac"] == 0
        assert abs(row["staleness/mean"] - staleness) < 1e-6
        assert row["tool/calls"] > 0.5 and np.isfinite(row["grad/norm"])
    assert run.steps[0]["train_rollout_logprob_abs_diff_max"] <= 1e-5


def test_episodes_flow_in_groups_by_their_version(tmp_path):
    run = run_tools(
        tmp_path / "run",
        rollout__schedule="groups",
        rollout__max_staleness=1,
        steps=3,
        loss__rollout_correction="token_is",
    )
    for number, row in enumerate(run.steps):
        assert (row["rollout/oldest_group"], row["rollout/newest_group"]) == (
            4 * number,
            4 * number + 3,
        )
        assert row["staleness/max"] == min(number, 1) and row["staleness/mixed_frac"] == 0
        assert row["tool/calls"] > 0.5 and row["turns/mean"] > 1.2 and row["grad/norm"] > 0
    assert len(run.steps) == 3
    assert run.steps[0]["train_rollout_logprob_abs_diff_max"] <= 1e-5


def test_late_tools_change_no_bit_of_invariant_runs(tmp_path):
    exact = {"model__numerics": "invariant", "rollout__temperature": 0.9}
    runs = [
        run_tools(
            tmp_path / name,
            **exact,
            rollout__patience_s=patience_s,
            data__tools=counted_tool(tmp_path, **late),
        )
        for name, patience_s, late in (
            ("waits", 0.0, {}),
            ("late", 0.05, {"seconds": 0.5, "late_every": 3}),
        )
    ]
    for run in runs:
        check_steps(run)
        assert all(row["train_rollout_logprob_abs_diff_max"] == 0.0 for row in run.steps)
        assert all(row["router/expert_switches"] == 0.0 for row in run.steps)
        assert all(row["batch/computed_tokens_frac"] < 0.75 for row in run.steps)  # shared prompts
    assert read_rows(runs[0].work) == read_rows(runs[1].work)
    stops = {r.stop for rollouts in runs[1].sampled for r in rollouts}
    assert StopReason.ENV_TIMEOUT not in stops
