# SPDX-License-Identifier: Apache-2.0
"""Studies on beds: contenders trained on small models, each bed a table.

Next: studies/router_trained.py and studies/mxfp4_trained.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.shapes import Metrics, Params
from jaxmoe.study.contenders import Comparison, Contender, count_runs, run_study
from jaxmoe.study.results_store import ResultsStore
from jaxmoe.study.tables import Column, format_chances, format_table
from studies.trained_report import Results, format_overview

QUICK_CONTENDERS, QUICK_WARM_STEPS = 2, 20


@dataclass(frozen=True)
class BedStudy:
    """A study that trains contenders on beds.

    list_contenders: (bed) -> contenders, the bed's own loss first.
    load_weights: (bed, seed, folder, quick) -> the weights that training starts from.
    make_programs: (bed, steps, settings) -> the programs of a contender.
    train: (programs, seed, weights, rate) -> metrics, with `start`, `end` and `rewards`.
    run_seconds: CPU seconds of a run, for the estimate before the first one.
    quick_bed: that of a quick study.
    columns: of the tables, by metric.
    measure_costs: (store, report) -> costs of a step; None for a study without them.
    add_sections: (results, folder) -> more sections of the page; None for a study without them.
    first_seed: of the seeds that are compared; above 0 for a study that repeats another one.
    """

    name: str
    about: str
    beds: Mapping[str, Any]
    list_contenders: Callable[[Any], list[Contender]]
    load_weights: Callable[..., Params]
    make_programs: Callable[[Any, int, tuple[str, ...]], Any]
    train: Callable[[Any, int, Params, float], Metrics]
    seeds: int
    steps: int
    run_seconds: float
    quick_bed: str
    columns: Mapping[str, Column] = field(default_factory=dict)
    measure_costs: Callable[..., dict[str, float]] | None = None
    add_sections: Callable[[Results, Path], dict[str, str]] | None = None
    first_seed: int = 0


@dataclass(frozen=True)
class BedRuns:
    """How much of a study is run. `quick` is a trial of everything, whose figures mean nothing."""

    beds: Sequence[str]
    seeds: int
    steps: int
    quick: bool = False

    def choose_contenders(self, study: BedStudy, bed: str) -> list[Contender]:
        """Return the contenders of a bed; in a quick study two of them."""
        contenders = study.list_contenders(study.beds[bed])
        return contenders[:QUICK_CONTENDERS] if self.quick else contenders


def count_bed_runs(study: BedStudy, runs: BedRuns) -> int:
    """About how many runs all beds take."""
    return sum(
        count_runs(runs.choose_contenders(study, bed), runs.seeds, runs.seeds) for bed in runs.beds
    )


def run_bed(
    study: BedStudy,
    runs: BedRuns,
    name: str,
    *,
    store: ResultsStore,
    folder: Path,
    report: Callable[[str], None] = print,
) -> list[Comparison]:
    """Compare all contenders on a bed; finished runs are in `store` and are not repeated."""
    bed = study.beds[name]

    @functools.cache
    def load_weights(seed: int) -> Params:
        return study.load_weights(bed, seed, folder, runs.quick)

    # A contender's runs follow each other, so the programs of one are needed at a time.
    @functools.lru_cache(maxsize=1)
    def make_programs(settings: tuple[str, ...]) -> Any:
        return study.make_programs(bed, runs.steps, settings)

    def run(contender: Contender, rate: float | None, seed: int) -> Metrics:
        assert rate is not None
        return study.train(make_programs(contender.settings), seed, load_weights(seed), rate)

    return run_study(
        runs.choose_contenders(study, name),
        run,
        name=f"{bed}; {runs.steps} steps",
        store=store,
        seeds=runs.seeds,
        first_seed=study.first_seed,
        measure="end",
        max_rates=3 if runs.quick else 8,
        report=lambda line: report(f"{name}, {line}"),
    )


def format_beds(study: BedStudy, results: Results, costs: Mapping[str, float] | None = None) -> str:
    """Return all tables: one over the beds, and one of each bed."""
    overview = f"All beds, by `python -m studies {study.name}`:\n\n"
    overview += format_overview(results, costs or {})
    parts = [overview] if len(results) > 1 or costs else []
    for bed, comparisons in results.items():
        start = np.mean([run["start"] for run in comparisons[0].metrics])
        parts.append(
            f"### {bed}\n\n`python -m studies {study.name} --beds {bed}`. "
            f"{comparisons[0].contender.name} starts at {start:.3f}.\n\n"
            + format_table(comparisons, study.columns)
            + "\n\n"
            + format_chances(comparisons)
        )
    return "\n\n".join(parts)
