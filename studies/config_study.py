# SPDX-License-Identifier: Apache-2.0
"""Studies of configs by the train command: contenders, their runs and the table.

Next: studies/turns.py and studies/teachers.py.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint.hf import save_params
from jaxmoe.checkpoint.teacher_weights import find_teacher, teacher_digest
from jaxmoe.config import Config, require
from jaxmoe.config_file import load_config, override
from jaxmoe.data.tokenizer import write_byte_tokenizer
from jaxmoe.model import init_params
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.study.contenders import (
    Comparison,
    Contender,
    compare_values,
    run_study,
)
from jaxmoe.study.results_store import ResultsStore
from jaxmoe.study.tables import format_chances, format_comparisons, format_table
from jaxmoe.study.train_config import contender_folder, train_config


@dataclass(frozen=True)
class ConfigStudy:
    """A study of one config.

    contenders: the first is the baseline.
    settings: of all contenders.
    tuning_seeds: that choose rates, used in turn; one is cheap and can mislead.
    run_seconds: of a run, for the estimate before the first one.
    teacher: the config whose run is their teacher.
    format_more: (comparisons) -> one more table; None for a study without it.
    """

    name: str
    about: str
    config: str
    contenders: Sequence[Contender]
    settings: tuple[str, ...] = ()
    seeds: int = 8
    tuning_seeds: int = 8
    run_seconds: float = 90.0
    teacher: str = ""
    format_more: Callable[[Sequence[Comparison]], str] | None = None


# A trial of everything in three minutes, whose figures mean nothing.
QUICK_SEEDS = 2
QUICK_SETTINGS = (
    *("warmup.steps=2", "steps=2", "eval.every_steps=2", "save.every_steps=2"),
    *("data.train_rows=64", "data.held_out_rows=16"),
    *("rollout.sequences_per_step=16", "rollout.max_gen_batches=1"),
)


def make_quick(study: ConfigStudy, folder: Path) -> ConfigStudy:
    """Return the study with two contenders of one rate and little training.

    Its teacher, in `folder`, has not been trained.
    """
    settings = (*study.settings, *QUICK_SETTINGS)
    if study.teacher:
        settings = (*settings, f"distill.teacher={folder / 'teacher'}")
    # One rate, because a run's programs are compiled for it.
    contenders = [replace(c, rates=c.rates[:1]) for c in study.contenders[1:3]]
    return replace(
        study, contenders=contenders, settings=settings, seeds=QUICK_SEEDS, tuning_seeds=1
    )


def write_untrained_teacher(study: ConfigStudy, folder: Path) -> None:
    """Write the teacher of `make_quick`, once."""

    def add_files(directory: Path) -> None:
        write_byte_tokenizer(directory)

    path = folder / "teacher"
    if study.teacher and not path.is_dir():
        model = load_config(study.teacher).model
        params = jax.jit(partial(init_params, cfg=model))(jax.random.key(0))
        save_params(params, model, path, dtype="float32", add_files=add_files)


def run_config_study(
    study: ConfigStudy,
    folder: Path,
    *,
    store: ResultsStore,
    max_rates: int = 8,
    report: Callable[[str], None] = print,
) -> list[Comparison]:
    """Train all contenders in `folder`; finished runs are in `store` and are not repeated.

    Raises ConfigError, before the first run, for settings that cannot work, and for a teacher that
    is missing or is not that of the finished runs.
    """

    # Only where a run is missing: tables are made from stored results without a teacher.
    @functools.cache
    def check_contenders() -> None:
        for contender in study.contenders:
            cfg = override(load_config(study.config), *study.settings, *contender.settings)
            if cfg.distill.has_folder:
                check_stored_teacher(cfg, store)

    def run(contender: Contender, rate: float | None, seed: int) -> dict[str, Any]:
        check_contenders()
        contender = Contender(contender.name, (*study.settings, *contender.settings))
        last = train_config(study.config, contender, rate, seed, folder=folder)
        workdir = contender_folder(study.config, contender, rate, seed, folder=folder)
        # Programs of finished runs would fill the memory.
        jax.clear_caches()
        evaluated = {name: x for name, x in last.items() if name.startswith("eval/")}
        path = workdir / "metrics.jsonl"
        return {
            "accuracy": last["eval/accuracy"],
            "evaluated": evaluated,
            "alerts": find_first_alerts(path),
            **read_curves(path),
        }

    return run_study(
        study.contenders,
        run,
        name=" ".join((study.config, *study.settings)),
        store=store,
        seeds=study.seeds,
        measure="accuracy",
        tuning_seeds=min(study.tuning_seeds, study.seeds),
        max_rates=max_rates,
        report=report,
    )


def check_stored_teacher(cfg: Config, store: ResultsStore) -> None:
    """Store the digest of a teacher's weights. Raises ConfigError if another one is stored."""
    digest = teacher_digest(find_teacher(cfg))
    stored = store.get_or_run({"weights of": cfg.distill.teacher}, lambda: digest)
    require(
        digest == stored,
        f"the teacher must be that of the finished runs, {stored}; {cfg.distill.teacher} is "
        f"{digest}. Try --out with another folder, or --set distill.teacher=DIRECTORY.",
    )


def read_curves(path: Path) -> dict[str, list[list[float]]]:
    """Return [step, seconds, reward] of each RL step, and [step, seconds, accuracy] where it is
    evaluated. Seconds are those of sampling and training since the first step, which compiles."""
    rewards, accuracies, seconds = [], [], 0.0
    for row in read_metrics(path):
        if row.get("stage") != "rl":
            continue
        if row["step"] > 1:
            seconds += row.get("time/rollout_s", 0.0) + row.get("time/train_s", 0.0)
        for key, curve in (("reward/mean", rewards), ("eval/accuracy", accuracies)):
            if key in row:
                curve.append([row["step"], round(seconds, 2), round(row[key], 4)])
    return {"rewards": rewards, "accuracies": accuracies}


def find_first_alerts(path: Path) -> dict[str, int]:
    """Return the first RL step with an alert of each metric."""
    first: dict[str, int] = {}
    for row in read_metrics(path):
        if row.get("stage") == "rl":
            for alert in row.get("alerts", ()):
                first.setdefault(alert.split(" is ")[0], row["step"])
    return first


def format_config_study(comparisons: Sequence[Comparison], study: ConfigStudy) -> str:
    """Return Markdown: the accuracies after all steps, then those after equal seconds.

    Each table has the command of the study.

    The limit is what the contender with the cheapest step takes for all steps. A step's seconds are
    those of `measure_step`, so that other work on the machine changes them little.
    """
    command = f"`python -m studies {study.name}`"
    parts = [
        f"Accuracy after all steps, by {command}:",
        format_table(comparisons, {}),
        format_chances(comparisons),
    ]
    if study.format_more is not None:
        parts.append(study.format_more(comparisons))
    curves = [[np.array(run["accuracies"]) for run in c.metrics] for c in comparisons]
    if all(len(curve) > 2 for runs in curves for curve in runs):
        costs = [measure_step([run["rewards"] for run in c.metrics]) for c in comparisons]
        limit = min(costs) * min(curve[-1, 0] for runs in curves for curve in runs)
        at_limit = [
            [float(np.interp(limit / cost, curve[:, 0], curve[:, 2])) for curve in runs]
            for cost, runs in zip(costs, curves, strict=True)
        ]
        seconds = ", ".join(
            f"{c.contender.name}: {cost:.2f}" for c, cost in zip(comparisons, costs, strict=True)
        )
        parts += [
            f"Accuracy after {limit:.0f} s of sampling and training, by {command} (a step takes "
            f"{seconds} s):",
            format_comparisons(compare_values(comparisons, at_limit)),
        ]
    return "\n\n".join(parts)


def measure_step(runs: Sequence[Sequence[Sequence[float]]]) -> float:
    """The 10 % quantile of the seconds of all steps of runs, given their curves of rewards."""
    seconds = [np.diff(np.array(rewards)[:, 1]) for rewards in runs]
    return float(np.quantile(np.concatenate(seconds), 0.1))
