# SPDX-License-Identifier: Apache-2.0
"""A referee of the studies: simulated ones, run and compared by the same functions.

How often does a table of contenders that differ in nothing have a bold cell, and how often is an
effect as small as the smallest one that a page claims seen? Next: studies/__main__.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxmoe.study.contenders import Comparison, Contender, run_study
from jaxmoe.study.families import FamilyChances, measure_family, measure_power
from jaxmoe.study.paired import paired_difference, paired_median
from jaxmoe.study.results_store import ResultsStore
from jaxmoe.study.tables import is_verdict

BEST_RATE, RATES = 5e-4, (2.5e-4, 5e-4)


@dataclass(frozen=True)
class Scenario:
    """A study as of a page, with the noise of its table.

    rows: contenders beside the baseline.
    deviation: of a run beside its seed, as the residuals of the page's table have it.
    curvature: the score that is lost at twice or half of the best rate; 0 for one rate of all.
    collapse: chance that a run ends at 0 instead of near 0.6.
    effect: the smallest one that a page concludes something from; None if it is left to a study
        that repeats the contenders.
    """

    name: str
    rows: int
    deviation: float
    effect: float | None
    curvature: float = 0.05
    collapse: float = 0.0
    seeds: int = 8
    tuning_seeds: int | None = None


TRANSITIONS = Scenario("mxfp4, transitions", 8, 0.063, 0.196)
SCENARIOS = (
    Scenario("router, many_updates", 29, 0.052, None),
    Scenario("router, two_forwards", 25, 0.084, None),
    Scenario("router_confirm, many_updates", 11, 0.054, 0.09, seeds=16),
    Scenario("router_confirm, two_forwards", 9, 0.061, 0.11, seeds=16),
    Scenario("router_confirm, noisy_engine", 6, 0.053, 0.109, seeds=16),
    Scenario("mxfp4_confirm, reversal", 1, 0.041, 0.086, seeds=16),
    TRANSITIONS,
    Scenario("mxfp4, small_rate", 3, 0.03, 0.106, curvature=0.0),
    Scenario("leaks", 2, 0.018, 0.086, curvature=0.0),
    Scenario("turns", 4, 0.1, 0.47, collapse=1 / 8),
    replace(TRANSITIONS, name="transitions, a run in eight collapses", collapse=1 / 8),
)
# As studies were made before each counted seed had a seed that chooses its rate.
ONE_SEED = replace(TRANSITIONS, name="transitions, rates by one seed", tuning_seeds=1)


COVERAGES = (
    ("none", 0.0, 0.0),
    ("one in eight, of both sides", 1 / 8, 1 / 8),
    ("one in eight, of one side", 1 / 8, 0.0),
)


def simulate_study(scenario: Scenario, seed: int) -> list[Comparison]:
    """Run one study whose contenders differ in nothing."""
    rng = np.random.default_rng(seed)
    seed_effects = dict[int, float]()

    def run(contender: Contender, rate: float | None, seed: int) -> dict[str, float]:
        assert rate is not None
        shared = seed_effects.setdefault(seed, rng.normal(0.6, 0.06))
        lost = scenario.curvature * np.log2(rate / BEST_RATE) ** 2
        value = shared - lost + rng.normal(0.0, scenario.deviation)
        return {"score": 0.0 if rng.random() < scenario.collapse else float(value)}

    rates = RATES if scenario.curvature else RATES[-1:]
    contenders = [Contender(str(n), rates=rates) for n in range(scenario.rows + 1)]
    return run_study(
        contenders,
        run,
        name="",
        store=ResultsStore(),
        seeds=scenario.seeds,
        measure="score",
        tuning_seeds=scenario.tuning_seeds,
    )


def measure_scenario(scenario: Scenario, studies: int) -> tuple[float, FamilyChances, float | None]:
    """Return the share of studies with a bold cell, all chances, and the power of the effect."""
    tables = [simulate_study(scenario, seed) for seed in range(studies)]
    false = float(np.mean([any(map(is_verdict, table)) for table in tables]))
    values = np.array([[c.values for c in table] for table in tables])
    differences = values[:, 1:] - values[:, :1]
    power = None if scenario.effect is None else measure_power(differences, scenario.effect)
    return false, measure_family(differences), power


def measure_coverage(collapses: Sequence[float], seeds: int, studies: int) -> tuple[float, float]:
    """Return how often Student's interval covers the true mean, and the exact one the median.

    collapses: chances that a run ends at 0, of the contender and of the baseline.
    """
    rng = np.random.default_rng(0)

    def draw_runs(collapse: float, count: int) -> np.ndarray:
        values = rng.normal(0.6, 0.03, size=count)
        return np.where(rng.random(count) < collapse, 0.0, values)

    sides = [draw_runs(collapse, 10**6) for collapse in collapses]
    mean = 0.6 * (collapses[1] - collapses[0])
    median = float(np.median(sides[0] - sides[1]))
    covered = np.zeros(2)
    for _ in range(studies):
        values, baseline = (list(draw_runs(collapse, seeds)) for collapse in collapses)
        student, exact = paired_difference(values, baseline), paired_median(values, baseline)
        covered += (student.low <= mean <= student.high, exact.low <= median <= exact.high)
    return float(covered[0] / studies), float(covered[1] / studies)


def judge_studies(studies: int = 200, report: Callable[[str], None] = lambda line: None) -> str:
    """Return the referee's tables in Markdown."""
    lines = [
        f"`python -m studies referee --studies {studies}`: {studies} simulated studies a row.",
        "",
        "| study | contenders | seeds | bold without an effect | bold or italic | smallest claim | "
        "seen | seen in 80 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    shares = []
    for scenario in (*SCENARIOS, ONE_SEED):
        report(f"referee: {scenario.name}")
        false, chances, power = measure_scenario(scenario, studies)
        if scenario is ONE_SEED:
            share = np.mean(shares)
            error = np.sqrt(share * (1 - share) / (len(shares) * studies))
            lines.append(f"| these together | | | {share:.1%} ± {error:.1%} | | | | |")
        shares.append(false)
        claim = "| | |" if power is None else f"| {scenario.effect:g} | {power:.0%} |"
        lines.append(
            f"| {scenario.name} | {scenario.rows} | {scenario.seeds} | {false:.1%} | "
            f"{chances.any_discovery:.1%} {claim} {chances.visible_effect:.2g} |"
        )
    lines += [
        "",
        "| runs that collapse | seeds | mean, Student's 95 % | median, exact |",
        "|---|---|---|---|",
    ]
    for name, *collapses in COVERAGES:
        for seeds in (5, 8):
            student, exact = measure_coverage(collapses, seeds, 20 * studies)
            lines.append(f"| {name} | {seeds} | {student:.1%} | {exact:.1%} |")
    return "\n".join(lines)
