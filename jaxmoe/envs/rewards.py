# SPDX-License-Identifier: Apache-2.0
"""Reward functions of the user's own: `data.rewards` names them, with weights.

A response is worth the weighted sum of what its functions return; every part is logged.
Next: jaxmoe/envs/tasks.py asks for it.
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
from jaxmoe.envs.conventions import AS_TRL, Convention, Sample, convention
from jaxmoe.envs.reward_process import Runner, run_here
from jaxmoe.envs.reward_specs import import_reward, is_async
from jaxmoe.rl.function_specs import parse_call, split_calls
from jaxmoe.shapes import Metrics

T = TypeVar("T")
Tell = Callable[..., None]  # (what goes on, how many are done, of how many)
_WEIGHTED = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?)\s*\*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Reward:
    """One function of the sum."""

    name: str  # in metrics
    weight: float
    function: Callable[..., Any]  # its options bound
    call: Convention
    path: str  # "module:function"
    options: dict[str, Any]


@dataclass(frozen=True)
class Rewarded:
    """What a batch of responses is worth."""

    rewards: np.ndarray  # float32; NaN where every function leaves the sample out
    parts: list[dict[str, float]]  # of each sample, by the metric that their mean is


def read_rewards(text: str, columns: Sequence[str]) -> tuple[Reward, ...]:
    """The functions of "0.9 * module:function(option=1) + module:other"; none for an empty text.

    columns: those that rows have; TRL's functions ask for them by name.
    A name that comes again is numbered in metrics: "score", "score_2".

    Raises: ConfigError for what cannot be read, imported or called.
    """
    made: list[Reward] = []
    names: list[str] = []
    for part in split_calls(text) if text.strip() else []:
        found = _WEIGHTED.fullmatch(part)
        weight, spec = (float(found[1]), found[2]) if found else (1.0, part)
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
        # an option that is set wins over a column of its name
        free = [name for name in columns if name not in options]
        call = convention(f"data.rewards: {path}", function, free)
        names.append(path.rpartition(":")[2].rpartition(".")[2])
        number = names.count(names[-1])
        label = f"{names[-1]}_{number}" if number > 1 else names[-1]
        made.append(Reward(label, weight, function, call, path, options))
    return tuple(made)


def silent(_text: str, _done: int = 0, _total: int = 0) -> None:
    """Tells nobody."""


def counted(items: Sequence[T], text: str, tell: Tell) -> Iterator[T]:
    """The items, each told when its turn comes."""
    for i, item in enumerate(items):
        tell(text, i, len(items))
        yield item


def score_samples(
    rewards: Sequence[Reward],
    samples: Sequence[Sample],
    tell: Tell = silent,
    *,
    run: Runner = run_here,
    state: SimpleNamespace | None = None,
) -> Rewarded:
    """Σ weight · value over the functions that score a sample, as in TRL.

    run: calls a function; a sample whose call is late is left out of it, neither paid nor
        punished for an answer that the function cannot read in time.
    Raises: ConfigError naming function and row for a value that is no finite number.
    """
    totals, scored = np.zeros(len(samples)), np.zeros(len(samples), bool)
    parts: list[dict[str, float]] = [{} for _ in samples]
    for reward in rewards:
        where = f"data.rewards: {reward.name}"
        values, late = _values(where, reward, samples, tell, run, state or SimpleNamespace())
        leaves_out = reward.call is AS_TRL or not all(values)
        for i, (sample, found) in enumerate(zip(samples, values, strict=True)):
            mine = parts[i]
            if leaves_out:
                mine[f"reward/{reward.name}/none_frac"] = float(not found)
            if any(late):
                mine[f"reward/{reward.name}/late_frac"] = float(late[i])
            if not found:
                continue
            value = _number(found["score"])
            if value is not None:
                totals[i] += reward.weight * value
                scored[i] = True
            if value is None or not abs(totals[i]) <= np.finfo(np.float32).max:
                raise ConfigError(
                    f"{where} must return a finite number, or a dict with one as its score, got "
                    f"{found['score']!r:.60} (weight {reward.weight:g}) on {sample.named}."
                )
            mine[f"reward/{reward.name}/mean"] = value
            for name, part in found.items():
                number = _number(part)
                if name != "score" and number is not None:
                    mine[f"reward/{reward.name}/{name}/mean"] = number
    if any(reward.call is AS_TRL for reward in rewards) or not scored.all():
        for mine, known in zip(parts, scored, strict=True):
            mine["reward/left_out_frac"] = float(not known)
    return Rewarded(np.where(scored, totals, np.nan).astype(np.float32), parts)


def _values(
    where: str, reward: Reward, samples: Sequence[Sample], tell: Tell, run: Runner,
    state: SimpleNamespace,
) -> tuple[list[dict[str, Any]], list[bool]]:  # fmt: skip
    """The parts that a function returned for each sample, and which samples took too long."""
    names = [sample.named for sample in samples]
    calls = reward.call.calls(reward.function, samples, state)
    name = reward.name
    if reward.call.batch:
        tell(f"scoring {len(samples)} answers by {name}")
        rest = f" and the {len(samples) - 1} rows with it" if len(samples) > 1 else ""
        rows = [names[0] + rest]
        outcomes = run(where, reward.path, reward.options, reward.function, calls, rows)
        if outcomes[0][0] == "late":
            raise ConfigError(
                f"{where} must return within data.reward_timeout_s seconds; it did not, on "
                f"{rows[0]}. Give it more: --set data.reward_timeout_s=3600."
            )
    elif is_async(reward.function):  # all at once: they wait for others
        tell(f"scoring {len(samples)} answers by {name}")
        outcomes = run(where, reward.path, reward.options, reward.function, calls, names)
    else:
        outcomes = [
            run(where, reward.path, reward.options, reward.function, [call], [row])[0]
            for call, row in counted(
                list(zip(calls, names, strict=True)), f"scoring by {name}", tell
            )
        ]
    late = [outcome == "late" for outcome, _ in outcomes]
    if reward.call.batch:
        late = late * len(samples)
    returned = [value for _, value in outcomes]
    return reward.call.values(where, returned, samples), late


def part_metrics(parts: Sequence[dict[str, float]]) -> Metrics:
    """Means over the samples that have the part."""
    names = dict.fromkeys(name for mine in parts for name in mine)
    return {name: float(np.mean([m[name] for m in parts if name in m])) for name in names}


def _number(value: Any) -> float | None:
    """Python's and numpy's numbers and truths, arrays of no dimensions; None for the rest."""
    bare = getattr(value, "shape", None) == () and not isinstance(value, str | bytes)
    if bare or isinstance(value, numbers.Real):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            return None
    return None
