# SPDX-License-Identifier: Apache-2.0
"""Where questions come from: a procedural task by name, or a file; train and held-out rows.

Next: jaxmoe/data/pipeline.py orders them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.files import FileSource, read_rows
from jaxmoe.data.gym import GymSource
from jaxmoe.data.overlong import Overlong
from jaxmoe.data.rows import Source, Subset


def open_source(
    task: str | Sequence[str],
    *,
    options: Mapping[str, Any] | None = None,
    size: int | None = None,
    seed: int = 0,
    answers: bool = True,
) -> Source:
    """All rows of a task.

    options: of the reasoning-gym task; a file takes none.
    size: rows to make, needed for reasoning_gym; of a file, how many from its start (None: all).
    answers: whether each row of a file must have an answer, as its scorer needs.
    Raises: ConfigError for an unknown task, option or file, and for a malformed row.
    """
    options = options or {}
    if isinstance(task, str) and task.startswith("reasoning_gym:"):
        if size is None or size < 1:
            raise ConfigError(f"size must be positive for {task}, got {size}.")
        return GymSource(task.partition(":")[2], options, size, seed)
    if options:
        raise ConfigError(
            f"data.options must be empty for a file, got {', '.join(options)}. "
            "(Only held_out, a second file, means something there.)"
        )
    source = FileSource(read_rows(task, answers=answers))
    if size is None:
        return source
    if size > len(source):
        raise ConfigError(f"size ({size}) must be at most the {len(source)} rows of {task}.")
    return Subset(source, range(size))


def open_split(
    task: str | Sequence[str],
    options: Mapping[str, Any],
    train_size: int | None,
    eval_size: int,
    seed: int,
    *,
    answers: bool = True,
    overlong: Overlong | None = None,
    shuffle: bool = True,
) -> tuple[Source, Source]:
    """(train, held_out): no question of held_out occurs in train, and none twice in held_out.

    A procedural task may repeat a question within train, as often as it is drawn. Rows of a file
    are drawn by `seed`, each question once; options={"held_out": FILE} holds out another file's
    rows instead.

    train_size: rows to train on; None for all that a file has beside the held-out ones.
    shuffle: whether the rows to train on are drawn by `seed`, too, or are the first of the file.
    overlong: rows that it does not keep are left out before the split; a procedural task is
        measured as it is read, and its next row stands in. None keeps all rows.
    Raises: ConfigError as open_source does, and where the task has too few distinct questions.
    """
    for name, value in (("train_rows", train_size), ("held_out_rows", eval_size)):
        if value is not None and value < 1:
            raise ConfigError(f"data.{name} must be positive, got {value}.")
    if isinstance(task, str) and task.startswith("reasoning_gym:"):
        if train_size is None:
            raise ConfigError(
                f"data.train_rows must be a number for {task}, which has as many rows as one asks "
                "for; got all. Try --set data.train_rows=4096."
            )
        return _split_gym(task, options, train_size, eval_size, seed, overlong)
    other = {key: value for key, value in options.items() if key != "held_out"}
    train = open_source(task, options=other, seed=seed, answers=answers)
    task = task if isinstance(task, str) else ", ".join(task)
    least = train_size or 1
    if "held_out" not in options:
        order = _shuffled(_first_of_each(train, overlong), seed)
        _require_rows(task, least + eval_size, len(order), least, eval_size, overlong)
        rest = order[eval_size:] if shuffle else sorted(order[eval_size:])
        return Subset(train, rest[:train_size]), Subset(train, order[:eval_size])
    other_file = options["held_out"]
    held_out = open_source(other_file, seed=seed, answers=answers)
    kept = _shuffled(_first_of_each(held_out, overlong), seed)
    _require_rows(str(other_file), eval_size, len(kept), 0, eval_size, overlong)
    banned = {held_out[i].identity for i in kept}
    distinct = _first_of_each(train, overlong)
    order = [i for i in distinct if train[i].identity not in banned]
    order = _shuffled(order, seed) if shuffle else order
    _require_rows(task, least, len(order), least, 0, overlong)
    return Subset(train, order[:train_size]), Subset(held_out, kept[:eval_size])


def _split_gym(
    task: str, options: Mapping[str, Any], train_size: int, eval_size: int, seed: int,
    overlong: Overlong | None,
) -> tuple[Source, Source]:  # fmt: skip
    """Train is drawn from the first rows, held_out from the rows behind them."""
    source = open_source(task, options=options, size=train_size + 4 * eval_size + 16, seed=seed)
    chosen: dict[str, int] = {}
    for index in range(train_size, len(source)):
        if overlong is None or overlong.keeps(source[index]):
            chosen.setdefault(source[index].identity, index)
        if len(chosen) == eval_size:
            break
    else:
        raise ConfigError(
            f"data.held_out_rows ({eval_size}) must be fewer than the distinct questions of "
            f"{task}; {len(source) - train_size} rows held {len(chosen)}{_dropped(overlong)}. "
            f"Try --set data.held_out_rows={max(1, len(chosen) // 2)}."
        )
    train = _Unseen(source, frozenset(chosen), train_size, task, overlong)
    _ = train[0]
    return Subset(source, train), Subset(source, tuple(chosen.values()))


@dataclass(frozen=True)
class _Unseen(Sequence[int]):
    """Indices 0..size-1; one whose question is held out, or too long, gives way to the next."""

    source: Source
    held_out: frozenset[str]
    size: int
    task: str
    overlong: Overlong | None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(f"row {index} of {self.size}")
        for step in range(self.size):
            candidate = (index + step) % self.size
            row = self.source[candidate]
            if row.identity in self.held_out:
                continue
            if self.overlong is None or self.overlong.keeps(row):
                return candidate
        raise ConfigError(
            f"data.held_out_rows ({len(self.held_out)}) must leave questions to train on; they "
            f"are all that {self.task} has{_dropped(self.overlong)}. "
            f"Try --set data.held_out_rows={max(1, len(self.held_out) // 2)}."
        )


def _first_of_each(source: Source, overlong: Overlong | None = None) -> list[int]:
    """The first row of each question, without those whose prompt is too long."""
    first: dict[str, int] = {}
    for index in range(len(source)):
        first.setdefault(source[index].identity, index)
    return [i for i in first.values() if overlong is None or overlong.keeps(source[i])]


def _dropped(overlong: Overlong | None) -> str:
    return f" ({overlong})" if overlong is not None and overlong.dropped else ""


def _shuffled(indices: list[int], seed: int) -> list[int]:
    return random.Random(seed).sample(indices, len(indices))


def _require_rows(
    task: str, wanted: int, have: int, train_size: int, eval_size: int, overlong: Overlong | None
) -> None:
    if wanted <= have:
        return
    asked = [("train_rows", train_size), ("held_out_rows", eval_size)]
    sizes = [(name, size) for name, size in asked if size]
    text = " + ".join(f"data.{name} ({size})" for name, size in sizes)
    held_out = min(eval_size, have // 2) if train_size else have
    tries = {"train_rows": have - held_out if eval_size else have, "held_out_rows": held_out}
    settings = " ".join(f"--set data.{name}={tries[name]}" for name, _ in sizes)
    advice = f"Try {settings}." if all(tries[name] for name, _ in sizes) else "Give it more rows."
    raise ConfigError(
        f"{text} must be at most the {have} distinct usable questions of "
        f"{task}{_dropped(overlong)}. {advice}"
    )
