# SPDX-License-Identifier: Apache-2.0
"""A step's rollouts: prompts from the stream, answered by the engine, scored.

Next: jaxmoe/rl/dynamic_sampling.py says when there are enough; jaxmoe/train.py trains on them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxmoe.config import Config
from jaxmoe.data.pipeline import PromptIterator
from jaxmoe.envs.rewards import Rewarded, Tell, part_metrics, silent
from jaxmoe.envs.tasks import Task, score, scored
from jaxmoe.parallel.processes import map_shares
from jaxmoe.records import Rollout
from jaxmoe.rl.dynamic_sampling import GenBatch, dynamic_sampling
from jaxmoe.rollout.check_rollouts import check_order, check_samples, check_token_ids
from jaxmoe.rollout.engine import Engine
from jaxmoe.shapes import Metrics


@dataclass(frozen=True)
class ScoredRollouts:
    """What a step trains on, and where the stream of prompts stands behind it."""

    rollouts: list[Rollout]
    rewards: np.ndarray  # NaN where no function scores the sample
    metrics: Metrics  # time/rollout_s and time/reward_s among them
    data: dict[str, Any]


def collect_rollouts(
    cfg: Config, task: Task, engine: Engine, data: PromptIterator, step: int, *,
    tell: Tell = silent,
) -> ScoredRollouts:  # fmt: skip
    """The rollouts of a step; what is sampled depends on (seed, step) and the engine's weights."""
    r = cfg.rollout
    parts: list[dict[str, float]] = []  # of all that was generated, as the other metrics
    spent = {"time/rollout_s": 0.0, "time/reward_s": 0.0}

    def generate(number: int) -> GenBatch:
        start = time.perf_counter()
        tell("sampling")
        seed = int(np.random.SeedSequence([cfg.seed, step, number]).generate_state(1)[0])
        prompts = next(data)
        rollouts = engine.generate(prompts, task.sampling, seed=seed, samples=r.samples_per_prompt)
        check_order(rollouts, prompts, samples=r.samples_per_prompt)
        check_samples(rollouts, samples=r.samples_per_prompt)
        check_token_ids(rollouts, cfg.model.vocab_size)
        answered = time.perf_counter()
        scores = scored_by_all(rollouts, task, tell, r.samples_per_prompt, step)
        parts.extend(scores.parts)
        spent["time/rollout_s"] += answered - start
        spent["time/reward_s"] += time.perf_counter() - answered
        return rollouts, scores.rewards

    rollouts, rewards, metrics = dynamic_sampling(
        generate, prompts=r.prompts_per_step, samples=r.samples_per_prompt,
        max_gen_batches=r.max_gen_batches,
    )  # fmt: skip
    scored(rewards, task)
    metrics |= part_metrics(parts) | spent
    metrics["data/epoch"] = data.epoch
    if task.overlong is not None:
        metrics["data/dropped_prompts"] = float(len(task.overlong.dropped))
    return ScoredRollouts(rollouts, rewards, metrics, data.get_state())


def scored_by_all(
    rollouts: list[Rollout], task: Task, tell: Tell, samples: int, step: int
) -> Rewarded:
    """`score` of rollouts to train on, where each process scores a share of the prompts."""

    def mine(share: Sequence[Rollout]) -> dict[str, Any]:
        scores = score(share, task.train, task, tell, step=step)
        return {"rewards": scores.rewards.tolist(), "parts": scores.parts}

    if jax.process_count() == 1:
        return score(rollouts, task.train, task, tell, step=step)
    shares = map_shares(rollouts, mine, group_size=samples)
    rewards = np.concatenate([np.asarray(share["rewards"], np.float32) for share in shares])
    return Rewarded(rewards, [part for share in shares for part in share["parts"]])
