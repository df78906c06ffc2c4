# SPDX-License-Identifier: Apache-2.0
"""Contenders of a study: each at its best learning rates, compared with the first over seeds.

Next: jaxmoe/study/tables.py shows the comparisons.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxmoe.study.families import correct_discoveries, correct_p_values
from jaxmoe.study.paired import (
    Interval,
    MedianInterval,
    paired_difference,
    paired_median,
    paired_p_value,
    sign_flip_p_value,
)
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
class ChosenRate:
    """The best of the rates that were tried on one tuning seed.

    is_inside: True if a lower and a higher one were tried, or there was nothing to choose.
    """

    rate: float | None
    is_inside: bool = True


@dataclass(frozen=True)
class Comparison:
    """A contender's results by seed, and their differences to the first contender.

    chosen: one for each tuning seed; the counted seeds take them in turn.
    metrics: all results of a run, by seed.
    difference, median: of the first contender None, as all below.
    p_value: of the paired t test; `corrected_p_value` is Holm's over all contenders of the table,
        and `discovery_p_value` Benjamini and Hochberg's.
    sign_flip_p_value: of the exact permutation test, not corrected.
    """

    contender: Contender
    chosen: tuple[ChosenRate, ...]
    values: list[float]
    metrics: list[dict[str, Any]]
    difference: Interval | None = None
    median: MedianInterval | None = None
    p_value: float | None = None
    corrected_p_value: float | None = None
    discovery_p_value: float | None = None
    sign_flip_p_value: float | None = None


def run_study(
    contenders: Sequence[Contender],
    run: Run,
    *,
    name: str,
    store: ResultsStore,
    seeds: int,
    first_seed: int = 0,
    measure: str,
    tuning_seeds: int | None = None,
    max_rates: int = 8,
    report: Callable[[str], None] = lambda line: None,
) -> list[Comparison]:
    """Compare contenders seed by seed with the first of them; a larger `measure` is better.

    Counted seed n runs at the rate that is best on tuning seed FIRST_TUNING_SEED + n. While that is
    the lowest or the highest of two rates or more, the next one by the same factor is tried too, up
    to `max_rates`. So each seed is a repetition of everything, the choice of the rate included.
    With fewer `tuning_seeds` they are used in turn, and a bad choice for the first contender is in
    the differences of all others (`python -m studies referee` measures how often that misleads).

    Args:
        run: (contender, rate, seed) -> metrics; called once for each, its result is stored.
        name: everything that all runs share, such as the config and its number of steps. Stored
            results of another name are not used.
        seeds: that are compared.
        first_seed: of these. Another one repeats a study on seeds that have not been looked at,
            those that choose the rates included.
        measure: the metric that is compared; it must be finite in every run that is compared. A
            rate whose runs are not finite is not chosen.
        report: called with a line when a run is finished.
    Raises ValueError for fewer than two seeds, two contenders of one name, rates that do not
    ascend, or a metric that is missing or not finite.
    """
    tuning_seeds = seeds if tuning_seeds is None else tuning_seeds
    check_study(contenders, seeds, tuning_seeds)
    if not 0 <= first_seed <= FIRST_TUNING_SEED - seeds:
        raise ValueError(
            f"the seeds that are compared must be from 0 to {FIRST_TUNING_SEED - 1}, below those "
            f"that choose rates; got first_seed={first_seed} and seeds={seeds}."
        )
    planned = count_runs(contenders, seeds, tuning_seeds)
    finished = 0

    def run_seed(contender: Contender, rate: float | None, seed: int) -> dict[str, Any]:
        nonlocal finished
        n_stored = len(store)
        key = make_run_key(name, contender, rate, seed)
        metrics = store.get_or_run(key, lambda: run(contender, rate, seed))
        if measure not in metrics:
            raise ValueError(f"run() must return {measure!r}, got {sorted(metrics)}.")
        finished += 1
        if len(store) > n_stored:
            at_rate = "" if rate is None else f", rate {rate:g}"
            report(
                f"{finished} of about {max(planned, finished)}: {contender.name}{at_rate}, seed "
                f"{seed}: {measure} {metrics[measure]:.3g}"
            )
        return metrics

    def choose_rate(contender: Contender, seed: int) -> ChosenRate:
        def measure_rate(rate: float) -> float:
            value = float(run_seed(contender, rate, seed)[measure])
            # max takes a NaN that comes first, so a rate that diverged would be chosen.
            return value if math.isfinite(value) else -math.inf

        rates = contender.rates
        if len(rates) < 2:
            return ChosenRate(rates[0] if rates else None, is_inside=not rates)
        return bracket_rate(measure_rate, rates, max_rates)

    comparisons: list[Comparison] = []
    first_tuning_seed = FIRST_TUNING_SEED + first_seed
    for contender in contenders:
        chosen = tuple(choose_rate(contender, first_tuning_seed + n) for n in range(tuning_seeds))
        rates = [chosen[n % tuning_seeds].rate for n in range(seeds)]
        metrics = [run_seed(contender, rate, first_seed + n) for n, rate in enumerate(rates)]
        values = [float(row[measure]) for row in metrics]
        if not all(map(math.isfinite, values)):
            raise ValueError(
                f"{measure} must be finite, got {values} of {contender.name} at rates {rates}. "
                "Leave out a contender that diverges."
            )
        comparisons.append(Comparison(contender, chosen, values, metrics))
    return compare_values(comparisons, [comparison.values for comparison in comparisons])


def check_study(contenders: Sequence[Contender], seeds: int, tuning_seeds: int) -> None:
    """Raise ValueError for a study that cannot be run."""
    names = [contender.name for contender in contenders]
    if seeds < 2 or not 1 <= tuning_seeds <= seeds:
        raise ValueError(
            "a study needs two seeds or more, and from one to as many seeds to choose rates; got "
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


def count_runs(contenders: Sequence[Contender], seeds: int, tuning_seeds: int) -> int:
    """About how many runs a study makes, with four rates or more on each tuning seed."""
    n_rates = [max(4, len(c.rates) + 1) if len(c.rates) > 1 else 0 for c in contenders]
    return sum(n * tuning_seeds + seeds for n in n_rates)


def make_run_key(name: str, contender: Contender, rate: float | None, seed: int) -> dict[str, Any]:
    """The key of a run in the store."""
    return {
        "config": name,
        "contender": contender.name,
        "settings": list(contender.settings),
        "rate": rate,
        "seed": seed,
    }


def compare_values(
    comparisons: Sequence[Comparison], values: Sequence[Sequence[float]]
) -> list[Comparison]:
    """Return the comparisons of other values of the same runs, by contender and seed.

    Each contender is compared with the first one, and p is corrected over all of them.
    """
    baseline = values[0]
    first, *rows = [replace(c, values=list(x)) for c, x in zip(comparisons, values, strict=True)]
    p_values = [paired_p_value(c.values, baseline) for c in rows]
    return [first] + [
        replace(
            c,
            difference=paired_difference(c.values, baseline),
            median=paired_median(c.values, baseline),
            p_value=p,
            corrected_p_value=float(corrected),
            discovery_p_value=float(discovery),
            sign_flip_p_value=sign_flip_p_value(c.values, baseline),
        )
        for c, p, corrected, discovery in zip(
            rows, p_values, correct_p_values(p_values), correct_discoveries(p_values), strict=True
        )
    ]


def bracket_rate(
    measure: Callable[[float], float], rates: Sequence[float], max_rates: int
) -> ChosenRate:
    """Return the best rate, `is_inside` if a lower and a higher one were tried.

    The grid grows by the factor of its last two rates on the side where its best rate is.
    """
    measured = {rate: measure(rate) for rate in rates}
    while True:
        grid = sorted(measured)
        chosen = max(grid, key=lambda rate: measured[rate])
        if chosen not in (grid[0], grid[-1]):
            return ChosenRate(chosen)
        if len(grid) >= max_rates:
            return ChosenRate(chosen, is_inside=False)
        factor = grid[-1] / grid[-2]
        # Twelve digits keep names of runs short, and equal on a resume.
        rate = float(f"{chosen * factor if chosen == grid[-1] else chosen / factor:.12g}")
        measured[rate] = measure(rate)
