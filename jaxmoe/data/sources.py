# SPDX-License-Identifier: Apache-2.0
"""Open a procedural task or a file as a source of questions, split into train and held-out rows.

Next: jaxmoe/data/pipeline.py orders them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.file_split import Split, SplitRequest, split_file
from jaxmoe.data.files import FileSource, read_task_rows
from jaxmoe.data.gym import GymSource
from jaxmoe.data.overlong import PromptLengthFilter
from jaxmoe.data.rows import Source, Subset
from jaxmoe.data.task_files import list_task_files


def open_source(
    task: str | Sequence[str],
    *,
    options: Mapping[str, Any] | None = None,
    size: int | None = None,
    seed: int = 0,
    answers: bool = True,
    columns: Mapping[str, str] | None = None,
) -> Source:
    """All rows of a task.

    options: options of the reasoning-gym task; must be empty for a file.
    size: number of rows to generate, required for reasoning_gym; for a file, the number of rows
        from its start (None: all).
    answers: True if each row of a file must have an answer for the scorer.
    columns: data.columns, a file's names of its question, answer and system columns.
    Raises: ConfigError for an unknown task, option or file, and for a malformed row.
    """
    options = options or {}
    if isinstance(task, str) and task.startswith("reasoning_gym:"):
        _refuse_columns(task, columns)
        if size is None or size < 1:
            raise ConfigError(f"size must be positive for {task}, got {size}.")
        return GymSource(task.partition(":")[2], options, size, seed)
    _refuse_options(options)
    source = FileSource(read_task_rows(task, answers=answers, columns=columns))
    if size is None:
        return source
    if size > len(source):
        raise ConfigError(f"size ({size}) must be at most the {len(source)} rows of {task}.")
    return Subset(source, range(size))


def _refuse_options(options: Mapping[str, Any]) -> None:
    if options:
        raise ConfigError(
            f"data.options must be empty for a file, got {', '.join(options)}. "
            "(The only option of a file is held_out, the file of the held-out rows.)"
        )


def _refuse_columns(task: str, columns: Mapping[str, str] | None) -> None:
    if columns:
        raise ConfigError(
            f"data.columns must be empty for {task}, whose rows are made and not read, got "
            f"{', '.join(columns)}. Try --set data.columns={{}}"
        )


def open_split(
    task: str | Sequence[str],
    options: Mapping[str, Any],
    request: SplitRequest,
    *,
    answers: bool = True,
    columns: Mapping[str, str] | None = None,
) -> Split:
    """Training and held-out rows: no question of the held-out rows is trained on.

    A procedural task may generate a question several times within the training rows. Rows of a
    file are held out at random by the seed; options={"held_out": FILE} holds out the rows of
    another file instead.

    request.overlong: drops rows with too long prompts. Rows of a file are dropped before the
        split; rows of a procedural task when they are read, and the next row replaces them.
    columns: as for open_source; a file of held-out rows has the same ones.
    Raises: ConfigError as open_source does, and if the task has too few distinct questions.
    """
    train_size, eval_size = request.train_size, request.eval_size
    for name, value in (("train_rows", train_size), ("held_out_rows", eval_size)):
        if value is not None and value < 1:
            raise ConfigError(f"data.{name} must be positive, got {value}.")
    if isinstance(task, str) and task.startswith("reasoning_gym:"):
        _refuse_columns(task, columns)
        if request.distinct != "off":
            raise ConfigError(
                f"data.distinct must be off for {task}, whose rows are made and not read, got "
                f"{request.distinct}. Try --set data.distinct=off."
            )
        if train_size is None:
            raise ConfigError(
                f"data.train_rows must be a number for {task}, which generates any number of rows; "
                "got all. Try --set data.train_rows=4096."
            )
        return _split_gym(task, options, train_size, eval_size, request.seed, request.overlong)
    train_options = {key: value for key, value in options.items() if key != "held_out"}
    _refuse_options(train_options)
    train = FileSource(read_task_rows(task, answers=answers, columns=columns))
    name = task if isinstance(task, str) else ", ".join(task)
    notes = list_task_files(task).notes
    if "held_out" in options:
        held_out_task = options["held_out"]
        held_out = FileSource(read_task_rows(held_out_task, answers=answers, columns=columns))
        split = split_file(train, name, request, held_out, str(held_out_task))
        notes = tuple(dict.fromkeys((*notes, *list_task_files(held_out_task).notes)))
    else:
        split = split_file(train, name, request)
    return split._replace(notes=notes + split.notes)


def _split_gym(
    task: str,
    options: Mapping[str, Any],
    train_size: int,
    eval_size: int,
    seed: int,
    overlong: PromptLengthFilter | None,
) -> Split:
    """Split a procedural task: train has the first rows, held_out has rows after them."""
    # A procedural task repeats questions, so more rows are generated than are needed.
    source = open_source(task, options=options, size=train_size + 4 * eval_size + 16, seed=seed)
    chosen: dict[str, int] = {}
    for index in range(train_size, len(source)):
        if overlong is None or overlong.accepts(source[index]):
            chosen.setdefault(source[index].identity, index)
        if len(chosen) == eval_size:
            break
    else:
        raise ConfigError(
            f"data.held_out_rows ({eval_size}) must be fewer than the distinct questions of "
            f"{task}; {len(source) - train_size} rows have {len(chosen)}"
            f"{_format_dropped(overlong)}. "
            f"Try --set data.held_out_rows={max(1, len(chosen) // 2)}."
        )
    train = _TrainIndices(source, frozenset(chosen), train_size, task, overlong)
    # If no row is left to train on, this fails at once and not in the first step.
    _ = train[0]
    return Split(Subset(source, train), Subset(source, tuple(chosen.values())))


@dataclass(frozen=True)
class _TrainIndices(Sequence[int]):
    """Indices 0..size-1; a row that is held out or too long is replaced by the next usable row."""

    source: Source
    held_out: frozenset[str]
    size: int
    task: str
    overlong: PromptLengthFilter | None

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
            if self.overlong is None or self.overlong.accepts(row):
                return candidate
        raise ConfigError(
            f"data.held_out_rows ({len(self.held_out)}) must leave questions to train on; "
            f"{self.task} has no others{_format_dropped(self.overlong)}. "
            f"Try --set data.held_out_rows={max(1, len(self.held_out) // 2)}."
        )


def _format_dropped(overlong: PromptLengthFilter | None) -> str:
    return f" ({overlong})" if overlong is not None and overlong.dropped else ""
