# SPDX-License-Identifier: Apache-2.0
"""Split the rows of a file into training and held-out rows, and count every row left out.

Next: jaxmoe/data/sources.py, which opens files and procedural tasks.
"""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxmoe.config import ConfigError
from jaxmoe.data.files import FileSource
from jaxmoe.data.overlong import PromptLengthFilter
from jaxmoe.data.rows import Row, Source, Subset


class Split(NamedTuple):
    """Training rows, held-out rows, and a note for each reason to leave rows or files out."""

    train: Source
    held_out: Source
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SplitRequest:
    """Which rows of its files a run trains on and holds out."""

    train_size: int | None  # rows to train on; None: all
    eval_size: int  # rows to hold out
    seed: int = 0
    # data.distinct: "off" keeps every row, "row" drops copies of a row, "question" keeps the first
    # row of each question
    distinct: str = "off"
    # True if an environment makes the problem of a row: many rows may have the same prompt
    has_environment: bool = False
    overlong: PromptLengthFilter | None = None
    shuffle: bool = True

    def key(self, row: Row) -> str:
        """Equal for rows that must not be on both sides."""
        return row.content if self.has_environment else row.question_text


@dataclass
class _LeftOut:
    """Count and first row of each reason to leave rows out."""

    reasons: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, reason: str, row: Row) -> None:
        count, first = self.reasons.get(reason, (0, row.location))
        self.reasons[reason] = (count + 1, first)

    def lines(self) -> tuple[str, ...]:
        return tuple(
            f"{_count(count, 'row')} left out: {reason} (the first is {first})"
            for reason, (count, first) in self.reasons.items()
        )


def split_file(
    source: FileSource,
    name: str,
    request: SplitRequest,
    held_out_file: FileSource | None = None,
    held_out_name: str = "",
) -> Split:
    """Hold out rows of a file, or of the other file if there is one; train on the file.

    No question that is held out is trained on, and none is held out twice. If an environment has
    too few different rows for that, held-out rows repeat training rows, and a note says so.

    Raises: ConfigError if too few rows are left.
    """
    left_out, is_one_file = _LeftOut(), held_out_file is None
    order = _shuffle(_usable_rows(source, request, left_out), request.seed)
    keys = {index: request.key(source[index]) for index in order}
    held_source, candidates, held_out_keys = source, order, keys
    if held_out_file is not None:
        held_source = held_out_file
        candidates = _shuffle(_usable_rows(held_out_file, request, left_out), request.seed)
        held_out_keys = {index: request.key(held_out_file[index]) for index in candidates}
    first_of_key: dict[str, int] = {}
    for index in candidates:
        first_of_key.setdefault(held_out_keys[index], index)

    def train_without(n_keys: int) -> list[int]:
        # No question of a held-out file is trained on, even if it is not held out itself.
        refused = set(list(first_of_key)[: n_keys if is_one_file else None])
        return [index for index in order if keys[index] not in refused]

    held_out = list(first_of_key.values())[: request.eval_size]
    train = train_without(request.eval_size)
    notes: tuple[str, ...] = ()
    repeats = request.has_environment and (len(held_out) < request.eval_size or not train)
    if repeats:
        held_out = candidates[: request.eval_size]
        train = order[request.eval_size :] if is_one_file else order
        notes = (
            "the same rows are trained on and held out, since there is only "
            f"{_count(len(first_of_key), 'different row')} among {len(candidates):,}: their "
            "episodes differ by the seed alone",
        )
    if len(held_out) < request.eval_size or len(train) < (request.train_size or 1):
        # Half of the questions of one file, or all of the other file, can be held out.
        n_held_out = min(request.eval_size, len(first_of_key) // (2 if is_one_file else 1))
        raise _too_few_rows_error(
            f"{_count(len(order), 'usable row')} of {name}",
            _count(len(first_of_key), "different question")
            + f" of {held_out_name}" * (not is_one_file),
            request,
            (len(train_without(n_held_out)), n_held_out),
            left_out,
        )

    # In the order of the files, so that each reason names its first row.
    copy_reason = "another row with the same question is held out"
    file_reason = f"a row of {held_out_name} has the same question"
    keys_held_out = {held_out_keys[index] for index in held_out}
    for index in sorted({*order} - {*train} - ({*held_out} if is_one_file else set())):
        reason = copy_reason if keys[index] in keys_held_out else file_reason
        left_out.add(reason, source[index])
    train = train if request.shuffle else sorted(train)
    size = len(train) if request.train_size is None else request.train_size
    for index in train[size:]:
        left_out.add(f"past data.train_rows={size}", source[index])
    if not is_one_file:
        for index in sorted({*candidates} - {*held_out}):
            is_copy = held_out_keys[index] in keys_held_out and not repeats
            past = f"past data.held_out_rows={request.eval_size}"
            left_out.add(copy_reason if is_copy else past, held_source[index])
    return Split(
        Subset(source, train[:size]), Subset(held_source, held_out), notes + left_out.lines()
    )


def _usable_rows(source: FileSource, request: SplitRequest, left_out: _LeftOut) -> list[int]:
    """Indices of the rows that data.distinct and the limit of prompts keep."""
    usable, contents = [], set[str]()
    for index, row in enumerate(source.rows):
        if request.distinct != "off":
            content = row.content if request.distinct == "row" else row.question_text
            if content in contents:
                left_out.add(f"copies, by data.distinct={request.distinct}", row)
                continue
            contents.add(content)
        if request.overlong is None or request.overlong.accepts(row):
            usable.append(index)
    return usable


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _shuffle(indices: list[int], seed: int) -> list[int]:
    return random.Random(seed).sample(indices, len(indices))


def _too_few_rows_error(
    rows: str, questions: str, request: SplitRequest, possible: tuple[int, int], left_out: _LeftOut
) -> ConfigError:
    train_size, eval_size = possible
    sizes = {"train_rows": request.train_size, "held_out_rows": request.eval_size}
    suggested = {
        "train_rows": min(request.train_size or 1, train_size),
        "held_out_rows": eval_size,
    }
    sizes_text = " and ".join(f"data.{key} ({size})" for key, size in sizes.items() if size)
    advice = "Add rows to the file."
    if all(suggested.values()):
        settings = [
            f"--set data.{key}={suggested[key]}"
            for key, size in sizes.items()
            if size and suggested[key] != size
        ]
        advice = f"Try {' '.join(settings)}."
    dropped = [str(request.overlong)] if request.overlong and request.overlong.dropped else []
    reasons = "".join(f"; {line}" for line in (*left_out.lines(), *dropped))
    return ConfigError(
        f"{sizes_text} must fit into {rows} with {questions}; a question is held out or "
        f"trained on, never both{reasons}. {advice}"
    )
