# SPDX-License-Identifier: Apache-2.0
"""Metrics of episodes: turns, lengths, stop reasons, and numbers of the environment.

Back: jaxmoe/rollout/dynamic_sampling.py logs them with those of rewards.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from jaxmoe.records import Rollout, StopReason, split_by_turn
from jaxmoe.shapes import Metrics

# Groups of names that environments and tools may use; any other name is put into the first.
_METRIC_GROUPS = ("env/", "tool/", "hack/")
MAX_TURNS = 8  # with a metric of their own
_REASONS_OF_ANSWERS = (StopReason.STOP_TOKEN, StopReason.MAX_TOKENS)


def episode_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Return the metrics that only episodes with an environment have; {} for single answers.

    stop/REASON_frac: share of the rollouts that ended so, for reasons that occur besides those of
        a single answer.
    turns/mean and turns/max: turns of the policy, if a rollout has more than one.
    episode_len/mean and episode_len/max: tokens of the policy and the environment, if there are
        any of the environment.
    contexts/mean and contexts/max: contexts of an episode, if an environment replaced one.
    lost/frac and lost/CAUSE_frac: share of the episodes that the infrastructure spoilt, if any.
    reward/env/PART and the environment's own metrics: means over the rollouts that are not lost. A
        rollout without the number counts as 0, since an episode that ended early earned and did
        nothing. A name outside of env/, tool/ and hack/ becomes env/NAME, so that none replaces
        the run's own.
    """
    stops = Counter(r.stop for r in rollouts)
    metrics: Metrics = {
        f"stop/{reason}_frac": n / len(rollouts)
        for reason, n in sorted(stops.items())
        if reason not in _REASONS_OF_ANSWERS
    }
    if any(r.policy_mask is not None and not r.policy_mask.all() for r in rollouts):
        turns, lengths = [len(r.turns) for r in rollouts], [len(r.tokens) for r in rollouts]
        metrics |= {
            "turns/mean": float(np.mean(turns)),
            "turns/max": max(turns),
            "episode_len/mean": float(np.mean(lengths)),
            "episode_len/max": max(lengths),
        }
    if any(r.context_starts for r in rollouts):
        contexts = [1 + len(r.context_starts) for r in rollouts]
        metrics |= {"contexts/mean": float(np.mean(contexts)), "contexts/max": max(contexts)}
    causes = Counter(r.lost for r in rollouts if r.lost)
    if causes:
        metrics["lost/frac"] = causes.total() / len(rollouts)
        metrics |= {f"lost/{cause}_frac": n / len(rollouts) for cause, n in sorted(causes.items())}
    numbers = [
        {f"reward/env/{part}": value for part, value in r.env_rewards.items()}
        | {_prefix_name(name): value for name, value in r.env_metrics.items()}
        for r in rollouts
        if not r.lost
    ]
    names = dict.fromkeys(name for values in numbers for name in values)
    means = {name: float(np.mean([v.get(name, 0.0) for v in numbers])) for name in names}
    return metrics | means


def turn_reward_metrics(rollouts: Sequence[Rollout], rewards: np.ndarray) -> Metrics:
    """Return reward/turn/N: the mean reward of turn N over the rollouts that have it.

    Of the first MAX_TURNS turns. {} unless a turn before the last one is paid. What is paid for the
    answer as one belongs to its last turn. Rollouts without a reward (NaN) are left out.
    """
    if not any(r.token_rewards is not None and len(r.turns) > 1 for r in rollouts):
        return {}
    by_turn = [
        split_by_turn(r, float(reward))
        for r, reward in zip(rollouts, rewards, strict=True)
        if np.isfinite(reward)
    ]
    count = min(max(map(len, by_turn), default=0), MAX_TURNS)
    return {
        f"reward/turn/{j + 1}": float(np.mean([x[j] for x in by_turn if len(x) > j]))
        for j in range(count)
    }


def _prefix_name(name: str) -> str:
    return name if name.startswith(_METRIC_GROUPS) else f"env/{name}"
