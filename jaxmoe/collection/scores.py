# SPDX-License-Identifier: Apache-2.0
"""Rewards of rollouts: by the user's functions, the environment, or the source of the rows.

Next: jaxmoe/collection/rollouts.py scores the rollouts of a step, and
jaxmoe/collection/evaluation.py those of the held-out rows.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np

from jaxmoe.answers.scoring import marks_several_answers
from jaxmoe.collection.tasks import Task
from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.parse import ParsedResponse, read_response
from jaxmoe.data.rows import Source
from jaxmoe.observe.printable import escape_unprintable
from jaxmoe.records import Rollout, StopReason
from jaxmoe.rewards.conventions import Sample
from jaxmoe.rewards.rewards import (
    BatchRewards,
    ReportProgress,
    ignore_progress,
    iterate_with_progress,
    score_samples,
)


def response_text(rollout: Rollout, task: Task) -> str:
    """The text of a response without its stop token; of an episode, that of the last turn."""
    return task.tokenizer.decode(_answer_ids(rollout, task))


def _answer_ids(rollout: Rollout, task: Task) -> list[int]:
    # A turn that the environment did not continue also ends in a stop token.
    ends_turn = (
        rollout.stop is StopReason.STOP_TOKEN or int(rollout.tokens[-1]) in task.sampling.stop_ids
    )
    return rollout.tokens[_answer_start(rollout) : len(rollout.tokens) - ends_turn].tolist()


def _answer_start(rollout: Rollout) -> int:
    """Index of the first token of the policy's last turn."""
    return rollout.turns[-1][0] if rollout.policy_mask is not None else 0


def parse_answer(rollout: Rollout, task: Task) -> ParsedResponse:
    """Parse the last turn of the policy, behind everything before it."""
    ids, start = _answer_ids(rollout, task), _answer_start(rollout)
    before = rollout.context_before(start)
    stop = rollout.tokens[start + len(ids) :].tolist()
    parsed = read_response(before, ids, task.tokenizer, stop=stop)
    # A turn that ended its episode because it is malformed has no answer, whatever it contains.
    if rollout.stop is StopReason.PARSE_ERROR:
        return replace(parsed, text="", has_final=False)
    return parsed


def make_samples(
    rollouts: Sequence[Rollout],
    answers: Sequence[ParsedResponse],
    numbers: Sequence[int],
    source: Source,
) -> list[Sample]:
    """The parsed rollouts for reward functions, each as an answer to the row of its number."""
    return [
        Sample(number, source[number], answer, rollout.tokens.tolist(), rollout.turns)
        for number, answer, rollout in zip(numbers, answers, rollouts, strict=True)
    ]


def trainer_state(task: Task, step: int) -> SimpleNamespace:
    """TRL's trainer_state."""
    return SimpleNamespace(global_step=step, max_steps=task.steps)


def print_fault(scores: BatchRewards) -> None:
    """Print one line if a reward function failed; its answers are left out and counted."""
    if scores.first_fault and jax.process_index() == 0:
        print(f"! {escape_unprintable(scores.first_fault)}", flush=True)


def score_rollouts(
    rollouts: Sequence[Rollout],
    source: Source,
    task: Task,
    report: ReportProgress = ignore_progress,
    *,
    step: int = 0,
    count_errors: bool = False,
) -> BatchRewards:
    """Reward of each rollout, by `data.rewards`, else by the environment, else by the source.

    What an environment or a tool pays is added. The source's rewards are from 0 to 1. A lost
    episode has the reward NaN.

    step: the step of the run: trainer_state.global_step of reward functions.
    count_errors: True to raise no error of a reward function, for a part of a batch.

    The answer of an episode is the last turn of the policy.
    If the prompt uses channels, the final one is the answer. Without a final channel, the source
    gives 0, and reward functions receive an empty text.
    Raises: ConfigError if a function returns no finite number at all, or the source a value that
    is none.
    """
    responses = [parse_answer(r, task) for r in rollouts]
    numbers = [r.prompt.id for r in rollouts]
    if task.rewards:
        samples = make_samples(rollouts, responses, numbers, source)
        state = trainer_state(task, step)
        scores = score_samples(
            task.rewards,
            samples,
            report,
            run=task.run_rewards,
            state=state,
            count_errors=count_errors,
        )
    elif task.episodes is not None and task.episodes.earns:
        scores = BatchRewards(np.zeros(len(rollouts), np.float32), [{} for _ in rollouts])
    else:
        values = [
            source.score(parsed.text, n) if parsed.has_final else 0.0
            for n, parsed in iterate_with_progress(
                list(zip(numbers, responses, strict=True)), "scoring", report
            )
        ]
        bad = [n for n, value in zip(numbers, values, strict=True) if not math.isfinite(value)]
        if bad:
            raise ConfigError(
                f"data.task must score with finite numbers; its scorer did not on row {bad[0]}. "
                "Correct the source's score()."
            )
        scores = BatchRewards(np.array(values, np.float32), [{} for _ in values])
    for metrics, parsed in zip(scores.parts, responses, strict=True):
        if parsed.uses_channels:
            metrics["reward/no_final_frac"] = float(not parsed.has_final)
    several = [marks_several_answers(parsed.text) for parsed in responses]
    if any(several):
        for metrics, has_several in zip(scores.parts, several, strict=True):
            metrics["hack/several_answers"] = float(has_several)
    if task.episodes is None:
        return scores
    paid = np.array(
        [math.nan if r.lost else math.fsum(r.env_rewards.values()) for r in rollouts], np.float32
    )
    return replace(scores, rewards=scores.rewards + paid)


def select_scored(rewards: np.ndarray, task: Task) -> np.ndarray:
    """The rewards that are not NaN. Raises ConfigError if there are none."""
    scored_rewards = rewards[~np.isnan(rewards)]
    if not scored_rewards.size:
        raise ConfigError(
            "data.rewards must score some answers; "
            f"{', '.join(r.name for r in task.rewards) or 'the environment'} returned None for all "
            f"{len(rewards)} answers, failed, or timed out. Try other rows, or add a function for "
            "these."
        )
    return scored_rewards
