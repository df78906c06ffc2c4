# SPDX-License-Identifier: Apache-2.0
"""Send metrics to Weights & Biases and Trackio (`observe.to`); imported only if used.

Both can run offline (WANDB_MODE=offline; Trackio always). An error of a tracker during training
is printed once, and the run continues without it: metrics.jsonl has all metrics. If a run was
killed and resumes before steps that were sent, these are sent again: to a new run of the trackers.
Next: jaxmoe/observe/metrics.py uses it.
"""

import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.run_files import replace_text

# A file in the run folder, so that a resumed run continues the same run of its trackers.
ID_FILE = "tracker_id"


class Trackers:
    """The trackers of one run, by name; each has `init`, `log`, `Image` and `finish`."""

    def __init__(
        self,
        names: Sequence[str],
        directory: Path,
        project: str,
        config: Mapping[str, Any],
        *,
        fresh: bool,
        repeats: bool,
    ) -> None:
        """Start the trackers.

        fresh: True if the run starts over; the trackers then get a new run.
        repeats: True if steps that were sent are made again; the trackers then get a new run too,
            which a line says.
        Raises: ConfigError for a tracker that is not installed or cannot start.
        """
        check_installed(names)
        self._directory, self._open = directory, {}
        file = directory / ID_FILE
        if not names:
            if fresh or repeats:
                # A later start with trackers would continue the old run.
                with suppress(OSError):
                    file.unlink()
            return
        directory.mkdir(parents=True, exist_ok=True)
        if repeats and not fresh and file.is_file():
            print(
                "trackers begin another run, since steps that they have are made again", flush=True
            )
        if fresh or repeats or not file.is_file():
            replace_text(file, uuid.uuid4().hex[:12], durable=True)
        run = _read_run_id(file)
        title = f"{directory.resolve().name}-{run}"
        begin = {"wandb": _wandb, "trackio": _trackio}
        for name in names:
            try:
                self._open[name] = begin[name](directory, project, title, run, dict(config))
            except Exception as error:
                self.close(failed=True)
                reason = str(error).strip().partition("\n")[0]
                raise ConfigError(
                    f"observe.to={name} must be able to start a run; {type(error).__name__}: "
                    f"{reason}. Try WANDB_MODE=offline before the command, or --set observe.to=''."
                ) from error

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics; those of the warm start get the prefix warmup/."""
        prefix = "" if stage == "rl" else f"{stage}/"
        prefixed = {f"{prefix}{name}": value for name, value in metrics.items()}
        self._call_trackers(lambda tracker: tracker.log({f"{prefix}step": step, **prefixed}, step))

    def close(self, *, failed: bool) -> None:
        """Send the existing plots and finish.

        failed: True if the run ended with an exception, such as that of a stop signal.
        """
        plots = sorted((self._directory / "plots").glob("*.png"))
        if plots:
            self._call_trackers(
                lambda t: t.log({f"plots/{p.stem}": t.image(p) for p in plots}, None)
            )
        self._call_trackers(lambda tracker: tracker.finish(failed))
        self._open = {}

    def _call_trackers(self, action: Callable[[Any], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._open[name]
                print(
                    f"! {name} logging stopped; metrics.jsonl continues: {error!r}",
                    file=sys.stderr,
                    flush=True,
                )


def _read_run_id(file: Path) -> str:
    try:
        run = file.read_bytes().decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(f"{file} must be readable; {error}. Try rm {file}") from error
    if re.fullmatch(r"[0-9a-f]{12}", run) is None:
        raise ConfigError(
            f"{file} must hold 12 hexadecimal digits, the run's id at its trackers, got "
            f"{run[:40]!r}. Remove it to continue as a new tracker run: rm {file}"
        )
    return run


def check_installed(names: Sequence[str]) -> None:
    """Raise ConfigError if a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"observe.to={name} needs the package {name}, which is not installed. "
                f"Try pip install {name}, or --set observe.to=''."
            )


class _wandb:
    def __init__(
        self, directory: Path, project: str, title: str, run: str, config: dict[str, Any]
    ) -> None:
        self._module = import_module("wandb")
        self._run = self._module.init(
            project=project,
            name=title,
            id=run,
            resume="allow",
            dir=str(directory),
            config=config,
            settings=self._module.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("warmup/*", step_metric="warmup/step")

    def log(self, values: dict[str, Any], _step: int | None) -> None:
        self._run.log(values)

    def image(self, path: Path) -> Any:
        return self._module.Image(str(path))

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _trackio:
    def __init__(
        self, directory: Path, project: str, title: str, run: str, config: dict[str, Any]
    ) -> None:
        self._module = import_module("trackio")
        self._last = 0
        self._run = self._module.init(project=project, name=title, config=config, resume="allow")

    def log(self, values: dict[str, Any], step: int | None) -> None:
        self._last = self._last if step is None else step
        logged = {n: value for n, value in values.items() if n.rpartition("/")[2] != "step"}
        self._run.log(logged, step=self._last)  # Trackio reserves the name "step"

    def image(self, path: Path) -> Any:
        return self._module.Image(str(path))

    def finish(self, _failed: bool) -> None:
        self._module.finish()  # Trackio does not mark a run as failed
