# SPDX-License-Identifier: Apache-2.0
"""The rollouts of a step: metrics of rewards are over all that were drawn, not the chosen ones."""

from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.collection.rollouts import collect_rollouts
from jaxmoe.collection.tasks import open_task
from jaxmoe.config_file import load_config, override
from tests.jaxmoe.text_rollouts import make_rollouts

LONGEST, SAMPLES = 8, 2
CFG = override(
    load_config("tiny.py"),
    "data.train_rows=64",
    "data.held_out_rows=4",
    "rollout.sequences_per_step=4",
    f"rollout.samples_per_prompt={SAMPLES}",
    "rollout.max_gen_batches=4",
    f"rollout.max_new_tokens={LONGEST}",
    "rollout.overlong_buffer=1",
)


def collect(cfg, wrong, change=lambda rollout: rollout):
    """The metrics of a step of two draws; in each, one answer of one of the two groups is right."""
    task, draws = open_task(cfg), []

    def sample_batch(step, number):
        first = task.train[2 * number]

        def answer(row, sample):
            return row.answer if row == first and sample else wrong

        draws.append(make_rollouts(task, answer, SAMPLES, 2, 2 * number))
        return [change(rollout) for rollout in draws[-1]], {}

    scored = collect_rollouts(cfg, task, sample_batch, task.stream(2, 0), 1)
    assert len(draws) == 2 and len(scored.rollouts) == 4
    assert (scored.rewards.mean(), scored.metrics["reward/mean"]) == (0.5, 0.25)
    return scored.metrics


@pytest.mark.parametrize(("wrong", "penalty"), [("x", 0.0), ("x" * (LONGEST - 1), 0.75)])
def test_the_mean_after_penalties_is_over_all_draws(wrong, penalty):
    metrics = collect(CFG, wrong)
    assert metrics["reward/after_penalty_mean"] == 0.25 - penalty
    assert "reward/after_penalty_mean" not in collect(
        override(CFG, "rollout.overlong_buffer=0"), wrong
    )


def test_rewards_by_turn_are_over_all_draws():
    def add_turn(rollout):
        n = len(rollout.tokens) + 2
        return replace(
            rollout,
            tokens=np.array([97, 98, *rollout.tokens], np.int32),
            rollout_logp=np.zeros(n, np.float32),
            weight_versions=np.zeros(n, np.int32),
            policy_mask=np.arange(n) != 1,
            token_rewards=np.zeros(n),
        )

    metrics = collect(CFG, "x", add_turn)
    assert (metrics["reward/turn/1"], metrics["reward/turn/2"]) == (0.0, 0.25)
