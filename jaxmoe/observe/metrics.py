# SPDX-License-Identifier: Apache-2.0
"""Write metrics.jsonl, layers.jsonl, samples.jsonl and TensorBoard's files. Next: plots.py.

One line per step, written at once. If an evaluation failed, the resumed run repeats it and writes
a separate line. A resumed run first drops the lines after its checkpoint, so that no step is in
the files twice. A tracker keeps what it got, so one that has such steps gets a new run.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from jaxmoe.config.errors import ConfigError
from jaxmoe.config.json_object import parse_json
from jaxmoe.observe.tensorboard import EventFile
from jaxmoe.observe.trackers import Trackers
from jaxmoe.run_files import (
    RunFolderError,
    append_bytes,
    make_folder,
    open_to_append,
    remove_leftovers,
    replace_file,
)

STAGES = ("warmup", "rl")
MAX_SAMPLES_BYTES = 64 * 2**20  # a larger samples.jsonl loses every second recorded step
_METRICS = "metrics.jsonl"
_MAX_STEP = 2**53
_MAX_ABS_VALUE = 1e100  # larger values do not fit on the axis of a plot


class MetricsLog:
    """Writes a run's metrics; a context manager. Only one process of a run is `enabled`."""

    def __init__(
        self,
        directory: Path,
        *,
        stage: str,
        step: int,
        enabled: bool = True,
        trackers: Sequence[str] = (),
        project: str = "jaxmoe",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue after `step` of `stage`; later lines of an interrupted run are dropped.

        Step 0 starts the run over: no checkpoint is of step 0, so none was restored, and any
        setting may have changed. Existing logs in the folder are then deleted.
        Raises: ConfigError for a tracker that cannot start, and if the folder is not writable.
        """
        self._enabled = enabled
        if not enabled:
            return
        last = (STAGES.index(stage), step)
        self._boards: dict[str, EventFile] = {}
        self._files = ExitStack()
        self._trackers = Trackers(
            trackers,
            directory,
            project,
            config or {},
            fresh=step == 0,
            # The trackers have these steps, which are made again after a kill.
            repeats=any(_row_position(row) > last for row in read_samples(directory / _METRICS)),
        )
        with ExitStack() as on_error:
            # If one of the files cannot be opened, those before it are closed.
            on_error.callback(self._close_files, failed=True)
            self._open_files(directory, last, suffix=f".{stage}{step}")
            on_error.pop_all()

    def _open_files(self, directory: Path, last: tuple[int, int], *, suffix: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        self._samples_path = directory / "samples.jsonl"
        files = [directory / _METRICS, self._samples_path]
        self._path = files[0]
        for path in files:
            # Before the file is opened to append, because this replaces it and an open file would
            # be the old one.
            _drop_lines_after(path, last)
        self._metrics, self._samples = (self._until_closed(open_to_append(f)) for f in files)
        self._layers, self._layers_path = None, directory / "layers.jsonl"
        _drop_lines_after(self._layers_path, last)
        make_folder(directory / "tensorboard")
        # The stages have separate folders, because a purge hides all tags of its folder.
        for i, name in enumerate(STAGES):
            folder = directory / "tensorboard" / name
            if not last[1] or i > last[0]:
                shutil.rmtree(folder, ignore_errors=True)
            purge = last[1] + 1 if i == last[0] and last[1] else None
            self._boards[name] = self._until_closed(
                EventFile(folder, suffix=suffix, purge_step=purge)
            )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if self._enabled:
            self._close_files(failed=kind is not None)

    def _close_files(self, *, failed: bool) -> None:
        # Nothing is buffered, so no data is lost.
        with suppress(OSError):
            self._files.close()
        self._trackers.close(failed=failed)

    def _until_closed(self, file: Any) -> Any:
        self._files.callback(file.close)
        return file

    def check_in_place(self) -> None:
        """Raise ConfigError if the run folder was removed or replaced since the start."""
        # A file that was deleted while it is open has no link left.
        if self._enabled and not (
            self._path.exists() and os.fstat(self._metrics.fileno()).st_nlink
        ):
            raise ConfigError(
                f"the run folder must not be removed while a run trains in it; {self._path.parent} "
                "was removed, with the metrics since the last checkpoint. The same command starts "
                "again."
            )

    def write(
        self, stage: str, step: int, metrics: Mapping[str, float], *, alerts: Sequence[str] = ()
    ) -> None:
        """Write one line; a non-finite number becomes null and is listed in "not_finite".

        Raises: RunFolderError if metrics.jsonl cannot be written. If only TensorBoard's file
            cannot be written, this adds an alert and stops writing to it.
        """
        if not self._enabled:
            return
        alerts = [*alerts, *self._to_board(stage, step, metrics)]
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        clean = {name: None if name in bad else value for name, value in metrics.items()}
        # Nothing in the metrics replaces the position, which a resume reads.
        position = {"stage": stage, "step": step}
        line: dict[str, Any] = position | clean | position
        line |= {"not_finite": bad} if bad else {}
        line |= {"alerts": alerts} if alerts else {}
        append_bytes(self._metrics, (json.dumps(line, allow_nan=False) + "\n").encode())
        self._trackers.log(stage, step, metrics)

    def write_layers(self, stage: str, step: int, layers: Mapping[str, Sequence[float]]) -> None:
        """Write the metrics by layer of one step to layers.jsonl; nothing if there are none.

        Raises: RunFolderError if the file cannot be written.
        """
        if not self._enabled or not layers:
            return
        if self._layers is None:
            self._layers = self._until_closed(open_to_append(self._layers_path))
        line = json.dumps({"stage": stage, "step": step, **layers}, allow_nan=False)
        append_bytes(self._layers, (line + "\n").encode())

    def _to_board(self, stage: str, step: int, metrics: Mapping[str, float]) -> list[str]:
        if not self._boards:
            return []
        try:
            self._boards[stage].write(step, metrics)
        except RunFolderError as error:
            self._boards = {}
            alert = f"TensorBoard logging stopped; metrics.jsonl continues: {error.__cause__}"
            print(f"! {alert}", file=sys.stderr, flush=True)
            return [alert]
        return []

    def write_samples(self, stage: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write prompts with the policy's answers, one line each; the file size is bounded.

        Raises: RunFolderError if the file cannot be written.
        """
        if not self._enabled:
            return
        lines = [json.dumps({"stage": stage, "step": step, **row}) + "\n" for row in rows]
        append_bytes(self._samples, "".join(lines).encode())
        if self._samples.tell() > MAX_SAMPLES_BYTES:
            self._samples.close()
            recorded = list(_read_lines(self._samples_path))
            dropped = set(sorted({_row_position(row) for _, row in recorded})[1:-1:2])
            _rewrite_lines(
                self._samples_path,
                [line for line, row in recorded if _row_position(row) not in dropped],
            )
            self._samples = self._until_closed(open_to_append(self._samples_path))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of metrics.jsonl; [] if there is no file.

    The file is untrusted: values that are not numbers, other than alerts, are dropped.
    Raises: ConfigError if it cannot be read.
    """
    return [
        {name: value for name, value in row.items() if name in _RESERVED_KEYS or _is_metric(value)}
        for row in read_samples(path)
    ]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """All complete lines of samples.jsonl; only stage and step are checked.

    Raises: ConfigError if it cannot be read.
    """
    return [row for _, row in _read_lines(path)]


_RESERVED_KEYS = ("stage", "step", "alerts", "not_finite")


def _is_metric(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) <= _MAX_ABS_VALUE)


def _read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line, parsed row) of each complete line with a valid stage and step."""
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
            continue  # an incomplete line of a killed run, or not our line
        step = isinstance(row, dict) and row.get("stage") in STAGES and row.get("step")
        if type(step) is int and 0 <= step < _MAX_STEP:  # else not our line
            yield line, row


def format_accuracy(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line with the first and the last score of the held-out rows, sampled and greedy."""
    scored = [row for row in rows if row.get("eval/accuracy") is not None]
    if not scored:
        return "unknown: no evaluation was logged"
    first, last = scored[0], scored[-1]
    sampled, greedy = (
        f"{first[name]:.3f} -> {last[name]:.3f}" if last.get(name) is not None else "none"
        for name in ("eval/accuracy", "eval/accuracy_greedy")
    )
    return (
        f"{sampled} sampled, {greedy} greedy, on the held-out rows "
        f"(steps {first['step']} -> {last['step']})"
    )


def _row_position(row: Mapping[str, Any]) -> tuple[int, int]:
    return STAGES.index(row["stage"]), row["step"]


def _drop_lines_after(path: Path, last: tuple[int, int]) -> None:
    if not path.is_file():
        return
    # After step 0 of a stage nothing was saved, so the run starts over.
    recorded = _read_lines(path) if last[1] else ()
    _rewrite_lines(path, [line for line, row in recorded if _row_position(row) <= last])


def _rewrite_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Rewrite a file with the original bytes of its lines, since parsing may lose information."""
    with replace_file(path, durable=True) as file:
        file.writelines(line + b"\n" for line in lines)
