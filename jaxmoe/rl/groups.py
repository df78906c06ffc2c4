# SPDX-License-Identifier: Apache-2.0
"""The groups of samples a step trains on, and what can be said of them without the model.

Next: jaxmoe/rl/batch.py lays them out as arrays.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jaxmoe.records import Rollout, StopReason
from jaxmoe.shapes import Metrics

Draw = tuple[list[Rollout], np.ndarray]  # rollouts, the samples of a prompt together; rewards


def sample_groups(
    draw: Callable[[int], Draw], *, groups: int, samples: int, max_draws: int
) -> tuple[list[Rollout], np.ndarray, Metrics]:
    """Rollouts and rewards of `groups` prompts, those with unequal rewards first.

    A group whose rewards are all equal has no gradient; it gives way to one of a further draw,
    `draw(0)`, `draw(1)`, …, until there are enough or `max_draws` were made. The metrics are of
    all that was drawn. Groups of one have nothing to be unequal to: none is drawn anew.
    Source: dynamic sampling, DAPO, arXiv:2503.14476 section 3.2; there without a bound.
    """
    telling: list[Draw] = []
    uniform: list[Draw] = []
    draws: list[Draw] = []
    while len(draws) < max_draws and (not draws or len(telling) < groups):
        rollouts, rewards = draw(len(draws))
        draws.append((rollouts, rewards))
        for i in range(0, len(rollouts), samples):
            group = rollouts[i : i + samples], rewards[i : i + samples]
            dull = samples > 1 and np.ptp(group[1]) == 0
            (uniform if dull else telling).append(group)
    chosen = (telling + uniform)[:groups]
    metrics = rollout_metrics(*_joined(draws), samples) | {"rollout/draws": len(draws)}
    return (*_joined(chosen), metrics)


def rollout_metrics(rollouts: Sequence[Rollout], rewards: np.ndarray, samples: int) -> Metrics:
    """Rewards, lengths and endings."""
    lengths = np.array([len(r.tokens) for r in rollouts])
    grouped = rewards.reshape(-1, samples)
    cut = [r.stop is StopReason.MAX_TOKENS for r in rollouts]
    metrics: Metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "response_len/mean": float(lengths.mean()),
        "response_len/max": int(lengths.max()),
        "stop/max_tokens_frac": float(np.mean(cut)),
    }
    if samples > 1:
        equal = (grouped == grouped[:, :1]).all(axis=1)
        metrics["reward/zero_std_groups_frac"] = float(equal.mean())
    return metrics


def _joined(parts: Sequence[Draw]) -> Draw:
    rollouts = [rollout for part, _ in parts for rollout in part]
    return rollouts, np.concatenate([rewards for _, rewards in parts])
