# SPDX-License-Identifier: Apache-2.0
"""`python -m studies STUDY --out FOLDER`: a study, its tables and its figure.

    router_exact       every remedy for top-k routing on micro models, all answers enumerated
    router             the same remedies trained over seeds, where the router is disturbed
    mismatch_weights   corrections of an engine that differs, by length, without training
    mismatch           the same corrections trained over seeds
    mxfp4              ways to train a model that is shipped with four-bit experts, over seeds
    sinks              attention sinks with and without their gradient, over seeds
    turns              ways to give the turns of an episode their credit, over seeds
    teachers           a teacher, rewards, and both, over seeds
    router_confirm     what router may have shown, again on new seeds; also mxfp4_confirm and
                       sinks_confirm
    agents             shared prompts and invariant numerics for agents, over seeds
    leaks              a tool that leaks the answer in one row of three, over seeds
    referee            how often such tables mislead, by simulated studies

A stopped study continues where it was: finished results are in FOLDER, one line a run, and a
FOLDER/STUDY.jsonl.gz is read too. `--quick` tries everything in three minutes. `--page` writes what
was made into a page, between <!-- STUDY: SECTION --> and <!-- end -->.
Exit status 0: finished; 2: a mistake.
Next: studies/bed_study.py and studies/config_study.py.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax

from jaxmoe.cli import INTERRUPTED, ExitStatus
from jaxmoe.config import ConfigError, require
from jaxmoe.run_files import make_folder, replace_text
from jaxmoe.study.contenders import count_runs
from jaxmoe.study.results_store import ResultsStore
from jaxmoe.study.tables import format_verdicts
from studies.agents import AGENTS, LEAKS
from studies.bed_study import BedRuns, BedStudy, count_bed_runs, format_beds, run_bed
from studies.config_study import (
    ConfigStudy,
    format_config_study,
    make_quick,
    run_config_study,
    write_untrained_teacher,
)
from studies.confirm import MXFP4_CONFIRM, ROUTER_CONFIRM, SINKS_CONFIRM
from studies.micro_model import MicroSizes
from studies.mismatch_trained import MISMATCH
from studies.mismatch_weights import (
    LENGTHS,
    MISMATCHES,
    format_weights,
    measure_weights,
    plot_weights,
)
from studies.mxfp4_trained import MXFP4
from studies.referee import judge_studies
from studies.router_exact import RouterStudy, run_router_exact
from studies.router_report import format_tables, plot_tables
from studies.router_trained import ROUTER
from studies.sinks import SINKS
from studies.teachers import TEACHERS
from studies.trained_report import format_advice, plot_trained
from studies.turns import TURNS

BED_STUDIES = (ROUTER, MXFP4, SINKS, MISMATCH, ROUTER_CONFIRM, MXFP4_CONFIRM, SINKS_CONFIRM)
CONFIG_STUDIES = (TURNS, TEACHERS, AGENTS, LEAKS)
QUICK_SEEDS = QUICK_STEPS = 2
# Compiling is most of a quick study, so LLVM optimises nothing there.
QUICK_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
Sections = dict[str, str]  # Markdown, by the name of the section
EXACT_SECONDS = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    with ExitStatus() as status:
        args = make_study_parser().parse_args(argv)
        jax.config.update("jax_platforms", "cpu")  # micro models are slower on an accelerator
        if args.quick:
            os.environ.setdefault("XLA_FLAGS", QUICK_FLAGS)
        status.code = run_command(args)
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
    exact.set_defaults(make_sections=make_exact_sections)
    referee = studies.add_parser("referee", help="how often such tables mislead, simulated")
    referee.add_argument("--studies", type=int, default=200, metavar="N", help="of each kind")
    referee.set_defaults(make_sections=make_referee_sections)
    weights = studies.add_parser(
        "mismatch_weights", help="weights and masks by answer length and mismatch, simulated"
    )
    weights.set_defaults(make_sections=make_weight_sections)
    for study in BED_STUDIES:
        trained = studies.add_parser(study.name, help=study.about)
        trained.add_argument(
            "--beds",
            nargs="+",
            choices=study.beds,
            default=None,
            metavar="BED",
            help=f"of {', '.join(study.beds)}; all by default",
        )
        trained.add_argument(
            "--seeds", type=int, default=study.seeds, metavar="N", help="seeds of a contender"
        )
        trained.add_argument(
            "--steps", type=int, default=study.steps, metavar="N", help="RL steps of a run"
        )
        trained.set_defaults(make_sections=functools.partial(make_bed_sections, study))
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
        trained.set_defaults(make_sections=functools.partial(make_config_sections, config_study))
    for name, study_parser in studies.choices.items():
        study_parser.set_defaults(name=name)
        study_parser.add_argument(
            "--out",
            type=Path,
            default=Path(f"runs/{name}"),
            metavar="FOLDER",
            help="folder of the results; the same folder continues",
        )
        study_parser.add_argument(
            "--quick",
            action="store_true",
            help="try everything in three minutes, in FOLDER/quick; its figures mean nothing",
        )
        study_parser.add_argument(
            "--page",
            nargs="+",
            type=Path,
            default=[],
            metavar="FILE",
            help="pages whose sections of this study are made again",
        )
        study_parser.add_argument(
            "--dry-run", action="store_true", help="say how long it takes, and stop"
        )
    return parser


def run_command(args: argparse.Namespace) -> int:
    """Make the sections of a study, write NAME.md and the pages; return the exit status."""
    name, start = args.name, time.perf_counter()
    folder = args.out / "quick" if args.quick else args.out
    if not args.dry_run:
        make_folder(args.out)
        make_folder(folder)
    try:
        sections = args.make_sections(args, folder)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        show_line(f"stopped; finished runs are in {folder}: the same command continues")
        return INTERRUPTED
    if args.dry_run:
        return 0
    text = "\n\n".join(sections.values()) + "\n"
    replace_text(folder / f"{name}.md", text)
    for page in args.page:
        replace_text(page, replace_sections(page.read_text(), name, sections))
    show_line(text)
    show_line(f"{time.perf_counter() - start:.0f} s; {name}.md is in {folder}")
    return 0


def replace_sections(text: str, name: str, sections: Mapping[str, str]) -> str:
    """Return a page whose sections of the study `name` are these.

    Raises ConfigError for a page without any.
    """
    marks = {section: f"<!-- {name}: {section} -->" for section in sections}
    require(
        any(mark in text for mark in marks.values()),
        f"a page must have {' or '.join(marks.values())}, and <!-- end --> after it.",
    )
    for section, mark in marks.items():
        head, _, rest = text.partition(mark)
        if rest:
            tail = rest.partition("<!-- end -->")[2]
            text = f"{head}{mark}\n\n{sections[section]}\n\n<!-- end -->{tail}"
    return text


def make_bed_sections(study: BedStudy, args: argparse.Namespace, folder: Path) -> Sections:
    """Train the contenders on each bed; also write NAME.png. Nothing for a dry run."""
    seeds, steps = args.seeds, args.steps
    require(seeds > 1, f"--seeds must be at least 2, got {seeds}. Try --seeds {study.seeds}.")
    require(steps > 0, f"--steps must be at least 1, got {steps}. Try --steps {study.steps}.")
    runs = BedRuns(args.beds or list(study.beds), seeds, steps)
    if args.quick:
        runs = BedRuns(args.beds or [study.quick_bed], QUICK_SEEDS, QUICK_STEPS, quick=True)
    store, results = ResultsStore(folder / f"{study.name}.jsonl"), {}
    show_line(store.describe_missing(count_bed_runs(study, runs), study.run_seconds))
    if args.dry_run:
        return {}
    # A contender's programs are compiled in half the time of its runs; a second call has them.
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    for bed in runs.beds:
        results[bed] = run_bed(study, runs, bed, store=store, folder=folder, report=show_line)
        # Written after each bed, so that a stopped study has the tables of those before.
        replace_text(folder / f"{study.name}.md", format_beds(study, results))
        plot_trained(results, folder / f"{study.name}.png")
    costs = None
    if study.measure_costs is not None and not args.quick:
        costs = study.measure_costs(store, report=show_line)
    sections = {"advice": format_advice(results), "tables": format_beds(study, results, costs)}
    return sections | (study.add_sections(results, folder) if study.add_sections else {})


def make_config_sections(study: ConfigStudy, args: argparse.Namespace, folder: Path) -> Sections:
    """Train the contenders of a config. Nothing for a dry run."""
    require(args.seeds > 1, f"--seeds must be at least 2, got {args.seeds}. Try --seeds 8.")
    study = replace(study, settings=(*study.settings, *args.set), seeds=args.seeds)
    store = ResultsStore(folder / f"{study.name}.jsonl")
    if args.quick:
        study = make_quick(study, folder)
    planned = count_runs(study.contenders, study.seeds, min(study.tuning_seeds, study.seeds))
    show_line(store.describe_missing(planned, study.run_seconds))
    if args.dry_run:
        return {}
    if args.quick:
        write_untrained_teacher(study, folder)
    comparisons = run_config_study(
        study, folder, store=store, max_rates=3 if args.quick else 8, report=show_line
    )
    return {
        "advice": format_verdicts(comparisons),
        "tables": format_config_study(comparisons, study),
    }


def make_exact_sections(args: argparse.Namespace, folder: Path) -> Sections:
    """Measure the models; also write router_exact.png. Nothing for a dry run."""
    require(args.models > 0, f"--models must be at least 1, got {args.models}. Try --models 24.")
    models = 1 if args.quick else args.models
    store = ResultsStore(folder / "router_exact.jsonl")
    show_line(store.describe_missing(models, EXACT_SECONDS))
    if args.dry_run:
        return {}
    results = run_router_exact(store, models, RouterStudy(MicroSizes()), show_line)
    plot_tables(results, folder / "router_exact.png")
    return {"tables": format_tables(results).rstrip()}


def make_weight_sections(args: argparse.Namespace, folder: Path) -> Sections:
    """Simulate log ratios; also write mismatch_weights.png. Nothing for a dry run."""
    if args.dry_run:
        show_line("half a minute")
        return {}
    sizes = (LENGTHS[:2], MISMATCHES[-1:]) if args.quick else (LENGTHS, MISMATCHES)
    results = measure_weights(*sizes, report=show_line)
    plot_weights(results, folder / "mismatch_weights.png")
    return {"tables": format_weights(results)}


def make_referee_sections(args: argparse.Namespace, folder: Path) -> Sections:
    """Simulate studies. Nothing for a dry run."""
    require(args.studies > 0, f"--studies must be at least 1, got {args.studies}.")
    if args.dry_run:
        show_line("two minutes")
        return {}
    return {"tables": judge_studies(20 if args.quick else args.studies, show_line)}


def show_line(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
