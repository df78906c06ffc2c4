# SPDX-License-Identifier: Apache-2.0
"""The rollouts of a run: in sync with training, or ahead in a thread, of one or several processes.

Next: jaxmoe/train.py takes a batch for each step.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxmoe.collection.group_flows import open_group_flow, sample_prompts, save_flow
from jaxmoe.collection.rollouts import ScoredRollouts, collect_rollouts
from jaxmoe.collection.tasks import Task
from jaxmoe.config import Config
from jaxmoe.data.rows import LockedRows
from jaxmoe.http_engine.packed_rollouts import deserialize_rollouts, serialize_rollouts
from jaxmoe.records import Rollout
from jaxmoe.rewards.rewards import ReportProgress, ignore_progress
from jaxmoe.rollout.async_rollouts import AsyncRollouts, SyncRollouts
from jaxmoe.rollout.engine import Engine, FirstProcessEngine
from jaxmoe.rollout.first_process import FirstProcessGroups, FirstProcessRollouts
from jaxmoe.rollout.group_flow import GroupRollouts
from jaxmoe.shapes import Metrics

Rollouts = (
    SyncRollouts[ScoredRollouts]
    | AsyncRollouts[ScoredRollouts]
    | FirstProcessRollouts[ScoredRollouts]
)


def open_rollouts(
    cfg: Config,
    task: Task,
    engine: Engine,
    step: int,
    data_state: dict[str, Any] | None,
    queue: bytes = b"",
    *,
    report: ReportProgress = ignore_progress,
    stop_signal: Callable[[], int] = lambda: 0,
) -> Rollouts:
    """Return the rollouts of the steps after `step`: in sync with training, or ahead in a thread.

    `data_state` is the state of the prompt stream after `step`; None is its beginning. With groups
    it is that of their flow, and `queue` has those that have finished.
    """
    options: dict[str, Any] = dict(report=report, stop_signal=stop_signal)
    if cfg.rollout.max_staleness == 0:
        return SyncRollouts(make_batches(cfg, task, engine, data_state, report=report))
    if not isinstance(engine, FirstProcessEngine):
        return open_ahead(cfg, task, engine, step, data_state, queue, **options)
    first = engine.first_engine
    if first is not None:
        # Tools and rewards run here too: a thread cannot meet those of the other processes.
        if task.episodes is not None:
            task = replace(task, episodes=replace(task.episodes, is_shared=False))
        options["in_this_process"] = True
    is_grouped = cfg.rollout.schedule == "groups"
    return (FirstProcessGroups if is_grouped else FirstProcessRollouts)(
        None if first is None else open_ahead(cfg, task, first, step, data_state, queue, **options),
        pack_scored,
        unpack_scored,
    )


def open_ahead(
    cfg: Config,
    task: Task,
    engine: Engine,
    step: int,
    data_state: dict[str, Any] | None,
    queue: bytes,
    *,
    stop_signal: Callable[[], int],
    **collecting: Any,
) -> AsyncRollouts[ScoredRollouts]:
    """Return rollouts that a thread of this process makes; see open_rollouts."""
    r = cfg.rollout
    # close() is the call that ends a generate() in another thread.
    options: dict[str, Any] = dict(
        first=step + 1, last=cfg.steps, stop=stop_signal, interrupt=engine.close
    )
    if r.schedule == "batch":
        make = make_batches(cfg, task, engine, data_state, **collecting)
        return AsyncRollouts(make, max_staleness=r.max_staleness, **options)
    task = replace(task, train=LockedRows(task.train))
    flow, data = open_group_flow(cfg, task, engine, step, data_state, queue)

    def draw_batch(step: int, _number: int) -> tuple[list[Rollout], Metrics]:
        groups, metrics = flow.draw(step)
        metrics["data/epoch"] = flow.n_drawn / len(task.train)
        return [rollout for group in groups.values() for rollout in group], metrics

    return GroupRollouts(
        partial(collect_rollouts, cfg, task, draw_batch, data, **collecting),
        flow,
        ahead=r.max_staleness - r.max_lag,
        save=partial(save_flow, flow, data),
        **options,
    )


def make_batches(
    cfg: Config, task: Task, engine: Engine, data_state: dict[str, Any] | None, **collecting: Any
) -> Callable[[int], ScoredRollouts]:
    """Return the function from a step to its rollouts, all of which are sampled for it."""
    data = task.stream(cfg.rollout.prompts_per_step, cfg.seed + 2)
    if data_state is not None:
        data.set_state(data_state)

    def sample_batch(step: int, number: int) -> tuple[list[Rollout], Metrics]:
        rollouts = sample_prompts(cfg, task, engine, next(data), step, number)
        return rollouts, {"data/epoch": data.epoch}

    return partial(collect_rollouts, cfg, task, sample_batch, data, **collecting)


def pack_scored(scored: ScoredRollouts) -> bytes:
    """Return scored rollouts as bytes, for other processes."""
    return serialize_rollouts(
        scored.rollouts,
        rewards=np.asarray(scored.rewards, np.float32).tolist(),
        metrics={name: float(value) for name, value in scored.metrics.items()},
        data=scored.data,
    )


def unpack_scored(data: bytes) -> ScoredRollouts:
    """Return the scored rollouts of `pack_scored`."""
    rollouts, extra = deserialize_rollouts(data)
    rewards = np.array(extra["rewards"], np.float32)
    return ScoredRollouts(rollouts, rewards, extra["metrics"], extra["data"])
