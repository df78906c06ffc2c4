# SPDX-License-Identifier: Apache-2.0
"""Score rollouts, and measure on a share of them if the reward can be bought.

Two measurements are made, which cost that share of the time of grading: the reward of the answer to
another row, and that of a second grader. Neither is trained on.
Next: jaxmoe/collection/swapped_rewards.py, jaxmoe/collection/second_grader.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmoe.collection.scores import score_rollouts
from jaxmoe.collection.second_grader import SecondGrades, second_grades
from jaxmoe.collection.swapped_rewards import (
    NO_ROW,
    find_other_rows,
    find_swap_problem,
    swapped_rewards,
)
from jaxmoe.collection.tasks import Task
from jaxmoe.data.rows import Source
from jaxmoe.records import Rollout
from jaxmoe.rewards.rewards import BatchRewards, ReportProgress, ignore_progress

_ROWS_BEFORE_RUN = 64


@dataclass(frozen=True)
class CheckedRollout:
    """A rollout, and the measurements to make on it."""

    rollout: Rollout
    other_row: int = NO_ROW  # graded as its answer too
    has_second_grade: bool = False


def plan_checks(
    rollouts: Sequence[Rollout], source: Source, task: Task, *, samples: int
) -> list[CheckedRollout]:
    """Choose the answers to check: evenly spaced ones, of as many prompts as possible.

    rollouts: those of a complete batch, `samples` neighbours of each prompt.
    """
    n = len(rollouts)
    other_rows = [NO_ROW] * n
    numbers = [rollout.prompt.id for rollout in rollouts[::samples]]
    rows = [source[number] for number in numbers] if task.swapped_share else []
    if find_swap_problem(task, rows) is None:
        by_prompt = find_other_rows(rows, task.rewards)
        for i in choose_evenly(n, task.swapped_share, samples):
            j = by_prompt[i // samples]
            other_rows[i] = NO_ROW if j == NO_ROW else numbers[j]
    graded = choose_evenly(n, task.second_grader_share, samples) if task.second_grader else set()
    return [
        CheckedRollout(rollout, other_rows[i], i in graded) for i, rollout in enumerate(rollouts)
    ]


def choose_evenly(count: int, share: float, samples: int) -> set[int]:
    """Indices of a share of `count` answers, rounded up; the first sample of each prompt first."""
    order = sorted(range(count), key=lambda i: (i % samples, i))
    n_chosen = min(count, int(np.ceil(share * count)))
    # Evenly spaced within the last sample that is not chosen for all prompts.
    n_prompts = max(1, count // samples)
    n_full = n_chosen // n_prompts * n_prompts
    spread_over = order[n_full : n_full + n_prompts]
    spaced = {
        spread_over[k * len(spread_over) // (n_chosen - n_full)] for k in range(n_chosen - n_full)
    }
    return set(order[:n_full]) | spaced


def score_and_check(
    checked: Sequence[CheckedRollout],
    source: Source,
    task: Task,
    report: ReportProgress = ignore_progress,
    *,
    step: int = 0,
    count_errors: bool = False,
) -> BatchRewards:
    """`score_rollouts`, with the metrics of the measurements among the parts of each rollout."""
    rollouts = [item.rollout for item in checked]
    scores = score_rollouts(rollouts, source, task, report, step=step, count_errors=count_errors)
    parts = [dict(metrics) for metrics in scores.parts]
    if task.swapped_share:
        chosen = [i for i, item in enumerate(checked) if item.other_row != NO_ROW]
        for metrics in parts:
            metrics["reward/swapped_share"] = 0.0
        if chosen:
            measured = swapped_rewards(
                [rollouts[i] for i in chosen],
                [checked[i].other_row for i in chosen],
                source,
                task,
                report,
                step=step,
            )
            for i, metrics in zip(chosen, measured, strict=True):
                parts[i] |= metrics | {"reward/swapped_share": float("reward/swapped" in metrics)}
    fault = scores.first_fault
    chosen = [i for i, item in enumerate(checked) if item.has_second_grade]
    if chosen:
        grades: SecondGrades = second_grades(
            [rollouts[i] for i in chosen], scores.rewards[chosen], source, task, report, step=step
        )
        for i, metrics in zip(chosen, grades.parts, strict=True):
            parts[i] |= metrics
        fault = fault or grades.first_fault
    return replace(scores, parts=parts, first_fault=fault)


def describe_checks(task: Task) -> dict[str, str]:
    """Texts about the measurements, by label."""
    problem = _find_problem_before_run(task)
    share = f"{task.swapped_share:.0%} of the answers are graded against another row too"
    lines = {"swapped": share if problem is None else f"not measured: {problem}"}
    if task.second_grader:
        names = ", ".join(reward.name for reward in task.second_grader)
        lines["2nd grader"] = f"{names}, on {task.second_grader_share:.0%} of the answers"
    return lines


def print_unmeasured(task: Task) -> None:
    """Print a line if `reward/swapped` is wanted and cannot be measured."""
    problem = _find_problem_before_run(task)
    if task.swapped_share and problem is not None:
        print(f"swapped  not measured: {problem}", flush=True)


def _find_problem_before_run(task: Task) -> str | None:
    """`find_swap_problem` of the first training rows; each step decides by its own rows."""
    n_rows = min(_ROWS_BEFORE_RUN, len(task.train))
    return find_swap_problem(task, [task.train[i] for i in range(n_rows)])
