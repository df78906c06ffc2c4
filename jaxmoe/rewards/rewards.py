# SPDX-License-Identifier: Apache-2.0
"""The user's reward functions: `data.rewards` names them, with weights.

The reward of a response is the weighted sum of the functions' values; every part is logged.
Next: jaxmoe/collection/tasks.py calls this.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from jaxmoe.config import ConfigError
from jaxmoe.config.function_specs import parse_call, split_calls
from jaxmoe.records import add_token_rewards
from jaxmoe.rewards.conventions import (
    TRL_CONVENTION,
    Convention,
    Sample,
    detect_convention,
    is_undecided,
)
from jaxmoe.rewards.read_float import read_float
from jaxmoe.rewards.reward_process import (
    CrashError,
    LateError,
    Runner,
    UnimportableError,
    run_inline,
)
from jaxmoe.rewards.reward_specs import import_reward, is_async
from jaxmoe.rewards.token_rewards import describe_sizes, read_token_rewards
from jaxmoe.shapes import Metrics
from jaxmoe.user_code import read_text

T = TypeVar("T")
ReportProgress = Callable[..., None]  # (activity, number done, total)
# Why an answer has no reward: a call failed, or returned a dict with the score None.
FAULTS = ("late", "bad_value", "raised", "undecided")
# Only the samples of batches with something to count have these.
_COUNT = re.compile(
    r"reward/([^/]+/(none|late|raised|bad_value)|left_out|faulty)_frac|hack/several_answers"
)
_MAX_CRASHES = 3  # in a row
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
    key: str = "data.rewards"  # the config key that names it, in messages
    columns: tuple[str, ...] = ()  # of the task's rows

    @property
    def label(self) -> str:
        return f"{self.key}: {self.name}"


@dataclass(frozen=True)
class BatchRewards:
    """Rewards of a batch of responses, and the values that they consist of."""

    rewards: np.ndarray  # float32; NaN if every function returned None for the sample
    parts: list[dict[str, float]]  # of each sample, by metric name; a metric is the mean of them
    # of each sample: "" or the first of FAULTS; empty if there is none
    faults: list[str] = field(default_factory=list)
    first_fault: str = ""  # one sentence about the first of them
    # of each sample: the part of its reward that is paid at tokens (Rollout.token_rewards); [] if
    # all of every reward is paid at the last token
    token_rewards: list[np.ndarray | None] = field(default_factory=list)


def read_rewards(
    text: str, columns: Sequence[str], key: str = "data.rewards"
) -> tuple[Reward, ...]:
    """Parse "0.9 * module:function(option=1) + module:other"; () for an empty text.

    columns: the columns of the rows; functions of TRL's convention take them by name.
    A name that occurs twice is numbered in metrics: "score", "score_2".
    key: the config key of the text, for error messages.

    Raises: ConfigError for a function that cannot be parsed, imported or called.
    """
    rewards: list[Reward] = []
    names: list[str] = []
    for part in split_calls(text):
        match = _WEIGHTED.fullmatch(part)
        weight, spec = (float(match[1]), match[2]) if match else (1.0, part)
        path, options = "", {}
        if ":" in spec and math.isfinite(weight):
            path, options = parse_call(spec, key)
        if ":" not in path:
            raise ConfigError(
                f"{key} must be functions of yours, each with a finite weight or none, got "
                f'{part.strip()!r}. Try --set "{key}=0.9 * module:function + 0.1 * '
                'module:other".'
            )
        function = import_reward(path, options, key)
        # An option takes precedence over a column of the same name.
        free_columns = [name for name in columns if name not in options]
        call = detect_convention(f"{key}: {path}", function, free_columns)
        names.append(path.rpartition(":")[2].rpartition(".")[2])
        number = names.count(names[-1])
        label = f"{names[-1]}_{number}" if number > 1 else names[-1]
        rewards.append(Reward(label, weight, function, call, path, options, key, tuple(columns)))
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
    count_errors: bool = False,
) -> BatchRewards:
    """Reward of each sample: Σ weight · value over the functions that score it, as in TRL.

    A sample for which a call was late, or a value is not a finite number, has no reward: a policy
    can cause both, and must be neither paid nor punished for them. They are counted by function.
    Nor has one for which a function returned a dict with the score None, which cannot tell, and one
    on which a function raised or ended its process.
    run: calls a function.
    count_errors: True to raise nothing.

    Raises the error of a function that failed on all samples, and ConfigError, which names function
    and row, if a function returned no finite number at all.
    """
    totals, scored = np.zeros(len(samples)), np.zeros(len(samples), bool)
    parts: list[dict[str, float]] = [{} for _ in samples]
    faults, first_fault = [""] * len(samples), ""
    token_rewards: list[np.ndarray | None] = [None] * len(samples)
    for reward in rewards:
        values, kinds, error = _call_reward(
            reward, samples, report, run, state or SimpleNamespace()
        )
        if error is not None:
            if all(kinds) and not count_errors:
                raise error
            text = (
                error
                if isinstance(error, ConfigError)
                else f"{type(error).__name__}: {read_text(error)}"
            )
            row = samples[[kind in ("late", "raised") for kind in kinds].index(True)].label
            first_fault = first_fault or f"{reward.label} failed on {row}: {text}"
        is_none = [not x or is_undecided(x) for x in values]
        leaves_out = reward.convention is TRL_CONVENTION or any(is_none)
        is_bad = [False] * len(samples)
        first_bad: str | None = None
        for i, (sample, values_of_sample) in enumerate(zip(samples, values, strict=True)):
            metrics = parts[i]
            if leaves_out:
                metrics[f"reward/{reward.name}/none_frac"] = float(is_none[i])
            for kind in {"late", "raised"} & set(kinds):
                metrics[f"reward/{reward.name}/{kind}_frac"] = float(kinds[i] == kind)
            if kinds[i]:
                faults[i] = faults[i] or kinds[i]
                first_fault = first_fault or f"{reward.label}: {kinds[i]} on {sample.label}"
            numbers = {
                name if name.startswith("hack/") else f"reward/{reward.name}/{name}/mean": number
                for name, part in values_of_sample.items()
                if name != "score" and (number := read_float(part)) is not None
            }
            # A sign that several functions count is counted if one of them saw it.
            for name in numbers.keys() & metrics.keys():
                numbers[name] = max(numbers[name], metrics[name])
            if is_none[i]:
                metrics |= numbers
                if is_undecided(values_of_sample):
                    # Without this part, the sum would rank the sample below others of its group.
                    faults[i] = faults[i] or "undecided"
                    first_fault = first_fault or f"{reward.label}: undecided on {sample.label}"
                continue
            value = read_float(values_of_sample["score"])
            placed = None
            if value is None:
                placed = read_token_rewards(values_of_sample["score"], sample)
                value = None if placed is None else float(placed.sum())
            total = math.nan if value is None else totals[i] + reward.weight * value
            # Rewards are float32 on the device. NaN fails the comparison too.
            if value is None or not abs(total) <= np.finfo(np.float32).max:
                is_bad[i] = True
                faults[i] = faults[i] or "bad_value"
                first_bad = first_bad or (
                    f"{reward.label} must return a finite number, or a dict with one as its score, "
                    f"got {values_of_sample['score']!r:.60} (weight {reward.weight:g}) on "
                    f"{sample.label}{describe_sizes(values_of_sample['score'], sample)}"
                )
                continue
            totals[i] = total
            scored[i] = True
            if placed is not None:
                token_rewards[i] = add_token_rewards(token_rewards[i], reward.weight * placed)
            metrics |= {f"reward/{reward.name}/mean": value} | numbers
        if first_bad is not None:
            # A few may be the policy's doing, and their share has a limit; all are the function's.
            if all(is_bad) and not count_errors:
                raise ConfigError(f"{first_bad}.")
            first_fault = first_fault or first_bad
            for metrics, bad in zip(parts, is_bad, strict=True):
                metrics[f"reward/{reward.name}/bad_value_frac"] = float(bad)
    scored &= np.array([not fault for fault in faults], bool)
    if any(reward.convention is TRL_CONVENTION for reward in rewards) or not scored.all():
        for metrics, is_scored in zip(parts, scored, strict=True):
            metrics["reward/left_out_frac"] = float(not is_scored)
    if any(faults):
        for metrics, fault in zip(parts, faults, strict=True):
            metrics["reward/faulty_frac"] = float(bool(fault))
    totals_or_nan = np.where(scored, totals, np.nan).astype(np.float32)
    return BatchRewards(
        totals_or_nan, parts, faults if any(faults) else [], first_fault, token_rewards
    )


def _call_reward(
    reward: Reward,
    samples: Sequence[Sample],
    report: ReportProgress,
    run: Runner,
    state: SimpleNamespace,
) -> tuple[list[dict[str, Any]], list[str], Exception | None]:
    """(parts that a function returned for each sample, its fault or "", the first error)."""
    names = [sample.label for sample in samples]
    label, name, is_batch = reward.label, reward.name, reward.convention.batch
    calls = reward.convention.make_calls(reward.function, samples, state, reward.columns)

    def run_calls(calls: list[dict[str, Any]], rows: list[str]) -> list[tuple[str, Any]]:
        try:
            outcomes = run(label, reward.path, reward.options, reward.function, calls, rows)
            if is_batch and outcomes[0][0] == "late":
                raise LateError(
                    f"{label} must return within data.reward_timeout_s seconds; it did not, on "
                    f"{rows[0]}. Give it more: --set data.reward_timeout_s=3600."
                )
            if is_batch and outcomes[0][0] == "raised":
                raise outcomes[0][1]
            if is_batch:
                # Parsed here, because a list of another length is an error of the call.
                returned = [value for _, value in outcomes]
                return [("parsed", reward.convention.parse_values(label, returned, samples))]
            return outcomes
        except CrashError as error:
            if len(calls) == 1:
                return [("raised", error)]
            # One of the calls ended the process, which had all of them.
            return _call_one_by_one(calls, rows, run_calls)
        except Exception as error:
            return [("late" if isinstance(error, LateError) else "raised", error)] * len(calls)

    # All async calls at once, because they wait for I/O.
    if is_batch or is_async(reward.function):
        report(f"scoring {len(samples)} answers by {name}")
        suffix = f" and the {len(samples) - 1} rows with it" if len(samples) > 1 else ""
        outcomes = run_calls(calls, [names[0] + suffix] if is_batch else names)
    else:
        outcomes = _call_one_by_one(
            calls,
            names,
            run_calls,
            lambda pairs: iterate_with_progress(pairs, f"scoring by {name}", report),
        )
    errors = [value for kind, value in outcomes if isinstance(value, Exception) and kind in FAULTS]
    error = errors[0] if errors else None
    kinds = [kind if kind in FAULTS else "" for kind, _ in outcomes]
    if is_batch:
        kind, value = outcomes[0]
        values = value if kind == "parsed" else [{} for _ in samples]
        return values, kinds * len(samples), error
    returned = [None if kind in FAULTS else value for kind, value in outcomes]
    return reward.convention.parse_values(label, returned, samples), kinds, error


def _call_one_by_one(
    calls: Sequence[dict[str, Any]],
    rows: Sequence[str],
    run_calls: Callable[[list[dict[str, Any]], list[str]], list[tuple[str, Any]]],
    iterate: Callable[[list[tuple[dict[str, Any], str]]], Iterable[Any]] = lambda pairs: pairs,
) -> list[tuple[str, Any]]:
    """The outcomes of calls. A function that costs too much to be tried on the rest is given up:

    one that was late or ended its process three times in a row, or that cannot be imported. An
    error that it raised is of its row alone.
    """
    outcomes: list[tuple[str, Any]] = []
    for call, row in iterate(list(zip(calls, rows, strict=True))):
        last = [value for _, value in outcomes[-_MAX_CRASHES:]]
        crashed = len(last) == _MAX_CRASHES and all(isinstance(x, CrashError) for x in last)
        failed = bool(last) and isinstance(last[-1], LateError | UnimportableError)
        gave_up = crashed or failed
        outcomes += outcomes[-1:] if gave_up else run_calls([call], [row])
    return outcomes


def check_faulty(scores: BatchRewards, limit: float) -> None:
    """Raise ConfigError if functions failed on more than this share of the answers.

    A function fails on an answer if it is late, raises, ends its process, or returns no number. One
    that says that it cannot tell, as a judge does, has not failed.
    """
    failed = [fault for fault in scores.faults if fault and fault != "undecided"]
    if len(failed) > limit * len(scores.rewards):
        raise ConfigError(
            f"reward functions may fail on at most rollout.max_lost_frac ({limit:g}) of the "
            f"answers; they failed on {len(failed)} of {len(scores.rewards)}. "
            f"{scores.first_fault.rstrip('.')}. Correct the function, then start the same command "
            "again, or try --set rollout.max_lost_frac=1."
        )


def mean_part_metrics(parts: Sequence[dict[str, float]]) -> Metrics:
    """Mean of each part over the samples that have it; of a count, over all samples."""
    names = dict.fromkeys(name for metrics in parts for name in metrics)
    return {
        name: float(
            np.mean([m.get(name, 0.0) for m in parts if name in m or _COUNT.fullmatch(name)])
        )
        for name in names
    }
