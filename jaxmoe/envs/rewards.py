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
from typing import Any, TypeVar

import numpy as np

from jaxmoe.config import ConfigError
from jaxmoe.envs.conventions import OURS, TRL, VERL, Convention, Sample, as_trl, convention
from jaxmoe.rl.function_specs import read, split
from jaxmoe.shapes import Metrics

T = TypeVar("T")
Tell = Callable[..., None]  # (what goes on, how many are done, of how many)
_WEIGHTED = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?)\s*\*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Reward:
    """One function of the sum."""

    name: str  # in metrics
    weight: float
    function: Callable[..., Any]
    call: Convention


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
    for part in split(text) if text.strip() else []:
        found = _WEIGHTED.fullmatch(part)
        weight, spec = (float(found[1]), found[2]) if found else (1.0, part)
        path = spec.strip().partition("(")[0].strip()
        if ":" not in path or not math.isfinite(weight):
            raise ConfigError(
                "data.rewards must be functions of yours, each with a finite weight or none, got "
                f'{part.strip()!r}. Try --set "data.rewards=0.9 * module:function + 0.1 * '
                'module:other".'
            )
        # an option that is set wins over a column of its name
        free = [name for name in columns if not re.search(rf"\b{re.escape(name)}\s*=", spec)]
        known = list(dict.fromkeys([*TRL, *VERL, *OURS, *free]))
        function = read(spec, "data.rewards", known)
        call = convention(f"data.rewards: {path}", function, columns)
        names.append(path.rpartition(":")[2].rpartition(".")[2])
        number = names.count(names[-1])
        label = f"{names[-1]}_{number}" if number > 1 else names[-1]
        made.append(Reward(label, weight, function, call))
    return tuple(made)


def silent(_text: str, _done: int = 0, _total: int = 0) -> None:
    """Tells nobody."""


def counted(items: Sequence[T], text: str, tell: Tell) -> Iterator[T]:
    """The items, each told when its turn comes."""
    for i, item in enumerate(items):
        tell(text, i, len(items))
        yield item


def score_samples(
    rewards: Sequence[Reward], samples: Sequence[Sample], tell: Tell = silent
) -> Rewarded:
    """Σ weight · value over the functions that score a sample, as in TRL.

    Raises: ConfigError naming function and row for a value that is no finite number.
    """
    totals, scored = np.zeros(len(samples)), np.zeros(len(samples), bool)
    parts: list[dict[str, float]] = [{} for _ in samples]
    for reward in rewards:
        where = f"data.rewards: {reward.name}"
        if reward.call is as_trl:  # one call for all
            tell(f"scoring {len(samples)} answers by {reward.name}")
            values = reward.call(where, reward.function, samples)
        else:
            values = [
                value for sample in counted(samples, f"scoring by {reward.name}", tell)
                for value in reward.call(where, reward.function, [sample])
            ]  # fmt: skip
        for i, (sample, found) in enumerate(zip(samples, values, strict=True)):
            mine = parts[i]
            if reward.call is as_trl:
                mine[f"reward/{reward.name}/none_frac"] = float(not found)
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
    if any(reward.call is as_trl for reward in rewards):
        for mine, known in zip(parts, scored, strict=True):
            mine["reward/left_out_frac"] = float(not known)
    return Rewarded(np.where(scored, totals, np.nan).astype(np.float32), parts)


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
