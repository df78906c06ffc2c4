# SPDX-License-Identifier: Apache-2.0
"""From scored rollouts to the step's batch: answers that come near the limit pay for it."""

import jax.numpy as jnp
import numpy as np
import pytest
from episodes import draw_episode

from jaxmoe.collection.batches import apply_overlong_penalty, make_batch
from jaxmoe.collection.tasks import Task
from jaxmoe.config_file import load_config, override
from jaxmoe.data.templates import Template
from jaxmoe.data.tokenizer import load_tokenizer
from jaxmoe.losses import group_advantages
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason

LONGEST, BUFFER = 11, 4
CFG = override(
    load_config("tiny.py"),
    f"rollout.max_new_tokens={LONGEST}",
    "rollout.samples_per_prompt=4",
    "data.max_prompt_tokens=3",
    f"rollout.overlong_buffer={BUFFER}",
)
LENGTHS = [1, 6, 7, 8, 9, 10, 11, 11]
STOPS = [StopReason.STOP_TOKEN] * 7 + [StopReason.MAX_TOKENS]


class Nothing:
    """A source that is not asked."""

    def __len__(self):
        return 0

    def __getitem__(self, row):
        raise AssertionError(row)

    def score(self, text, row):
        raise AssertionError(row)


NOTHING = Nothing()


def batch_of(cfg, rewards):
    rollouts = [
        Rollout(
            Prompt(i // 4, "", (1, 2), None),
            np.full(n, 5, np.int32),
            np.full(n, -1.0, np.float32),
            stop,
            np.zeros(n, np.int32),
        )
        for i, (n, stop) in enumerate(zip(LENGTHS, STOPS, strict=True))
    ]
    tokenizer = load_tokenizer("bytes")
    task = Task(
        tokenizer,
        NOTHING,
        NOTHING,
        Template("{question}"),
        3,
        Sampling(LONGEST, tuple(tokenizer.stop_ids)),
    )
    return make_batch(cfg, task, rollouts, np.asarray(rewards, np.float32))


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_rewards_fall_linearly_over_the_last_tokens_of_the_budget(reward):
    batch = batch_of(CFG, [reward] * 8)
    lost = np.array([0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0], np.float32)
    np.testing.assert_array_equal(batch.rewards_B, reward - lost)
    assert batch.rewards_B.dtype == np.float32
    np.testing.assert_array_equal(batch.loss_mask_BT.sum(axis=1), LENGTHS)


def test_without_a_buffer_the_longest_answer_keeps_its_reward():
    rewards = np.arange(8) / 8
    batch = batch_of(override(CFG, "rollout.overlong_buffer=0"), rewards)
    np.testing.assert_array_equal(batch.rewards_B, rewards)


def test_a_buffer_of_the_whole_budget_charges_every_token():
    batch = batch_of(override(CFG, f"rollout.overlong_buffer={LONGEST}"), [0.0] * 8)
    lost = np.array(LENGTHS, np.float32) / np.float32(LONGEST)
    np.testing.assert_array_max_ulp(batch.rewards_B, -lost, maxulp=1)


def test_a_sample_without_a_reward_is_out_of_its_groups_mean_and_of_the_loss():
    rewards = [0.0, np.nan, 1.0, 0.5, np.nan, np.nan, np.nan, np.nan]
    batch = batch_of(override(CFG, "rollout.overlong_buffer=0"), rewards)
    np.testing.assert_array_equal(batch.rewards_B, rewards)  # NaN is "no reward", not a score
    trained = batch.loss_mask_BT.any(axis=1)
    np.testing.assert_array_equal(trained, ~np.isnan(rewards))
    advantages_PR = group_advantages(jnp.asarray(batch.rewards_B).reshape(2, 4), scale_by_std=False)
    np.testing.assert_array_equal(advantages_PR.reshape(-1), [-0.5, 0.0, 0.5, 0.0, 0, 0, 0, 0])


def test_the_overlong_penalty_counts_tokens_of_the_policy():
    rng = np.random.default_rng(0)
    rollouts = [draw_episode(rng, max_turns=6, max_turn=3, max_reply=30)[1] for _ in range(50)]
    paid = apply_overlong_penalty(CFG, rollouts, np.zeros(50, np.float32))
    # -1 at LONGEST tokens, 0 at LONGEST - BUFFER
    expected = [min(0, max(-1, (LONGEST - BUFFER - r.n_sampled) / BUFFER)) for r in rollouts]
    assert paid.tolist() == expected and len(set(expected)) > 3
