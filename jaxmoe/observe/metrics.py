# SPDX-License-Identifier: Apache-2.0
"""Metrics on disk: metrics.jsonl, samples.jsonl and TensorBoard. Next: progress.py, plots.py.

One line per step, flushed at once; an evaluation that broke is made up in a line of its own when
the run is resumed. A resumed run first drops the lines past its checkpoint, so a killed run
leaves nothing twice.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxmoe.config.errors import ConfigError
from jaxmoe.config.json_object import parse_json
from jaxmoe.observe.tensorboard import EventFile
from jaxmoe.observe.trackers import Trackers
from jaxmoe.run_files import (
    RunFolderError,
    append,
    make_folder,
    open_to_append,
    remove_leftovers,
    replacing,
)

STAGES = ("warmup", "rl")
SAMPLES_BYTES = 64 * 2**20  # of samples.jsonl: beyond, every other recorded step of it goes
_LARGEST_STEP = 2**53
_LARGEST = 1e100  # of a metric: no scale of a plot takes more


class MetricsLog:
    """Writes a run's metrics; a context manager. `enabled` in one process of a run."""

    def __init__(
        self, directory: Path, *, stage: str, step: int, enabled: bool = True,
        trackers: Sequence[str] = (), project: str = "jaxmoe",
        config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Go on after `step` of `stage`: later lines of an interrupted run are dropped.

        ("warmup", 0) starts the run over: whatever it left in the folder's logs goes.
        Raises ConfigError for a tracker that cannot begin, and where the folder takes no files.
        """
        self._enabled = enabled
        if not enabled:
            return
        last = (STAGES.index(stage), step)
        fresh = last == (0, 0)
        self._boards: dict[str, EventFile] = {}
        self._files = ExitStack()
        self._trackers = Trackers(trackers, directory, project, config or {}, fresh=fresh)
        with ExitStack() as on_error:
            on_error.callback(self._close)
            self._open(directory, last, suffix=f".{stage}{step}")
            on_error.pop_all()

    def _open(self, directory: Path, last: tuple[int, int], *, suffix: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        self._samples_path = directory / "samples.jsonl"
        files = [directory / "metrics.jsonl", self._samples_path]
        self._path = files[0]
        for path in files:
            _keep_until(path, last)
        self._metrics, self._samples = (self._until_closed(open_to_append(f)) for f in files)
        make_folder(directory / "tensorboard")
        for i, name in enumerate(STAGES):  # a folder each: a purge hides all tags of its folder
            folder = directory / "tensorboard" / name
            if (i, 0) >= last:
                shutil.rmtree(folder, ignore_errors=True)
            purge = last[1] + 1 if i == last[0] and last[1] else None
            self._boards[name] = self._until_closed(
                EventFile(folder, suffix=suffix, purge_step=purge)
            )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._enabled:
            self._close()

    def _close(self) -> None:
        with suppress(OSError):  # nothing is buffered: all that was written is there
            self._files.close()
        self._trackers.close()

    def _until_closed(self, file: Any) -> Any:
        self._files.callback(file.close)
        return file

    def must_be_in_place(self) -> None:
        """Raises ConfigError where the run folder was removed, or made anew, since this began."""
        if self._enabled and not (
            self._path.exists() and os.fstat(self._metrics.fileno()).st_nlink
        ):
            raise ConfigError(
                f"the run folder must stay while a run trains in it; {self._path.parent} was "
                "removed, and what was measured since the last checkpoint went with it. The same "
                "command begins anew."
            )

    def write(
        self, stage: str, step: int, metrics: Mapping[str, float], *, alerts: Sequence[str] = ()
    ) -> None:
        """One line; a number that is not finite becomes null and is named in "not_finite".

        Raises RunFolderError where metrics.jsonl cannot be written. Where only TensorBoard's file
        cannot, that is an alert, and it gets no more.
        """
        if not self._enabled:
            return
        alerts = [*alerts, *self._to_board(stage, step, metrics)]
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        clean = {name: None if name in bad else value for name, value in metrics.items()}
        line = {"stage": stage, "step": step, **clean} | ({"not_finite": bad} if bad else {})
        line |= {"alerts": alerts} if alerts else {}
        append(self._metrics, (json.dumps(line, allow_nan=False) + "\n").encode())
        self._trackers.log(stage, step, metrics)

    def _to_board(self, stage: str, step: int, metrics: Mapping[str, float]) -> list[str]:
        if not self._boards:
            return []
        try:
            self._boards[stage].write(step, metrics)
        except RunFolderError as error:
            self._boards = {}
            alert = f"TensorBoard gets no more metrics, metrics.jsonl does: {error.__cause__}"
            print(f"! {alert}", file=sys.stderr, flush=True)
            return [alert]
        return []

    def write_samples(self, stage: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A few prompts with what the policy answered, one line each; the file keeps a bound.

        Raises RunFolderError where it cannot be written.
        """
        if not self._enabled:
            return
        lines = [json.dumps({"stage": stage, "step": step, **row}) + "\n" for row in rows]
        append(self._samples, "".join(lines).encode())
        if self._samples.tell() > SAMPLES_BYTES:
            self._samples.close()
            kept = list(_lines(self._samples_path))
            gone = set(sorted({_place(row) for _, row in kept})[1:-1:2])
            _replace(self._samples_path, [line for line, row in kept if _place(row) not in gone])
            self._samples = self._until_closed(open_to_append(self._samples_path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of metrics.jsonl, or none where there is no file.

    What is no number in them, and no list of alerts, is left out: the file may be anybody's.
    Raises ConfigError where it cannot be read.
    """
    return [
        {name: value for name, value in row.items() if name in _NO_METRICS or _is_metric(value)}
        for row in read_samples(path)
    ]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """All complete lines of samples.jsonl as they are; whatever they hold beside stage and step.

    Raises ConfigError where it cannot be read.
    """
    return [row for _, row in _lines(path)]


_NO_METRICS = ("stage", "step", "alerts", "not_finite")


def _is_metric(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= _LARGEST)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(the line, what it holds) of each complete one that names a step."""
    if not path.is_file():
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} must be readable; {error}. Try chmod u+r on it.") from error
    for line in content.split(b"\n"):
        try:
            row = parse_json(line.decode("utf-8", "replace"))
        except ValueError:
            continue  # the line a killed run was writing, or none of ours
        step = isinstance(row, dict) and row.get("stage") in STAGES and row.get("step")
        if type(step) is int and 0 <= step < _LARGEST_STEP:  # no note of somebody's own
            yield line, row


def accuracy(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last score of the held-out rows, sampled and greedy, in words."""
    scored = [row for row in rows if row.get("eval/accuracy") is not None]
    if not scored:
        return "not known: nothing was scored"
    first, last = scored[0], scored[-1]
    sampled, greedy = (
        f"{first[name]:.3f} -> {last[name]:.3f}" if last.get(name) is not None else "none"
        for name in ("eval/accuracy", "eval/accuracy_greedy")
    )
    return (
        f"{sampled} sampled, {greedy} greedy, on the held-out rows "
        f"(steps {first['step']} -> {last['step']})"
    )


def _place(row: Mapping[str, Any]) -> tuple[int, int]:
    return STAGES.index(row["stage"]), row["step"]


def _keep_until(path: Path, last: tuple[int, int]) -> None:
    if not path.is_file():
        return
    kept = [line for line, row in _lines(path) if _place(row) <= last]
    if last == (0, 0):
        kept = []  # nothing was saved: the run starts over
    _replace(path, kept)


def _replace(path: Path, lines: Sequence[bytes]) -> None:
    """Lines stay as they were written: what was read need not fit into JSON again."""
    with replacing(path, durable=True) as file:
        file.writelines(line + b"\n" for line in lines)
