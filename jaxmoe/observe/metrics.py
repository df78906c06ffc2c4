# SPDX-License-Identifier: Apache-2.0
"""Metrics on disk: metrics.jsonl, samples.jsonl and TensorBoard. Next: progress.py, plots.py.

One line per step, flushed at once. A resumed run first drops the lines past its checkpoint, so a
killed run leaves no step twice.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX import SummaryWriter

STAGES = ("warmup", "rl")


class MetricsLog:
    """Writes a run's metrics; a context manager. Only process 0 gives it a folder that counts."""

    def __init__(
        self, directory: Path, *, stage: str = "warmup", step: int = 0, enabled: bool = True
    ) -> None:
        """Go on after `step` of `stage`: later lines of an interrupted run are dropped."""
        self._enabled = enabled
        if not enabled:
            return
        directory.mkdir(parents=True, exist_ok=True)
        files = [directory / "metrics.jsonl", directory / "samples.jsonl"]
        for path in files:
            _keep_until(path, (STAGES.index(stage), step))
        self._metrics, self._samples = (open(path, "a", encoding="utf-8") for path in files)
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=None)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._enabled:
            self._metrics.close()
            self._samples.close()
            self._board.close()

    def write(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """One line; a number that is not finite becomes null and is named in "not_finite"."""
        if not self._enabled:
            return
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        clean = {name: None if name in bad else value for name, value in metrics.items()}
        line = {"stage": stage, "step": step, **clean} | ({"not_finite": bad} if bad else {})
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._metrics.flush()
        for name, value in metrics.items():
            self._board.add_scalar(name if stage == "rl" else f"{stage}/{name}", value, step)
        self._board.flush()

    def write_samples(self, stage: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A few prompts with what the policy answered, one line each."""
        if not self._enabled:
            return
        for row in rows:
            self._samples.write(json.dumps({"stage": stage, "step": step, **row}) + "\n")
        self._samples.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; none where there is no file."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the line a killed run was writing
    return rows


def _keep_until(path: Path, last: tuple[int, int]) -> None:
    if not path.is_file():
        return
    rows = read_metrics(path)
    kept = [row for row in rows if (STAGES.index(row["stage"]), row["step"]) <= last]
    if last == (0, 0):
        kept = []  # nothing was saved: the run starts over
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    os.replace(temporary, path)
