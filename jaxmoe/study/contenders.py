# SPDX-License-Identifier: Apache-2.0
"""Contenders of a study: each at its best learning rate, compared with the first over seeds.

Next: jaxmoe/study/train_config.py, one way to run a contender.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxmoe.study.paired import Interval, paired_difference
from jaxmoe.study.results_store import ResultsStore

Run = Callable[["Contender", float | None, int], dict[str, float]]


@dataclass(frozen=True)
class Contender:
    """One setting of a study.

    `settings` are `--set` changes as text. With `rates` each is tried as `optim.lr`; without, the
    config's own rate is used.
    """

    name: str
    settings: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A contender's results by seed, and its difference to the first contender."""

    contender: Contender
    rate: float | None
    values: list[float]
    difference: Interval | None  # None for the first contender
    metrics: list[dict[str, float]]  # all metrics by seed


def run_study(
    contenders: Sequence[Contender],
    run: Run,
    *,
    name: str,
    store: ResultsStore,
    seeds: int,
    measure: str,
    tuning_seeds: int = 1,
    report: Callable[[Comparison], None] = lambda comparison: None,
) -> list[Comparison]:
    """Compare contenders seed by seed with the first of them; a larger `measure` is better.

    Each contender's rate is the one with the best mean on the first `tuning_seeds` seeds; it then
    runs on all seeds. Those results are used twice, so the interval of a contender with several
    rates is a little too narrow.

    Args:
        run: (contender, rate, seed) -> metrics; called once for each, its result is stored.
        name: everything that all runs share, such as the config and its number of steps. Stored
            results of another name are not used.
        measure: the metric that is compared; it must be finite in every run.
        report: called with each comparison when it is known.
    Raises ValueError for fewer than two seeds, two contenders of one name, or a metric
    that is missing or not finite.
    """
    names = [contender.name for contender in contenders]
    if seeds < 2 or not 1 <= tuning_seeds <= seeds:
        raise ValueError(
            "a study needs two seeds or more, and from one to all of them to choose a rate; got "
            f"seeds={seeds}, tuning_seeds={tuning_seeds}."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"contenders must have different names, got {names}.")

    def run_seeds(contender: Contender, rate: float | None, count: int) -> list[dict[str, float]]:
        results = []
        for seed in range(count):
            settings = " ".join(contender.settings)
            key = f"{name}; {contender.name}; {settings}; rate {rate}; seed {seed}"
            metrics = store.get_or_run(key, lambda seed=seed: run(contender, rate, seed))
            if measure not in metrics:
                raise ValueError(f"run() must return {measure!r}, got {sorted(metrics)}.")
            # np.argmax takes a NaN for the maximum, so a rate that diverged would be chosen.
            if not math.isfinite(metrics[measure]):
                raise ValueError(
                    f"{measure} must be finite, got {metrics[measure]} for {key}. Leave out a rate "
                    "that diverges."
                )
            results.append(metrics)
        return results

    def measured(results: Sequence[dict[str, float]]) -> list[float]:
        return [float(metrics[measure]) for metrics in results]

    comparisons: list[Comparison] = []
    for contender in contenders:
        rates: tuple[float | None, ...] = contender.rates or (None,)
        best_rate = rates[0]
        if len(rates) > 1:
            means = [np.mean(measured(run_seeds(contender, rate, tuning_seeds))) for rate in rates]
            best_rate = rates[int(np.argmax(means))]
        metrics = run_seeds(contender, best_rate, seeds)
        values = measured(metrics)
        baseline = comparisons[0].values if comparisons else None
        difference = None if baseline is None else paired_difference(values, baseline)
        comparisons.append(Comparison(contender, best_rate, values, difference, metrics))
        report(comparisons[-1])
    return comparisons


def format_comparisons(comparisons: Sequence[Comparison]) -> str:
    """A Markdown table: mean, difference to the first line with its 95 % interval, each seed."""
    lines = ["| | rate | mean | difference, 95 % | by seed |", "|---|---|---|---|---|"]
    for comparison in comparisons:
        rate = "" if comparison.rate is None else f"{comparison.rate:g}"
        difference = "" if comparison.difference is None else str(comparison.difference)
        by_seed = " ".join(f"{value:.3g}" for value in comparison.values)
        lines.append(
            f"| {comparison.contender.name} | {rate} | {np.mean(comparison.values):.3g} | "
            f"{difference} | {by_seed} |"
        )
    return "\n".join(lines)
