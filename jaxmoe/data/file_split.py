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
    """Training rows, held-out rows, and a note for each reason to leave rows out of both."""

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
    source: FileSource, name: str, request: SplitRequest, held_out_file: FileSource | None = None,
    held_out_name: str = "",
) -> Split:  # fmt: skip
    """Hold out rows of a file, or of the other file if there is one; train on the file.

    No question that is held out is trained on, and none is held out twice. Without enough
    different rows, an environment holds out rows that repeat training rows, and a note says so.

    Raises: ConfigError if too few rows are left.
    """
    left_out = _LeftOut()
    order = _shuffle(_usable_rows(source, request, left_out), request.seed)
    held_source, candidates = source, order
    if held_out_file is not None:
        held_source = held_out_file
        candidates = _shuffle(_usable_rows(held_out_file, request, left_out), request.seed)
    first_of_key: dict[str, int] = {}
    for index in candidates:
        first_of_key.setdefault(request.key(held_source[index]), index)
    held_out = list(first_of_key.values())[: request.eval_size]
    # No question of a held-out file is trained on, even if it is not held out itself.
    n_keys = len(first_of_key) if held_out_file is not None else request.eval_size
    train = _rows_without(source, order, list(first_of_key)[:n_keys], request)

    notes: tuple[str, ...] = ()
    if request.has_environment and _has_too_few(train, held_out, request):
        held_out = candidates[: request.eval_size]
        train = order if held_out_file is not None else order[request.eval_size :]
        notes = (
            f"the same rows are trained on and held out, since there is only "
            f"{_count(len(first_of_key), 'different row')} among {len(candidates):,}: their "
            "episodes differ by the seed alone",
        )
    if _has_too_few(train, held_out, request):
        # Half of the questions of one file, or all of the other file, can be held out.
        n_held_out = len(first_of_key) // (1 if held_out_file is not None else 2)
        n_held_out = min(request.eval_size, n_held_out)
        n_keys = n_keys if held_out_file is not None else n_held_out
        trainable = _rows_without(source, order, list(first_of_key)[:n_keys], request)
        raise _too_few_rows_error(
            f"{_count(len(order), 'usable row')} of {name}",
            _count(len(first_of_key), "different question")
            + f" of {held_out_name}" * (held_out_file is not None),
            request, (len(trainable), n_held_out), left_out,
        )  # fmt: skip

    _count_unused(
        source, train if held_out_file is not None else [*train, *held_out], order, left_out
    )
    train = train if request.shuffle else sorted(train)
    size = len(train) if request.train_size is None else request.train_size
    for index in train[size:]:
        left_out.add(f"past data.train_rows={size}", source[index])
    if held_out_file is not None:
        _count_unused(held_out_file, held_out, candidates, left_out)
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


def _rows_without(
    source: FileSource, order: list[int], keys: list[str], request: SplitRequest
) -> list[int]:
    refused = set(keys)
    return [i for i in order if request.key(source[i]) not in refused]


def _has_too_few(train: list[int], held_out: list[int], request: SplitRequest) -> bool:
    return len(held_out) < request.eval_size or len(train) < (request.train_size or 1)


def _count_unused(
    source: FileSource, used: list[int], order: list[int], left_out: _LeftOut
) -> None:
    unused = set(order) - set(used)
    for index in sorted(unused):
        left_out.add("another row with the same question is held out", source[index])


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
        "train_rows": min(request.train_size or 1, train_size), "held_out_rows": eval_size,
    }  # fmt: skip
    sizes_text = " and ".join(f"data.{key} ({size})" for key, size in sizes.items() if size)
    advice = "Add rows to the file."
    if all(suggested.values()):
        settings = [
            f"--set data.{key}={suggested[key]}"
            for key, size in sizes.items() if size and suggested[key] != size
        ]  # fmt: skip
        advice = f"Try {' '.join(settings)}."
    dropped = [str(request.overlong)] if request.overlong and request.overlong.dropped else []
    reasons = "".join(f"; {line}" for line in (*left_out.lines(), *dropped))
    return ConfigError(
        f"{sizes_text} must fit into {rows} with {questions}; a question is held out or "
        f"trained on, never both{reasons}. {advice}"
    )
