# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: prompts whose samples all have the same reward are replaced by others.

Next: jaxmoe/batches/batch.py lays the rollouts out as arrays.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxmoe.records import Rollout, StopReason
from jaxmoe.rollout.episode_metrics import episode_metrics
from jaxmoe.shapes import Metrics

GenBatch = tuple[list[Rollout], np.ndarray]  # rollouts, samples of a prompt adjacent; rewards


def dynamic_sampling(
    generate: Callable[[int], GenBatch], *, prompts: int, samples: int, max_gen_batches: int
) -> tuple[list[Rollout], np.ndarray, Metrics]:
    """Return rollouts and rewards of `prompts` prompts, those with unequal rewards first.

    A group whose rewards are all equal has no gradient. Batches `generate(0)`, `generate(1)`, …
    are made until there are enough other groups, or `max_gen_batches` batches. The metrics are
    over all generated rollouts. With one sample per prompt one batch is enough.
    Source: dynamic sampling, DAPO, arXiv:2503.14476 section 3.2; there without a limit. verl calls
    the limit max_num_gen_batches.
    """
    mixed: list[GenBatch] = []
    uniform: list[GenBatch] = []
    batches: list[GenBatch] = []
    while len(batches) < max_gen_batches and (not batches or len(mixed) < prompts):
        rollouts, rewards = generate(len(batches))
        batches.append((rollouts, rewards))
        for i in range(0, len(rollouts), samples):
            group = rollouts[i : i + samples], rewards[i : i + samples]
            is_uniform = samples > 1 and bool(have_equal_rewards(group[1]))
            (uniform if is_uniform else mixed).append(group)
    # Groups with equal rewards fill up the batch, because its shape is fixed. Their advantages are
    # 0.
    chosen = (mixed + uniform)[:prompts]
    # Over all generated rollouts, because the chosen ones have a biased mean reward.
    metrics = rollout_metrics(*_join_batches(batches), samples) | {
        "rollout/gen_batches": len(batches)
    }
    return (*_join_batches(chosen), metrics)


def rollout_metrics(rollouts: Sequence[Rollout], rewards: np.ndarray, samples: int) -> Metrics:
    """Metrics of rewards, lengths of the policy's answers, stop reasons and episodes."""
    lengths = np.array([r.n_sampled for r in rollouts])
    equal = have_equal_rewards(rewards.reshape(-1, samples))
    rewards = rewards[~np.isnan(rewards)]
    cut = [r.stop is StopReason.MAX_TOKENS for r in rollouts]
    metrics: Metrics = {
        "reward/mean": float(rewards.mean()) if rewards.size else math.nan,
        "reward/std": float(rewards.std()) if rewards.size else math.nan,
        "response_len/mean": float(lengths.mean()),
        "response_len/max": int(lengths.max()),
        "stop/max_tokens_frac": float(np.mean(cut)),
    }
    metrics |= episode_metrics(rollouts)
    if samples > 1:
        metrics["reward/zero_std_groups_frac"] = float(equal.mean())
    return metrics


def have_equal_rewards(rewards: np.ndarray) -> np.ndarray | np.bool_:
    """True for each group (the last axis) whose existing rewards are equal, or that has none.

    Such a group has no signal. A missing reward is NaN.
    """
    highest = np.max(rewards, axis=-1, where=~np.isnan(rewards), initial=-np.inf)
    lowest = np.min(rewards, axis=-1, where=~np.isnan(rewards), initial=np.inf)
    return highest <= lowest


def _join_batches(batches: Sequence[GenBatch]) -> GenBatch:
    rollouts = [rollout for batch, _ in batches for rollout in batch]
    return rollouts, np.concatenate([rewards for _, rewards in batches])
