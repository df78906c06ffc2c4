# SPDX-License-Identifier: Apache-2.0
"""One run of a contender by the train command, in a folder of its own.

Next: jaxmoe/train.py.
"""

import contextlib
import hashlib
import json
import re
from pathlib import Path

from jaxmoe import train
from jaxmoe.cli import INTERRUPTED
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.study.contenders import Contender


def train_config(
    config: str, contender: Contender, rate: float | None, seed: int, *, folder: Path
) -> dict[str, float]:
    """Train `config` with the contender's settings; the metrics of its last evaluated step.

    The run folder is `contender_folder`. The command's output goes to train.log there. An
    interrupted run resumes.
    Raises RuntimeError where the command fails, and KeyboardInterrupt where Ctrl-C stopped it.
    """
    workdir = contender_folder(config, contender, rate, seed, folder=folder)
    workdir.mkdir(parents=True, exist_ok=True)
    argv = ["--config", config, "--workdir", str(workdir)]
    for setting in _contender_settings(contender, rate, seed):
        argv += ["--set", setting]
    with (workdir / "train.log").open("a") as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            status = train.main(argv)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise RuntimeError(
            f"the run of {contender.name}, seed {seed}, must end with exit status 0, got "
            f"{status}; {workdir / 'train.log'} says why."
        )
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if "eval/accuracy" in row]
    return {key: float(x) for key, x in rows[-1].items() if isinstance(x, int | float)}


def contender_folder(
    config: str, contender: Contender, rate: float | None, seed: int, *, folder: Path
) -> Path:
    """Return the run folder of `train_config`, in `folder`.

    Its name has a digest of the config's name and all settings, so that other settings are another
    run.
    """
    settings = _contender_settings(contender, rate, seed)
    digest = hashlib.sha256(json.dumps([config, contender.name, *settings]).encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9.]+", "_", f"{contender.name}_{rate}_{seed}")
    return folder / f"{name[:80]}-{digest[:12]}"


def _contender_settings(contender: Contender, rate: float | None, seed: int) -> list[str]:
    settings = [*contender.settings, f"seed={seed}"]
    if rate is not None:
        # repr keeps every digit of the rate.
        settings.append(f"optim.lr={rate!r}")
    return settings
