# SPDX-License-Identifier: Apache-2.0
"""Records of a campaign: one JSON object a line, appended as stages end.

A record is of one chip and one commit. Stages that are done on this chip at this commit are
skipped; records of other commits and chips are kept and do not count. Next: page.py.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DONE = "done"
FIELDS = ("stage", "status", "figures", "seconds", "chip", "commit", "date", "command")
BEGIN = '{"stage": '  # of every record


class BadRecords(ValueError):
    """A file that should hold records has something else; one line for the user."""


def load_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file; none if it does not exist. Raises BadRecords.

    A record without an end, as a kill or a full disk leaves the last one, is left out.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes()[: _whole_size(path)].decode().splitlines()
    except UnicodeDecodeError as error:
        raise BadRecords(f"{path} must be text: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadRecords(f"{path} line {number} must be JSON: {error}") from error
        missing = [x for x in FIELDS if not isinstance(record, dict) or x not in record]
        if missing:
            raise BadRecords(f"{path} line {number} must have {', '.join(missing)}")
        records.append(record)
    return records


def load_chips(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Records by chip, the oldest first. Raises BadRecords."""
    records = [x for path in sorted(folder.glob("*.jsonl")) for x in load_records(path)]
    records.sort(key=lambda x: x["date"])
    return {
        name: [x for x in records if x["chip"] == name]
        for name in sorted({x["chip"] for x in records})
    }


def choose_records(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each stage the record that counts, by name."""

    def rank(record: dict[str, Any]) -> int:
        return 2 if record["status"] == DONE else int(bool(record["figures"]))

    chosen: dict[str, dict[str, Any]] = {}
    for record in records:
        best = chosen.get(record["stage"])
        if best is None or rank(record) >= rank(best):
            chosen[record["stage"]] = record
    return dict(sorted(chosen.items()))


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one line, by one write."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(record) + "\n").encode())


def drop_half_record(path: Path) -> None:
    """Make the file one that can be added to: cut off a last record that has no end."""
    with path.open("ab") as file:
        size = _whole_size(path)
        file.truncate(size)
        if size and not path.read_bytes().endswith(b"\n"):
            file.write(b"\n")


def _whole_size(path: Path) -> int:
    """Bytes of the file without a last record that has no end; all where it is something else."""
    data = path.read_bytes()
    last = data.rpartition(b"\n")[2]
    is_record = last.startswith(BEGIN.encode()) or BEGIN.encode().startswith(last)
    with contextlib.suppress(ValueError):
        json.loads(last)
        return len(data)
    return len(data) - len(last) if is_record else len(data)


def find_done(
    records: Iterable[dict[str, Any]],
    chip: str,
    commits: Sequence[str],
    expected: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """The newest record of each stage that ended as expected on this chip at one of the commits.

    expected: by stage, where that is not DONE.
    """
    return {
        x["stage"]: x
        for x in records
        if x["status"] == expected.get(x["stage"], DONE)
        and x["chip"] == chip
        and x["commit"] in commits
    }


def describe_others(
    records: Iterable[dict[str, Any]], chip: str, commits: Sequence[str]
) -> str | None:
    """One line about records that do not count, or None."""
    others = sorted(
        {
            (x["chip"], x["commit"])
            for x in records
            if x["chip"] != chip or x["commit"] not in commits
        }
    )
    if not others:
        return None
    names = ", ".join(f"{commit} on {name}" for name, commit in others)
    return (
        f"results of {names} are kept and do not count here. "
        "Those of a commit count with --counts COMMIT."
    )


def read_commit(root: Path) -> str:
    """The checkout's commit, with "+changes" if files differ from it; "unknown" without git."""
    try:
        commit = _git(root, "rev-parse", "--short=10", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
