# SPDX-License-Identifier: Apache-2.0
"""Contenders of a study: each at its best learning rate, compared with the first over seeds.

Next: jaxmoe/study/train_config.py, one way to run a contender.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxmoe.study.paired import Interval, correct_p_values, paired_difference, paired_p_value
from jaxmoe.study.results_store import ResultsStore

# Rates are tried on these seeds and above, and compared on the seeds from 0.
FIRST_TUNING_SEED = 1000

Run = Callable[["Contender", float | None, int], dict[str, Any]]


@dataclass(frozen=True)
class Contender:
    """One setting of a study.

    `settings` are `--set` changes as text. With `rates`, ascending, each is tried as `optim.lr`;
    without, the config's own rate is used.
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
    metrics: list[dict[str, Any]]  # all results of a run, by seed
    # False if the best rate that was tried is the lowest or the highest one, or the only one.
    is_bracketed: bool = True
    # Of the paired t test; the corrected one is Holm's over all contenders of the study.
    p_value: float | None = None
    corrected_p_value: float | None = None


def run_study(
    contenders: Sequence[Contender],
    run: Run,
    *,
    name: str,
    store: ResultsStore,
    seeds: int,
    measure: str,
    tuning_seeds: int = 1,
    max_rates: int = 8,
    report: Callable[[str], None] = lambda line: None,
) -> list[Comparison]:
    """Compare contenders seed by seed with the first of them; a larger `measure` is better.

    Each contender's rate is the one with the best mean on `tuning_seeds` seeds of their own, from
    FIRST_TUNING_SEED. While it is the lowest or the highest of two rates or more, the next one by
    the same factor is tried too, up to `max_rates`.

    Args:
        run: (contender, rate, seed) -> metrics; called once for each, its result is stored.
        name: everything that all runs share, such as the config and its number of steps. Stored
            results of another name are not used.
        seeds: that are compared, from 0.
        measure: the metric that is compared; it must be finite in every run that is compared. A
            rate whose runs are not finite is not chosen.
        report: called with a line when the runs of a contender are finished.
    Raises ValueError for fewer than two seeds, two contenders of one name, rates that do not
    ascend, or a metric that is missing or not finite.
    """
    names = [contender.name for contender in contenders]
    if seeds < 2 or tuning_seeds < 1:
        raise ValueError(
            "a study needs two seeds or more, and at least one to choose a rate; got "
            f"seeds={seeds}, tuning_seeds={tuning_seeds}."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"contenders must have different names, got {names}.")
    for contender in contenders:
        rates = contender.rates
        if list(rates) != sorted(set(rates)) or any(rate <= 0 for rate in rates):
            raise ValueError(
                f"the rates of {contender.name} must be above 0 and ascend, got {rates}."
            )

    def run_seed(contender: Contender, rate: float | None, seed: int) -> dict[str, Any]:
        settings = " ".join(contender.settings)
        key = f"{name}; {contender.name}; {settings}; rate {rate}; seed {seed}"
        metrics = store.get_or_run(key, lambda: run(contender, rate, seed))
        if measure not in metrics:
            raise ValueError(f"run() must return {measure!r}, got {sorted(metrics)}.")
        return metrics

    def measure_rate(contender: Contender, rate: float) -> float:
        first = FIRST_TUNING_SEED
        metrics = [run_seed(contender, rate, first + n) for n in range(tuning_seeds)]
        mean = float(np.mean([row[measure] for row in metrics]))
        # np.argmax takes a NaN for the maximum, so a rate that diverged would be chosen.
        return mean if math.isfinite(mean) else -math.inf

    comparisons: list[Comparison] = []
    for contender in contenders:
        rate, is_bracketed = None, True
        if len(contender.rates) == 1:
            rate, is_bracketed = contender.rates[0], False
        elif contender.rates:
            rate, is_bracketed = bracket_rate(
                lambda rate, contender=contender: measure_rate(contender, rate),
                contender.rates,
                max_rates,
            )
        metrics = [run_seed(contender, rate, seed) for seed in range(seeds)]
        values = [float(row[measure]) for row in metrics]
        if not all(map(math.isfinite, values)):
            raise ValueError(
                f"{measure} must be finite, got {values} of {contender.name} at rate {rate}. Leave "
                "out a contender that diverges."
            )
        comparisons.append(Comparison(contender, rate, values, None, metrics, is_bracketed))
        report(f"{contender.name}: {measure} {np.mean(values):.3g} at rate {rate}")
    return compare_values(comparisons, [comparison.values for comparison in comparisons])


def compare_values(
    comparisons: Sequence[Comparison], values: Sequence[Sequence[float]]
) -> list[Comparison]:
    """Return the comparisons of other values of the same runs, by contender and seed.

    Each contender is compared with the first one, and p is corrected over all of them.
    """
    baseline = values[0]
    p_values = [paired_p_value(x, baseline) for x in values[1:]]
    first, *rows = [replace(c, values=list(x)) for c, x in zip(comparisons, values, strict=True)]
    return [first] + [
        replace(c, difference=paired_difference(c.values, baseline), p_value=p, corrected_p_value=q)
        for c, p, q in zip(rows, p_values, correct_p_values(p_values), strict=True)
    ]


def bracket_rate(
    measure: Callable[[float], float], rates: Sequence[float], max_rates: int
) -> tuple[float, bool]:
    """Return the best rate, and True if a lower and a higher one were tried.

    The grid grows by the factor of its last two rates on the side where its best rate is.
    """
    measured = {rate: measure(rate) for rate in rates}
    while True:
        grid = sorted(measured)
        chosen = max(grid, key=lambda rate: measured[rate])
        if chosen not in (grid[0], grid[-1]):
            return chosen, True
        if len(grid) >= max_rates:
            return chosen, False
        factor = grid[-1] / grid[-2]
        # Twelve digits keep names of runs short, and equal on a resume.
        rate = float(f"{chosen * factor if chosen == grid[-1] else chosen / factor:.12g}")
        measured[rate] = measure(rate)


def format_rate(comparison: Comparison) -> str:
    """The rate; with * if no lower or no higher one was tried."""
    rate = "" if comparison.rate is None else f"{comparison.rate:g}"
    return rate if comparison.is_bracketed else f"{rate}*"


def format_comparisons(comparisons: Sequence[Comparison]) -> str:
    """A Markdown table: mean, difference to the first line, its 95 % interval and p, each seed.

    p is Holm's over the lines. A rate with * has no lower or no higher one that was tried.
    """
    lines = [
        "| | rate | mean | difference, 95 % | p, corrected | by seed |",
        "|---|---|---|---|---|---|",
    ]
    for comparison in comparisons:
        difference = "" if comparison.difference is None else str(comparison.difference)
        p = comparison.corrected_p_value
        p_text = "" if p is None else f"{p:.2g}"
        by_seed = " ".join(f"{value:.3g}" for value in comparison.values)
        lines.append(
            f"| {comparison.contender.name} | {format_rate(comparison)} | "
            f"{np.mean(comparison.values):.3g} | {difference} | {p_text} | {by_seed} |"
        )
    return "\n".join(lines)
