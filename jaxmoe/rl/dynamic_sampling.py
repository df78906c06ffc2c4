# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: prompts whose samples are all rewarded alike give way to others.

Next: jaxmoe/rl/batch.py lays the rollouts out as arrays.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxmoe.records import Rollout, StopReason
from jaxmoe.shapes import Metrics

GenBatch = tuple[list[Rollout], np.ndarray]  # the samples of a prompt side by side; rewards


def dynamic_sampling(
    generate: Callable[[int], GenBatch], *, prompts: int, samples: int, max_gen_batches: int
) -> tuple[list[Rollout], np.ndarray, Metrics]:
    """Rollouts and rewards of `prompts` prompts, those with unequal rewards first.

    Samples of a prompt whose rewards are all equal have no gradient; they give way to those of a
    further batch, `generate(0)`, `generate(1)`, …, until there are enough or `max_gen_batches`
    were generated. The metrics are of all that was generated. With one sample a prompt nothing
    can be unequal: one batch is enough.
    Source: dynamic sampling, DAPO, arXiv:2503.14476 section 3.2; there without a bound. verl calls
    the bound max_num_gen_batches.
    """
    mixed: list[GenBatch] = []
    uniform: list[GenBatch] = []
    batches: list[GenBatch] = []
    while len(batches) < max_gen_batches and (not batches or len(mixed) < prompts):
        rollouts, rewards = generate(len(batches))
        batches.append((rollouts, rewards))
        for i in range(0, len(rollouts), samples):
            group = rollouts[i : i + samples], rewards[i : i + samples]
            equal = samples > 1 and np.ptp(impute_rewards(group[1], samples)) == 0
            (uniform if equal else mixed).append(group)
    chosen = (mixed + uniform)[:prompts]
    metrics = rollout_metrics(*_join_batches(batches), samples) | {
        "rollout/gen_batches": len(batches)
    }
    return (*_join_batches(chosen), metrics)


def rollout_metrics(rollouts: Sequence[Rollout], rewards: np.ndarray, samples: int) -> Metrics:
    """Rewards, lengths and endings."""
    lengths = np.array([len(r.tokens) for r in rollouts])
    grouped = impute_rewards(rewards, samples).reshape(-1, samples)
    rewards = rewards[~np.isnan(rewards)]
    cut = [r.stop is StopReason.MAX_TOKENS for r in rollouts]
    metrics: Metrics = {
        "reward/mean": float(rewards.mean()) if rewards.size else math.nan,
        "reward/std": float(rewards.std()) if rewards.size else math.nan,
        "response_len/mean": float(lengths.mean()),
        "response_len/max": int(lengths.max()),
        "stop/max_tokens_frac": float(np.mean(cut)),
    }
    if samples > 1:
        equal = (grouped == grouped[:, :1]).all(axis=1)
        metrics["reward/zero_std_groups_frac"] = float(equal.mean())
    return metrics


def impute_rewards(rewards: np.ndarray, samples: int) -> np.ndarray:
    """A sample without a reward (NaN) given the mean of its group's others; 0 where none has one.

    So it does not move its group's mean, and has no advantage itself. The group's deviation, of n
    rewards among R samples, is √((n − 1)/(R − 1)) of the n rewards' own.
    """
    if not np.isnan(rewards).any():
        return rewards
    whole = rewards.copy().reshape(-1, samples)
    for group in whole:
        known = group[~np.isnan(group)]
        least = known.min(initial=np.inf) if known.size else 0.0
        # exact where all are equal: such a group has no signal
        group[np.isnan(group)] = least + (known - least).mean() if known.size else 0.0
    return whole.reshape(-1)


def _join_batches(batches: Sequence[GenBatch]) -> GenBatch:
    rollouts = [rollout for batch, _ in batches for rollout in batch]
    return rollouts, np.concatenate([rewards for _, rewards in batches])
