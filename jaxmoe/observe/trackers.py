# SPDX-License-Identifier: Apache-2.0
"""The same metrics for Weights & Biases and Trackio, by `observe.to`; imported only when asked.

Both run offline (WANDB_MODE=offline; Trackio by itself). What goes wrong there while a run trains
is told once, and the run goes on: metrics.jsonl has everything.
Next: jaxmoe/observe/metrics.py writes to them.
"""

import re
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.run_files import replace_text

ID = "tracker_id"  # a file in the run folder: a resumed run is the same run there


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
    ) -> None:
        """Open them. `fresh`: the run starts over, and is another one there.

        Raises ConfigError for one that is not installed, or cannot begin.
        """
        installed(names)
        self._directory, self._open = directory, {}
        if not names:
            return
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / ID
        if fresh or not file.is_file():
            replace_text(file, uuid.uuid4().hex[:12], durable=True)
        run = _run_id(file)
        title = f"{directory.resolve().name}-{run}"
        begin = {"wandb": _wandb, "trackio": _trackio}
        for name in names:
            try:
                self._open[name] = begin[name](directory, project, title, run, dict(config))
            except Exception as error:
                self.close()
                why = str(error).strip().partition("\n")[0]
                raise ConfigError(
                    f"observe.to={name} must be able to begin a run; {type(error).__name__}: "
                    f"{why}. Try WANDB_MODE=offline before the command, or --set observe.to=''."
                ) from error

    def log(self, stage: str, step: int, metrics: Mapping[str, float]) -> None:
        """A step's metrics; those of the warm start under warmup/."""
        before = "" if stage == "rl" else f"{stage}/"
        found = {f"{before}{name}": value for name, value in metrics.items()}
        self._each(lambda tracker: tracker.log({f"{before}step": step, **found}, step))

    def close(self) -> None:
        """Send the plots that there are, and end."""
        plots = sorted((self._directory / "plots").glob("*.png"))
        if plots:
            self._each(lambda t: t.log({f"plots/{p.stem}": t.image(p) for p in plots}, None))
        self._each(lambda tracker: tracker.finish())
        self._open = {}

    def _each(self, do: Callable[[Any], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                do(tracker)
            except Exception as error:
                del self._open[name]
                print(
                    f"! {name} gets no more metrics, metrics.jsonl does: {error!r}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip


def _run_id(file: Path) -> str:
    try:
        run = file.read_bytes().decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(f"{file} must be readable; {error}. Try rm {file}") from error
    if re.fullmatch(r"[0-9a-f]{12}", run) is None:
        raise ConfigError(
            f"{file} must hold 12 hexadecimal digits, the run's name at its trackers, got "
            f"{run[:40]!r}. Remove it, and the run goes on there under a new name: rm {file}"
        )
    return run


def installed(names: Sequence[str]) -> None:
    """Raises ConfigError for a tracker that is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"observe.to={name} must be installed, and is not. Try pip install {name}, or "
                "--set observe.to=''."
            )


class _wandb:
    def __init__(
        self, directory: Path, project: str, title: str, run: str, config: dict[str, Any]
    ) -> None:
        self._module = import_module("wandb")
        self._run = self._module.init(
            project=project, name=title, id=run, resume="allow", dir=str(directory), config=config,
            settings=self._module.Settings(console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("warmup/*", step_metric="warmup/step")

    def log(self, values: dict[str, Any], _step: int | None) -> None:
        self._run.log(values)

    def image(self, path: Path) -> Any:
        return self._module.Image(str(path))

    def finish(self) -> None:
        self._run.finish()


class _trackio:
    def __init__(
        self, directory: Path, project: str, title: str, run: str, config: dict[str, Any]
    ) -> None:
        self._module = import_module("trackio")
        self._last = 0
        self._run = self._module.init(project=project, name=title, config=config, resume="allow")

    def log(self, values: dict[str, Any], step: int | None) -> None:
        self._last = self._last if step is None else step
        told = {n: value for n, value in values.items() if n.rpartition("/")[2] != "step"}
        self._run.log(told, step=self._last)  # Trackio keeps the name for itself

    def image(self, path: Path) -> Any:
        return self._module.Image(str(path))

    def finish(self) -> None:
        self._module.finish()
