# SPDX-License-Identifier: Apache-2.0
"""`reward/swapped`: mean reward of answers that are graded as the answers of another row.

An honest answer is wrong there, so it is about 0. It rises when the reward pays whatever is asked:
edited tests, a judge that was talked to, a constant answer. It needs no labels and no list of
tricks. It cannot see an answer that was copied from the stored one;
jaxmoe/collection/second_grader.py is for those.
Next: jaxmoe/collection/reward_checks.py chooses the answers.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from jaxmoe.answers.scoring import answer_key
from jaxmoe.collection.scores import make_samples, parse_answer, trainer_state
from jaxmoe.collection.tasks import Task
from jaxmoe.data.json_columns import CHAT_COLUMNS
from jaxmoe.data.rows import Row, Source
from jaxmoe.records import Rollout
from jaxmoe.rewards.reward_specs import read_paid_alike_keys
from jaxmoe.rewards.rewards import ReportProgress, Reward, ignore_progress, score_samples

NO_ROW = -1
# Two rows of a batch have the same answer more often than this: chance alone would pay.
MAX_CHANCE = 0.05


def find_swap_problem(task: Task, rows: Sequence[Row]) -> str | None:
    """Return the reason why `reward/swapped` cannot be measured for rows like these, or None."""
    if not task.swapped_share:
        return "data.swapped_share is 0"
    if not task.rewards and task.episodes is not None and task.episodes.earns:
        return "the environment pays, and it cannot be asked about another row"
    counts = Counter(key for row in rows for key in _gold_keys(row, bool(task.rewards)))
    if not counts:
        return "the rows have no stored answer"
    n_equal_pairs = sum(count * (count - 1) for count in counts.values())
    if n_equal_pairs > MAX_CHANCE * len(rows) * (len(rows) - 1):
        return "equal answers are frequent, and chance alone would pay"
    if len(rows) > 1 and set(find_other_rows(rows, task.rewards)) == {NO_ROW}:
        return "one honest answer can satisfy all rows"
    return None


def find_other_rows(rows: Sequence[Row], rewards: Sequence[Reward] = ()) -> list[int]:
    """For each row of a batch the index of another, against which its answers are graded too.

    It is the one half a batch on, or the next behind it which one honest answer cannot satisfy as
    well: with another stored answer, another question, and no key in common for a reward function
    that is `paid_alike_by` keys. NO_ROW if there is none, or nothing tells how to grade a row.

    rewards: those of the task; with any, the columns of a row without an answer tell how to grade.
    """
    golds = [_gold_keys(row, bool(rewards)) for row in rows]
    keys = [
        gold.union(
            (reward.name, key)
            for reward in rewards
            for key in read_paid_alike_keys(reward.function, row)
        )
        for gold, row in zip(golds, rows, strict=True)
    ]
    n, half = len(rows), len(rows) // 2

    def is_other(i: int, j: int) -> bool:
        return bool(golds[j]) and not keys[i] & keys[j] and rows[i].identity != rows[j].identity

    return [
        next((j for k in range(n) if is_other(i, j := (i + half + k) % n)), NO_ROW)
        if golds[i]
        else NO_ROW
        for i in range(n)
    ]


def _gold_keys(row: Row, by_columns: bool) -> frozenset[Hashable]:
    """Keys of the correct answers of a row; rows with a common key have the same answer."""
    if row.answer is not None:
        return frozenset(answer_key(text) for text in (row.answer, *row.other_answers))
    columns = {name: value for name, value in row.columns.items() if name not in CHAT_COLUMNS}
    return frozenset([repr(columns)]) if by_columns and columns else frozenset()


def swapped_rewards(
    rollouts: Sequence[Rollout],
    other_rows: Sequence[int],
    source: Source,
    task: Task,
    report: ReportProgress = ignore_progress,
    *,
    step: int = 0,
) -> list[dict[str, float]]:
    """The metrics of each rollout, graded as an answer to its other row.

    Functions get the columns of the other row, and the answer as it is. Rewards of an environment
    are not part of it. Faults of functions are counted and never end the run.
    """
    answers = [parse_answer(rollout, task) for rollout in rollouts]
    if task.rewards:
        rewards = [replace(r, key=f"{r.key} (another row's answer)") for r in task.rewards]
        scores = score_samples(
            rewards,
            make_samples(rollouts, answers, other_rows, source),
            report,
            run=task.run_rewards,
            state=trainer_state(task, step),
            count_errors=True,
        )
        parts = [
            {
                f"reward/swapped/{r.name}": metrics[name]
                for r in rewards
                if len(rewards) > 1 and (name := f"reward/{r.name}/mean") in metrics
            }
            for metrics in scores.parts
        ]
        for metrics, fault in zip(parts, scores.faults or [""] * len(parts), strict=True):
            metrics["reward/swapped_failed_frac"] = float(bool(fault))
        values = scores.rewards.tolist()
    else:
        parts = [{} for _ in rollouts]
        values = [
            source.score(answer.text, number) if answer.has_final else 0.0
            for answer, number in zip(answers, other_rows, strict=True)
        ]
    for metrics, value in zip(parts, values, strict=True):
        if np.isfinite(value):
            metrics["reward/swapped"] = value
    return parts
