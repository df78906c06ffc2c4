# SPDX-License-Identifier: Apache-2.0
"""The flow of a run's groups: the next prompt of the stream, sampled with its own seed.

A checkpoint has the groups that have finished and are not trained, as the engine returned them;
groups that have not are sampled anew after a resume. Next: jaxmoe/rollout/group_flow.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxmoe.batches.batch import check_logprobs
from jaxmoe.collection.tasks import Task
from jaxmoe.config import Config, describe_engine
from jaxmoe.data.pipeline import PromptIterator
from jaxmoe.http_engine.packed_rollouts import deserialize_rollouts, serialize_rollouts
from jaxmoe.records import Prompt, Rollout
from jaxmoe.rollout.check_rollouts import (
    check_masks,
    check_order,
    check_samples,
    check_token_ids,
)
from jaxmoe.rollout.engine import Engine, Pinnable
from jaxmoe.rollout.group_flow import GroupFlow
from jaxmoe.rollout.group_order import GroupOrder

Group = list[Rollout]  # all samples of one prompt


def sample_prompts(
    cfg: Config, task: Task, engine: Engine, prompts: list[Prompt], *numbers: int
) -> list[Rollout]:
    """Return a step's rollouts of these prompts, the samples of a prompt as neighbours.

    The seed depends on cfg.seed and the numbers alone, so that a resumed run samples the same.
    """
    seed = int(np.random.SeedSequence([cfg.seed, *numbers]).generate_state(1)[0])
    samples, sampling = cfg.rollout.samples_per_prompt, replace(task.sampling, explores=True)
    rollouts = task.sample(engine, prompts, sampling, seed=seed, samples=samples)
    # Checked before they are scored: a reward of another prompt's answer would be trained on
    # without an error.
    check_order(rollouts, prompts, samples=samples)
    check_masks(rollouts)
    check_samples(rollouts, samples=samples)
    check_token_ids(rollouts, cfg.model.vocab_size)
    for i, rollout in enumerate(rollouts):
        check_logprobs(i, rollout)
    return rollouts


def open_group_flow(
    cfg: Config, task: Task, engine: Engine, step: int, saved: dict[str, Any] | None, queue: bytes
) -> tuple[GroupFlow[Group], PromptIterator]:
    """Return the flow after `step`, and its stream of prompts.

    saved, queue: what `save_flow` returned at that step; None and b"" at the beginning.
    """
    r, data, finished = cfg.rollout, task.stream(1, cfg.seed + 2), dict[int, Group]()
    if saved is not None:
        data.set_state(saved["stream"])
        rollouts, extra = deserialize_rollouts(queue)
        samples = r.samples_per_prompt
        for i, number in enumerate(extra["groups"]):
            group = rollouts[i * samples : (i + 1) * samples]
            # Otherwise a run that such a group stopped would stop at it again.
            is_lost = sum(bool(x.lost) for x in group) > task.max_lost_frac * samples
            if is_within(group, step - r.max_staleness, step) and not is_lost:
                finished[number] = group
        n_anew = saved["unfinished"] + len(extra["groups"]) - len(finished)
        print(
            f"groups   {len(finished)} of the queue are kept; {n_anew} others are sampled anew",
            flush=True,
        )
    order = GroupOrder(
        r.prompts_per_step,
        r.max_lag,
        n_draws=saved["draws"] if saved else 0,
        drawn=saved["drawn"] if saved else (),
    )

    def admit(number: int) -> Callable[[], Group]:
        pinned = engine.pin() if isinstance(engine, Pinnable) else engine
        return partial(sample_prompts, cfg, task, pinned, next(data), number)

    flow = GroupFlow(
        admit,
        order,
        places=(places := r.groups_at_once * describe_engine(cfg).replicas),
        # Rows are refilled at once only if other groups have begun to wait for them.
        begun=(1 + r.changes_in_flight) * places,
        ahead=r.max_staleness - r.max_lag,
        last=cfg.steps,
        step=step,
        finished=finished,
    )
    return flow, data


def is_within(group: Group, oldest: int, newest: int) -> bool:
    """Return True if weights of these versions sampled all tokens of the policy."""
    versions = np.concatenate([r.weight_versions[r.sampled_mask] for r in group])
    return bool(((oldest <= versions) & (versions <= newest)).all())


def save_flow(
    flow: GroupFlow[Group], data: PromptIterator, step: int
) -> tuple[dict[str, Any], bytes]:
    """Return the state of a flow after a step: JSON values, and the finished groups."""
    state = flow.state(step)
    rollouts = [rollout for group in state.finished.values() for rollout in group]
    saved = {
        "stream": data.get_state(state.oldest),
        "draws": state.n_draws,
        "drawn": state.drawn,
        "unfinished": state.unfinished,
    }
    return saved, serialize_rollouts(rollouts, groups=list(state.finished))
