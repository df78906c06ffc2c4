# SPDX-License-Identifier: Apache-2.0
"""A second grader of a sample of the answers: `data.second_grader`. It is never trained on.

A policy finds the holes of the grader that pays it. A stricter one, which it is not paid by, shows
when the two part. Next: jaxmoe/collection/reward_checks.py chooses the answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.collection.scores import make_samples, parse_answer, trainer_state
from jaxmoe.collection.tasks import Task
from jaxmoe.data.rows import Source
from jaxmoe.records import Rollout
from jaxmoe.rewards.rewards import ReportProgress, ignore_progress, score_samples

PAYS_ABOVE = 0.5  # a grader pays an answer whose reward is above this
FAULT_METRICS = {
    "late": "reward/second_grader_late_frac",
    "bad_value": "reward/second_grader_bad_value_frac",
    "raised": "reward/second_grader_raised_frac",
    "undecided": "reward/second_grader_undecided_frac",
}


@dataclass(frozen=True)
class SecondGrades:
    parts: list[dict[str, float]]  # metrics of each rollout
    first_fault: str  # one sentence about the first fault, "" if there is none


def second_grades(
    rollouts: Sequence[Rollout],
    rewards: np.ndarray,
    source: Source,
    task: Task,
    report: ReportProgress = ignore_progress,
    *,
    step: int = 0,
) -> SecondGrades:
    """Grade rollouts by the second grader, and compare with their rewards.

    They disagree on an answer if one of the two is above PAYS_ABOVE and the other is not. An answer
    without one of the two rewards is not compared. Faults of the second grader are counted by kind.
    """
    answers = [parse_answer(rollout, task) for rollout in rollouts]
    samples = make_samples(rollouts, answers, [r.prompt.id for r in rollouts], source)
    scores = score_samples(
        task.second_grader,
        samples,
        report,
        run=task.run_second_grader,
        state=trainer_state(task, step),
        count_errors=True,
    )
    parts: list[dict[str, float]] = []
    for i, (first, second) in enumerate(
        zip(rewards.tolist(), scores.rewards.tolist(), strict=True)
    ):
        fault = scores.faults[i] if scores.faults else ""
        metrics = {"reward/second_grader_failed_frac": float(bool(fault))}
        metrics |= {name: float(kind == fault) for kind, name in FAULT_METRICS.items()}
        if np.isfinite(second):
            metrics["reward/second_grader_mean"] = second
            if np.isfinite(first):
                disagrees = (first > PAYS_ABOVE) != (second > PAYS_ABOVE)
                metrics["reward/second_grader_disagrees"] = float(disagrees)
        parts.append(metrics)
    return SecondGrades(parts, scores.first_fault)
