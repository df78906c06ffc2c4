# SPDX-License-Identifier: Apache-2.0
"""Records of a campaign: one JSON object a line, appended as stages end.

A record is of one chip and one commit. Stages that are done on this chip at this commit are
skipped; records of other commits and chips are kept and do not count. Next: page.py.
"""

import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DONE = "done"
FIELDS = ("stage", "status", "figures", "seconds", "chip", "commit", "date", "command")


class Machine(NamedTuple):
    """What figures depend on beside the code."""

    chip: str
    driver: str
    jax: str
    clocks: str


class BadRecords(ValueError):
    """A file that should hold records has something else; one line for the user."""


def load_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file; none if it does not exist. Raises BadRecords."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
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


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Add one line, complete or not at all for a reader that comes later."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()


def is_complete(path: Path) -> bool:
    """False if the file ends in the middle of a line, as after a kill -9 or a full disk."""
    return not path.exists() or path.stat().st_size == 0 or path.read_bytes().endswith(b"\n")


def find_done(
    records: Iterable[dict[str, Any]], chip: str, commits: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The newest record of each stage that is done on this chip at one of the commits."""
    return {
        x["stage"]: x
        for x in records
        if x["status"] == DONE and x["chip"] == chip and x["commit"] in commits
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
