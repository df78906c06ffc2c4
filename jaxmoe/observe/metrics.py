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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX import SummaryWriter

from jaxmoe.observe.trackers import Trackers

STAGES = ("warmup", "rl")
SAMPLES_BYTES = 64 * 2**20  # of samples.jsonl: beyond, every other recorded step of it goes


class MetricsLog:
    """Writes a run's metrics; a context manager. `enabled` in one process of a run."""

    def __init__(
        self, directory: Path, *, stage: str, step: int, enabled: bool = True,
        trackers: Sequence[str] = (), project: str = "jaxmoe",
        config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Go on after `step` of `stage`: later lines of an interrupted run are dropped.

        ("warmup", 0) starts the run over: whatever it left in the folder's logs goes.
        Raises ConfigError for a tracker that cannot begin.
        """
        self._enabled = enabled
        if not enabled:
            return
        last = (STAGES.index(stage), step)
        fresh = last == (0, 0)
        self._trackers = Trackers(trackers, directory, project, config or {}, fresh=fresh)
        directory.mkdir(parents=True, exist_ok=True)
        files = [directory / "metrics.jsonl", directory / "samples.jsonl"]
        for path in files:
            _keep_until(path, last)
        self._metrics, self._samples = (open(path, "a", encoding="utf-8") for path in files)
        self._boards = {}
        for i, name in enumerate(STAGES):  # a folder each: a purge hides all tags of its folder
            folder = directory / "tensorboard" / name
            if (i, 0) >= last:
                shutil.rmtree(folder, ignore_errors=True)
            purge = step + 1 if i == last[0] and step else None
            self._boards[name] = SummaryWriter(
                str(folder), purge_step=purge, filename_suffix=f".{stage}{step}"
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
            self._metrics.close()
            self._samples.close()
            for board in self._boards.values():
                board.close()
            self._trackers.close()

    def write(
        self, stage: str, step: int, metrics: Mapping[str, float], *, alerts: Sequence[str] = ()
    ) -> None:
        """One line; a number that is not finite becomes null and is named in "not_finite"."""
        if not self._enabled:
            return
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        clean = {name: None if name in bad else value for name, value in metrics.items()}
        line = {"stage": stage, "step": step, **clean} | ({"not_finite": bad} if bad else {})
        line |= {"alerts": list(alerts)} if alerts else {}
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._metrics.flush()
        for name, value in metrics.items():
            self._boards[stage].add_scalar(name, value, step)
        self._boards[stage].flush()
        self._trackers.log(stage, step, metrics)

    def write_samples(self, stage: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A few prompts with what the policy answered, one line each; the file keeps a bound."""
        if not self._enabled:
            return
        for row in rows:
            self._samples.write(json.dumps({"stage": stage, "step": step, **row}) + "\n")
        self._samples.flush()
        if self._samples.tell() > SAMPLES_BYTES:
            path = Path(self._samples.name)
            self._samples.close()
            kept = read_metrics(path)
            gone = sorted({(r["stage"], r["step"]) for r in kept})[1:-1:2]
            _replace(path, [r for r in kept if (r["stage"], r["step"]) not in gone])
            self._samples = open(path, "a", encoding="utf-8")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; none where there is no file."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line a killed run was writing
        step = isinstance(row, dict) and row.get("stage") in STAGES and row.get("step")
        if type(step) is int:  # no note of somebody's own
            rows.append(row)
    return rows


def accuracy(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last one on the held-out rows, sampled and greedy, in words."""
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


def _keep_until(path: Path, last: tuple[int, int]) -> None:
    if not path.is_file():
        return
    rows = read_metrics(path)
    kept = [row for row in rows if (STAGES.index(row["stage"]), row["step"]) <= last]
    if last == (0, 0):
        kept = []  # nothing was saved: the run starts over
    _replace(path, kept)


def _replace(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)
