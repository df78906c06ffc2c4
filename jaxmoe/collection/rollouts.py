# SPDX-License-Identifier: Apache-2.0
"""Collect the rollouts of a step: prompts from the stream, answers by the engine, rewards.

Next: jaxmoe/rollout/dynamic_sampling.py decides how many to generate; open_rollouts.py does it for
each step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxmoe.collection.batches import apply_overlong_penalty
from jaxmoe.collection.lost_episodes import report_lost
from jaxmoe.collection.reward_checks import CheckedRollout, plan_checks, score_and_check
from jaxmoe.collection.scores import print_fault, select_scored
from jaxmoe.collection.tasks import Task
from jaxmoe.config import Config
from jaxmoe.data.pipeline import PromptIterator
from jaxmoe.distributed.processes import map_shares
from jaxmoe.records import Rollout, add_token_rewards
from jaxmoe.rewards.rewards import (
    BatchRewards,
    ReportProgress,
    check_faulty,
    ignore_progress,
    mean_part_metrics,
)
from jaxmoe.rollout.dynamic_sampling import GenBatch, dynamic_sampling
from jaxmoe.rollout.episode_metrics import turn_reward_metrics
from jaxmoe.shapes import Metrics

# Over the draws of a step; other metrics are those of the last one.
COMBINE: dict[str, Callable[[float, float], float]] = {
    "rollout/oldest_group": min,
    "rollout/newest_group": max,
    "rollout/group_lag_max": max,
}
# (step, number of the batch among those of the step) -> its rollouts, metrics
SampleBatch = Callable[[int, int], tuple[list[Rollout], Metrics]]


@dataclass(frozen=True)
class ScoredRollouts:
    """The rollouts of a step with their rewards, and the state of the prompt stream after them."""

    rollouts: list[Rollout]
    rewards: np.ndarray  # NaN if no function scores the sample
    metrics: Metrics  # including time/rollout_s and time/reward_s
    data: dict[str, Any]  # PromptIterator.get_state()


def collect_rollouts(
    cfg: Config,
    task: Task,
    sample_batch: SampleBatch,
    data: PromptIterator,
    step: int,
    *,
    report: ReportProgress = ignore_progress,
    in_this_process: bool = False,
) -> ScoredRollouts:
    """Generate and score the rollouts of a step; each process scores a share, or this one all."""
    rollout_cfg = cfg.rollout
    # Of all draws, because the chosen rollouts have a biased mean reward.
    generated: list[Rollout] = []
    rewards_of_draws: list[np.ndarray] = []
    parts: list[dict[str, float]] = []
    seconds = {"time/rollout_s": 0.0, "time/reward_s": 0.0}
    drawn: Metrics = {}
    score = score_in_this_process if in_this_process else score_across_processes

    def generate(number: int) -> GenBatch:
        start = time.perf_counter()
        report("sampling")
        rollouts, metrics = sample_batch(step, number)
        drawn.update(combine_draws(drawn, metrics))
        report_lost(rollouts, task.train, task.max_lost_frac)
        answered = time.perf_counter()
        scores = score(rollouts, task, report, rollout_cfg.samples_per_prompt, step)
        check_faulty(scores, task.max_lost_frac)
        print_fault(scores)
        parts.extend(scores.parts)
        seconds["time/rollout_s"] += answered - start
        seconds["time/reward_s"] += time.perf_counter() - answered
        if scores.token_rewards:
            rollouts = [
                replace(r, token_rewards=add_token_rewards(r.token_rewards, placed))
                for r, placed in zip(rollouts, scores.token_rewards, strict=True)
            ]
        generated.extend(rollouts)
        rewards_of_draws.append(scores.rewards)
        return rollouts, scores.rewards

    rollouts, rewards, metrics = dynamic_sampling(
        generate,
        prompts=rollout_cfg.prompts_per_step,
        samples=rollout_cfg.samples_per_prompt,
        max_gen_batches=rollout_cfg.max_gen_batches,
    )
    select_scored(rewards, task)
    all_rewards = np.concatenate(rewards_of_draws)
    metrics |= turn_reward_metrics(generated, all_rewards)
    if rollout_cfg.overlong_buffer:
        after_penalty = apply_overlong_penalty(cfg, generated, all_rewards)
        metrics["reward/after_penalty_mean"] = float(select_scored(after_penalty, task).mean())
    metrics |= mean_part_metrics(parts) | seconds | drawn
    if task.overlong is not None:
        metrics["data/dropped_prompts"] = float(len(task.overlong.dropped))
    # The state is taken at once, because with asynchronous rollouts the stream is further ahead
    # when this step is saved.
    return ScoredRollouts(rollouts, rewards, metrics, data.get_state())


def combine_draws(earlier: Metrics, metrics: Metrics) -> Metrics:
    """Return the metrics of all draws of a step, of which these are the last."""
    combined = dict(metrics)
    for name, combine in COMBINE.items():
        if name in earlier and name in metrics:
            combined[name] = combine(earlier[name], metrics[name])
    return combined


def score_in_this_process(
    rollouts: list[Rollout], task: Task, report: ReportProgress, samples: int, step: int
) -> BatchRewards:
    """Score and check training rollouts."""
    checked = plan_checks(rollouts, task.train, task, samples=samples)
    return score_and_check(checked, task.train, task, report, step=step)


def score_across_processes(
    rollouts: list[Rollout], task: Task, report: ReportProgress, samples: int, step: int
) -> BatchRewards:
    """Score and check training rollouts; each process scores a share of the prompts."""
    if jax.process_count() == 1:
        return score_in_this_process(rollouts, task, report, samples, step)
    # Planned for the complete batch, since an answer is also graded against a row of another share.
    checked = plan_checks(rollouts, task.train, task, samples=samples)

    def score_share(share: Sequence[CheckedRollout]) -> dict[str, Any]:
        # An error on all answers of a share may be one on few answers of the batch.
        scores = score_and_check(share, task.train, task, report, step=step, count_errors=True)
        return {
            "rewards": scores.rewards.tolist(),
            "parts": scores.parts,
            "fault": scores.first_fault,
            "faults": scores.faults or [""] * len(share),
            "token_rewards": [
                None if x is None else x.tolist()
                for x in scores.token_rewards or [None] * len(share)
            ],
        }

    shares = map_shares(checked, score_share, group_size=samples)
    rewards = np.concatenate([np.asarray(share["rewards"], np.float32) for share in shares])
    faults = [share["fault"] for share in shares if share["fault"]]
    return BatchRewards(
        rewards,
        [part for share in shares for part in share["parts"]],
        [fault for share in shares for fault in share["faults"]],
        first_fault=faults[0] if faults else "",
        token_rewards=[
            None if x is None else np.array(x) for share in shares for x in share["token_rewards"]
        ],
    )
