# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: prompts without a gradient give way to others, within the budget."""

from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.records import Prompt, Rollout, StopReason
from jaxmoe.rollout.dynamic_sampling import dynamic_sampling, rollout_metrics

SAMPLES = 3


def rollout(prompt, sample, length=2, stop=StopReason.STOP_TOKEN):
    tokens = np.full(length, sample, np.int32)
    return Rollout(
        prompt=Prompt(id=prompt, tokens=(1,), text="", answer=""),
        tokens=tokens,
        rollout_logp=np.zeros(length, np.float32),
        stop=stop,
        weight_versions=np.zeros(length, np.int32),
    )


def generating(*batches):
    """A generate(number) whose groups carry the given rewards; prompts are numbered through."""
    calls = []

    def generate(number):
        calls.append(number)
        first = sum(len(groups) for groups in batches[:number])
        groups = batches[number]
        rollouts = [rollout(first + g, s) for g in range(len(groups)) for s in range(SAMPLES)]
        return rollouts, np.array(groups, np.float32).reshape(-1)

    return generate, calls


ALL, NONE, MIXED = [1, 1, 1], [0, 0, 0], [0, 1, 0]


def prompts_of(rollouts):
    return [r.prompt.id for r in rollouts[::SAMPLES]]


def test_one_batch_keeps_every_group_and_its_rewards():
    generate, calls = generating([ALL, MIXED, NONE], [MIXED, MIXED, MIXED])
    rollouts, rewards, metrics = dynamic_sampling(
        generate, prompts=3, samples=SAMPLES, max_gen_batches=1
    )
    assert calls == [0] and sorted(prompts_of(rollouts)) == [0, 1, 2]
    by_prompt = dict(zip(prompts_of(rollouts), rewards.reshape(-1, SAMPLES).tolist(), strict=True))
    assert by_prompt == {0: ALL, 1: MIXED, 2: NONE}
    assert metrics["rollout/gen_batches"] == 1


def test_uniform_groups_are_replaced_from_another_batch():
    generate, calls = generating([ALL, MIXED], [NONE, [1, 1, 0]], [MIXED, MIXED])
    rollouts, rewards, metrics = dynamic_sampling(
        generate, prompts=2, samples=SAMPLES, max_gen_batches=9
    )
    assert calls == [0, 1] and prompts_of(rollouts) == [1, 3]
    assert rewards.tolist() == [0, 1, 0, 1, 1, 0]
    assert [r.tokens[0] for r in rollouts] == [0, 1, 2, 0, 1, 2]  # samples stay in order
    assert metrics["rollout/gen_batches"] == 2
    assert metrics["reward/zero_std_groups_frac"] == 0.5  # of all that was generated
    assert metrics["reward/mean"] == pytest.approx(6 / 12)


def test_a_spent_budget_fills_up_with_uniform_groups():
    generate, calls = generating([ALL, NONE], [MIXED, ALL])
    rollouts, rewards, _ = dynamic_sampling(generate, prompts=2, samples=SAMPLES, max_gen_batches=2)
    assert calls == [0, 1] and prompts_of(rollouts) == [2, 0]
    assert rewards.tolist() == [*MIXED, *ALL]


def test_extra_mixed_groups_are_dropped():
    generate, _ = generating([MIXED, ALL, MIXED], [MIXED, MIXED, MIXED])
    rollouts, rewards, _ = dynamic_sampling(generate, prompts=3, samples=SAMPLES, max_gen_batches=4)
    assert prompts_of(rollouts) == [0, 2, 3] and len(rewards) == 9


def test_metrics_count_lengths_and_cut_answers():
    rollouts = [rollout(0, s, length=s + 1) for s in range(SAMPLES)]
    rollouts += [rollout(1, s, length=5, stop=StopReason.MAX_TOKENS) for s in range(SAMPLES)]
    metrics = rollout_metrics(rollouts, np.array([0, 1, 1, 1, 1, 1], np.float32), SAMPLES)
    assert metrics["response_len/mean"] == pytest.approx(21 / 6)
    assert metrics["response_len/max"] == 5
    assert metrics["stop/max_tokens_frac"] == 0.5
    assert metrics["reward/zero_std_groups_frac"] == 0.5
    assert metrics["reward/std"] == pytest.approx(np.std([0, 1, 1, 1, 1, 1]))


def test_one_sample_per_prompt_is_no_uniform_group():
    def generate(number):
        return [rollout(number, 0)] * 2, np.array([0.5, 0.5], np.float32)

    rollouts, _, metrics = dynamic_sampling(generate, prompts=2, samples=1, max_gen_batches=4)
    assert len(rollouts) == 2 and metrics["rollout/gen_batches"] == 1
    assert "reward/zero_std_groups_frac" not in metrics


def test_missing_samples_do_not_count_in_their_group():
    tenth, nan = float(np.float32(0.1)), np.nan
    generate, calls = generating([[tenth, nan, tenth], [nan, nan, nan]], [[0, nan, 1], MIXED])
    rollouts, rewards, metrics = dynamic_sampling(
        generate, prompts=2, samples=SAMPLES, max_gen_batches=2
    )
    assert calls == [0, 1] and prompts_of(rollouts) == [2, 3]  # those with a signal
    np.testing.assert_array_equal(rewards, np.array([0, nan, 1, *MIXED], np.float32))
    assert metrics["reward/zero_std_groups_frac"] == 0.5
    assert metrics["reward/mean"] == pytest.approx((0.2 + 1 + 1) / 7)


def episode(mask, stop=StopReason.STOP_TOKEN, **numbers):
    r = rollout(0, 0, length=len(mask), stop=stop)
    return replace(r, policy_mask=np.array(mask, bool), **numbers)


def test_metrics_of_episodes_count_what_the_policy_sampled():
    episodes = [
        episode([1, 1, 0, 0, 0, 1], env_rewards={"format": 0.5}, env_metrics={"tool/calls": 3.0}),
        episode([1, 0, 1, 0, 1], StopReason.MAX_TURNS, env_metrics={"tool/calls": 1.0}),
        episode([1], StopReason.ENV_ERROR),
        episode([1, 1], StopReason.MAX_TOKENS),
    ]
    metrics = rollout_metrics(episodes, np.zeros(4), 1)
    assert metrics == {
        "reward/mean": 0.0,
        "reward/std": 0.0,
        "response_len/mean": 9 / 4,
        "response_len/max": 3,
        "episode_len/mean": 14 / 4,
        "episode_len/max": 6,
        "turns/mean": 7 / 4,
        "turns/max": 3,
        "stop/max_tokens_frac": 0.25,
        "stop/max_turns_frac": 0.25,
        "stop/env_error_frac": 0.25,
        "reward/env/format": 0.125,
        "tool/calls": 1.0,
    }


def test_lost_episodes_are_counted_and_in_no_mean():
    episodes = [
        episode([1], env_rewards={"format": 0.5}),
        episode([1], env_rewards={"format": 0.1}, lost="close"),
        episode([1], StopReason.ENV_ERROR, lost="sandbox"),
        episode([1], StopReason.ENV_ERROR, lost="sandbox"),
    ]
    metrics = rollout_metrics(episodes, np.array([0.0, np.nan, np.nan, np.nan]), 1)
    assert metrics["reward/env/format"] == 0.5 and metrics["lost/frac"] == 0.75
    assert metrics["lost/close_frac"] == 0.25 and metrics["lost/sandbox_frac"] == 0.5


@pytest.mark.parametrize("mask", [None, np.ones(2, bool)])
def test_single_answers_have_no_metrics_of_episodes(mask):
    rollouts = [replace(rollout(0, i), policy_mask=mask) for i in range(SAMPLES)]
    assert set(rollout_metrics(rollouts, np.zeros(SAMPLES), SAMPLES)) == {
        "reward/mean",
        "reward/std",
        "reward/zero_std_groups_frac",
        "response_len/mean",
        "response_len/max",
        "stop/max_tokens_frac",
    }


def test_an_environments_metrics_replace_none_of_the_runs():
    own = {"step": 999.0, "loss": 5.0, "reward/mean": 99.0, "env/tries": 2.0, "hack/x": 1.0}
    metrics = rollout_metrics([episode([1, 0, 1], env_metrics=own)] * 2, np.ones(2), 2)
    assert metrics["reward/mean"] == 1.0 and not {"step", "loss"} & metrics.keys()
    assert metrics["env/step"] == 999 and metrics["env/reward/mean"] == 99
    assert metrics["env/tries"] == 2 and metrics["hack/x"] == 1
