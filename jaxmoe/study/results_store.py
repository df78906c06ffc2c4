# SPDX-License-Identifier: Apache-2.0
"""Results of finished runs, one JSON line each, so that an interrupted study continues.

Next: jaxmoe/study/contenders.py.
"""

import functools
import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmoe.checkpoint.run import describe_commit
from jaxmoe.run_files import append_bytes, open_to_append

_MEASURED = ("commit", "seconds", "result")  # fields of a line that are not of the run's key


class ResultsStore:
    """Results by the key of the run, such as its config and its seed; in memory without a path.

    The key must say everything that the result depends on: a result is never computed again. A line
    has the fields of the key, the commit that ran, its CPU seconds, and the result. Lines of
    `path`.gz are read too, and new ones are appended to `path`.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read the lines. A last line that a killed process left unfinished is dropped.

        Raises ValueError for a file with anything else.
        """
        self._path = path
        self._results: dict[str, Any] = {}
        self._seconds: list[float] = []
        if path is not None:
            for line in _read_lines(path):
                key = {name: x for name, x in line.items() if name not in _MEASURED}
                self._results[_format_key(key)] = line["result"]
                if line["seconds"] is not None:
                    self._seconds.append(line["seconds"])

    def __len__(self) -> int:
        return len(self._results)

    def describe_missing(self, planned: int, run_seconds: float) -> str:
        """Say how many of the planned runs are stored, and about how long the others take.

        run_seconds: CPU seconds of a run, until one is stored; then the stored ones' median.
        """
        seconds = statistics.median(self._seconds) if self._seconds else run_seconds
        hours = max(0, planned - len(self)) * seconds / 3600
        return (
            f"{len(self)} runs are stored, of about {planned}; {seconds:.0f} CPU seconds each: "
            f"about {hours:.1f} hours of one core are left"
        )

    @functools.cached_property
    def _commit(self) -> str | None:
        return describe_commit()

    def get_or_run(self, key: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """The stored result of `key`; otherwise that of `run`, which is stored."""
        name = _format_key(key)
        if name not in self._results:
            start = time.process_time()
            result = run()
            seconds = round(time.process_time() - start, 2)
            if self._path is not None:
                line = {**key, "commit": self._commit, "seconds": seconds, "result": result}
                # Written after every run, so that a kill loses only the run in progress.
                with open_to_append(self._path) as file:
                    append_bytes(file, (json.dumps(line) + "\n").encode())
            self._results[name] = result
            self._seconds.append(seconds)
        return self._results[name]


def _format_key(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    packed = path.with_name(path.name + ".gz")
    for file in (packed, path):
        if not file.is_file():
            continue
        content = gzip.decompress(file.read_bytes()) if file == packed else file.read_bytes()
        complete = content.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in content[:complete].splitlines()]
            if not all(line.keys() >= set(_MEASURED) for line in lines):
                raise ValueError("a line lacks one of " + ", ".join(_MEASURED))
        except (ValueError, AttributeError) as error:
            raise ValueError(
                f"{file} must hold the results of a study, one JSON line a run; {error}. Move it "
                "away to begin anew."
            ) from error
        if complete < len(content) and file == path:
            # Otherwise the next line would be appended to the rest of the unfinished one.
            with file.open("r+b") as opened:
                opened.truncate(complete)
        yield from lines
