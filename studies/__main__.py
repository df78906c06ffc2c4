# SPDX-License-Identifier: Apache-2.0
"""`python -m studies STUDY --out FOLDER`: a study, its tables and its figure.

    router_exact   every remedy for top-k routing on micro models, all answers enumerated
    router         the same remedies trained over seeds, where the router is disturbed
    mxfp4          ways to train a model that is shipped with four-bit experts, over seeds
    turns          ways to give the turns of an episode their credit, over seeds
    teachers       a teacher, rewards, and both, over seeds

A stopped study continues where it was: finished results are in FOLDER.
Exit status 0: finished; 2: a mistake.
Next: studies/router_exact.py and studies/router_trained.py.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxmoe.cli import ExitStatus
from jaxmoe.config import ConfigError, require
from jaxmoe.run_files import make_folder, replace_text
from jaxmoe.study.contenders import Comparison
from studies.config_study import ConfigStudy, format_config_study, run_config_study
from studies.micro_model import MicroSizes
from studies.mxfp4_bed import MXFP4_BEDS
from studies.mxfp4_report import format_mxfp4_tables
from studies.mxfp4_trained import run_mxfp4_bed
from studies.router_bed import BEDS
from studies.router_costs import measure_costs
from studies.router_exact import RouterStudy, run_router_exact
from studies.router_report import format_tables, plot_tables
from studies.router_trained import run_bed
from studies.teachers import TEACHERS
from studies.trained_report import format_trained_tables, plot_trained
from studies.turns import TURNS


@dataclass(frozen=True)
class TrainedStudy:
    """A study that trains contenders on beds.

    seeds, steps: defaults of the options.
    run_bed: (bed, folder, seeds, steps, report) -> comparisons.
    format_tables: (comparisons by bed, measured costs) -> Markdown.
    measure_costs: (folder, report) -> costs, for the last tables; None if the study has none.
    """

    name: str
    about: str
    beds: Mapping[str, Any]
    seeds: int
    steps: int
    run_bed: Callable[..., list[Comparison]]
    format_tables: Callable[..., str]
    measure_costs: Callable[..., Any] | None = None


TRAINED_STUDIES = (
    TrainedStudy(
        "router",
        "every router remedy trained over seeds on disturbed beds, and its cost of a step",
        BEDS,
        5,
        40,
        run_bed,
        format_trained_tables,
        measure_costs,
    ),
    TrainedStudy(
        "mxfp4",
        "ways to train a model that is shipped with four-bit experts, over seeds",
        MXFP4_BEDS,
        8,
        60,
        run_mxfp4_bed,
        format_mxfp4_tables,
    ),
)
CONFIG_STUDIES = (TURNS, TEACHERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    with ExitStatus() as status:
        args = make_study_parser().parse_args(argv)
        jax.config.update("jax_platforms", "cpu")  # micro models are slower on an accelerator
        status.code = args.run(args)
    return status.code


def make_study_parser() -> argparse.ArgumentParser:
    """The parser with one subcommand for each study."""
    parser = argparse.ArgumentParser(
        prog="python -m studies", description="Studies of the product on small models."
    )
    studies = parser.add_subparsers(metavar="STUDY", required=True)
    exact = studies.add_parser(
        "router_exact", help="bias and deviation of every router remedy, all answers enumerated"
    )
    exact.add_argument("--models", type=int, default=24, metavar="N", help="number of models")
    exact.set_defaults(run=run_exact_command)
    for study in TRAINED_STUDIES:
        trained = studies.add_parser(study.name, help=study.about)
        trained.add_argument(
            "--beds",
            nargs="+",
            choices=study.beds,
            default=list(study.beds),
            metavar="BED",
            help=f"of {', '.join(study.beds)}; all by default",
        )
        trained.add_argument(
            "--seeds", type=int, default=study.seeds, metavar="N", help="seeds of a contender"
        )
        trained.add_argument(
            "--steps", type=int, default=study.steps, metavar="N", help="RL steps of a run"
        )
        trained.set_defaults(run=functools.partial(run_trained_command, study))
    for config_study in CONFIG_STUDIES:
        trained = studies.add_parser(config_study.name, help=config_study.about)
        trained.add_argument(
            "--seeds", type=int, default=config_study.seeds, metavar="N", help="that are compared"
        )
        trained.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a setting of every run, such as steps=2",
        )
        trained.set_defaults(run=functools.partial(run_config_command, config_study))
    for name, study_parser in studies.choices.items():
        study_parser.add_argument(
            "--out",
            type=Path,
            default=Path(f"runs/{name}"),
            metavar="FOLDER",
            help="folder of the results; the same folder continues",
        )
    return parser


def run_trained_command(study: TrainedStudy, args: argparse.Namespace) -> int:
    """Train the contenders on each bed and write NAME.md and .png; return the exit status."""
    name, seeds, steps = study.name, args.seeds, args.steps
    require(seeds > 1, f"--seeds must be at least 2, got {seeds}. Try --seeds {study.seeds}.")
    require(steps > 0, f"--steps must be at least 1, got {steps}. Try --steps {study.steps}.")
    folder, start, results = make_folder(args.out), time.perf_counter(), {}
    # A contender's programs are compiled in half the time of its runs; a second call has them.
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    try:
        for bed in args.beds:
            results[bed] = study.run_bed(
                study.beds[bed], folder, seeds=seeds, steps=steps, report=show_line
            )
            # Written after each bed, so that a stopped study has the tables of those before.
            replace_text(folder / f"{name}.md", study.format_tables(results))
            plot_trained(results, folder / f"{name}.png")
        tables = study.format_tables(results)
        if study.measure_costs is not None:
            tables = study.format_tables(results, study.measure_costs(folder, show_line))
            replace_text(folder / f"{name}.md", tables)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        show_line(f"stopped; finished runs are in {folder}: the same command continues")
        return 130  # as a shell reports it
    show_line(tables)
    show_line(f"{time.perf_counter() - start:.0f} s; {name}.md and .png are in {folder}")
    return 0


def run_config_command(study: ConfigStudy, args: argparse.Namespace) -> int:
    """Train the contenders of a config and write NAME.md; return the exit status."""
    require(args.seeds > 1, f"--seeds must be at least 2, got {args.seeds}. Try --seeds 8.")
    folder = make_folder(args.out)
    try:
        comparisons = run_config_study(
            study, folder, seeds=args.seeds, settings=args.set, report=show_line
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        show_line(f"stopped; finished runs are in {folder}: the same command continues")
        return 130  # as a shell reports it
    table = format_config_study(comparisons, study.name)
    replace_text(folder / f"{study.name}.md", table)
    show_line(table)
    return 0


def run_exact_command(args: argparse.Namespace) -> int:
    """Measure the models and write router_exact.md and .png; return the exit status."""
    require(args.models > 0, f"--models must be at least 1, got {args.models}. Try --models 24.")
    folder, start = make_folder(args.out), time.perf_counter()
    try:
        results = run_router_exact(folder, args.models, RouterStudy(MicroSizes()), show_line)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        show_line(f"stopped; finished models are in {folder}: the same command continues")
        return 130  # as a shell reports it
    tables = format_tables(results)
    replace_text(folder / "router_exact.md", tables)
    plot_tables(results, folder / "router_exact.png")
    show_line(tables)
    show_line(f"{time.perf_counter() - start:.0f} s; router_exact.md and .png are in {folder}")
    return 0


def show_line(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
