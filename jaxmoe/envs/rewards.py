# SPDX-License-Identifier: Apache-2.0
"""The user's reward functions: `data.rewards` names them, with weights.

The reward of a response is the weighted sum of the functions' values; every part is logged.
Next: jaxmoe/envs/tasks.py calls this.
"""

import math
import numbers
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from jaxmoe.config import ConfigError
from jaxmoe.config.calls import parse_call
from jaxmoe.config.function_specs import split_calls
from jaxmoe.envs.conventions import TRL_CONVENTION, Convention, Sample, detect_convention
from jaxmoe.envs.reward_process import Runner, run_inline
from jaxmoe.envs.reward_specs import import_reward, is_async
from jaxmoe.shapes import Metrics

T = TypeVar("T")
ReportProgress = Callable[..., None]  # (activity, number done, total)
_WEIGHTED = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?)\s*\*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Reward:
    """One function of the sum."""

    name: str  # in metrics
    weight: float
    function: Callable[..., Any]  # its options bound
    convention: Convention
    path: str  # "module:function"
    options: dict[str, Any]


@dataclass(frozen=True)
class BatchRewards:
    """Rewards of a batch of responses, and the values that they consist of."""

    rewards: np.ndarray  # float32; NaN if every function returned None for the sample
    parts: list[dict[str, float]]  # of each sample, by metric name; a metric is the mean of them


def read_rewards(text: str, columns: Sequence[str]) -> tuple[Reward, ...]:
    """Parse "0.9 * module:function(option=1) + module:other"; () for an empty text.

    columns: the columns of the rows; functions of TRL's convention take them by name.
    A name that occurs twice is numbered in metrics: "score", "score_2".

    Raises: ConfigError for a function that cannot be parsed, imported or called.
    """
    rewards: list[Reward] = []
    names: list[str] = []
    for part in split_calls(text) if text.strip() else []:
        match = _WEIGHTED.fullmatch(part)
        weight, spec = (float(match[1]), match[2]) if match else (1.0, part)
        path, options = "", {}
        if ":" in spec and math.isfinite(weight):
            path, options = parse_call(spec, "data.rewards")
        if ":" not in path:
            raise ConfigError(
                "data.rewards must be functions of yours, each with a finite weight or none, got "
                f'{part.strip()!r}. Try --set "data.rewards=0.9 * module:function + 0.1 * '
                'module:other".'
            )
        function = import_reward(path, options)
        # An option takes precedence over a column of the same name.
        free_columns = [name for name in columns if name not in options]
        call = detect_convention(f"data.rewards: {path}", function, free_columns)
        names.append(path.rpartition(":")[2].rpartition(".")[2])
        number = names.count(names[-1])
        label = f"{names[-1]}_{number}" if number > 1 else names[-1]
        rewards.append(Reward(label, weight, function, call, path, options))
    return tuple(rewards)


def ignore_progress(_text: str, _n_done: int = 0, _n_total: int = 0) -> None:
    """A ReportProgress that does nothing."""


def iterate_with_progress(items: Sequence[T], text: str, report: ReportProgress) -> Iterator[T]:
    """Iterate over items and report each before it is processed."""
    for i, item in enumerate(items):
        report(text, i, len(items))
        yield item


def score_samples(
    rewards: Sequence[Reward],
    samples: Sequence[Sample],
    report: ReportProgress = ignore_progress,
    *,
    run: Runner = run_inline,
    state: SimpleNamespace | None = None,
) -> BatchRewards:
    """Reward of each sample: Σ weight · value over the functions that score it, as in TRL.

    run: calls a function. If a call times out, its function is skipped for that sample, so slow
        answers are neither rewarded nor penalized.
    Raises: ConfigError that names function and row for a value that is not a finite number.
    """
    totals, scored = np.zeros(len(samples)), np.zeros(len(samples), bool)
    parts: list[dict[str, float]] = [{} for _ in samples]
    for reward in rewards:
        label = f"data.rewards: {reward.name}"
        values, is_late = _call_reward(
            label, reward, samples, report, run, state or SimpleNamespace()
        )
        leaves_out = reward.convention is TRL_CONVENTION or not all(values)
        for i, (sample, values_of_sample) in enumerate(zip(samples, values, strict=True)):
            metrics = parts[i]
            if leaves_out:
                metrics[f"reward/{reward.name}/none_frac"] = float(not values_of_sample)
            if any(is_late):
                metrics[f"reward/{reward.name}/late_frac"] = float(is_late[i])
            if not values_of_sample:
                continue
            value = _to_float(values_of_sample["score"])
            if value is not None:
                totals[i] += reward.weight * value
                scored[i] = True
            # Rewards are float32 on the device. NaN fails the comparison too.
            if value is None or not abs(totals[i]) <= np.finfo(np.float32).max:
                raise ConfigError(
                    f"{label} must return a finite number, or a dict with one as its score, got "
                    f"{values_of_sample['score']!r:.60} (weight {reward.weight:g}) on "
                    f"{sample.label}."
                )
            metrics[f"reward/{reward.name}/mean"] = value
            for name, part in values_of_sample.items():
                number = _to_float(part)
                if name != "score" and number is not None:
                    metrics[f"reward/{reward.name}/{name}/mean"] = number
    if any(reward.convention is TRL_CONVENTION for reward in rewards) or not scored.all():
        for metrics, is_scored in zip(parts, scored, strict=True):
            metrics["reward/left_out_frac"] = float(not is_scored)
    return BatchRewards(np.where(scored, totals, np.nan).astype(np.float32), parts)


def _call_reward(
    label: str, reward: Reward, samples: Sequence[Sample], report: ReportProgress, run: Runner,
    state: SimpleNamespace,
) -> tuple[list[dict[str, Any]], list[bool]]:  # fmt: skip
    """(parts that a function returned for each sample, True for each sample that timed out)."""
    names = [sample.label for sample in samples]
    calls = reward.convention.make_calls(reward.function, samples, state)
    name = reward.name
    if reward.convention.batch:
        report(f"scoring {len(samples)} answers by {name}")
        suffix = f" and the {len(samples) - 1} rows with it" if len(samples) > 1 else ""
        rows = [names[0] + suffix]
        outcomes = run(label, reward.path, reward.options, reward.function, calls, rows)
        if outcomes[0][0] == "late":
            raise ConfigError(
                f"{label} must return within data.reward_timeout_s seconds; it did not, on "
                f"{rows[0]}. Give it more: --set data.reward_timeout_s=3600."
            )
    # All at once, because such calls wait for I/O.
    elif is_async(reward.function):
        report(f"scoring {len(samples)} answers by {name}")
        outcomes = run(label, reward.path, reward.options, reward.function, calls, names)
    else:
        outcomes = [
            run(label, reward.path, reward.options, reward.function, [call], [row])[0]
            for call, row in iterate_with_progress(
                list(zip(calls, names, strict=True)), f"scoring by {name}", report
            )
        ]
    is_late = [outcome == "late" for outcome, _ in outcomes]
    if reward.convention.batch:
        is_late = is_late * len(samples)
    returned = [value for _, value in outcomes]
    return reward.convention.parse_values(label, returned, samples), is_late


def mean_part_metrics(parts: Sequence[dict[str, float]]) -> Metrics:
    """Mean of each part over the samples that have it."""
    names = dict.fromkeys(name for metrics in parts for name in metrics)
    return {name: float(np.mean([m[name] for m in parts if name in m])) for name in names}


def _to_float(value: Any) -> float | None:
    """The value as a float, for numbers, booleans and scalar arrays; None for anything else."""
    is_scalar_array = getattr(value, "shape", None) == () and not isinstance(value, str | bytes)
    if is_scalar_array or isinstance(value, numbers.Real):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            return None
    return None
