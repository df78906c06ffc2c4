# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.study STUDY --out FOLDER`: a study, its tables and its figure.

    router_exact   every remedy for top-k routing on micro models, all answers enumerated
    router         the same remedies trained over seeds, where the router is disturbed
    mxfp4          ways to train a model that is shipped with four-bit experts, over seeds

A stopped study continues where it was: finished results are in FOLDER.
Exit status 0: finished; 2: a mistake.
Next: jaxmoe/study/router_exact.py and jaxmoe/study/router_trained.py.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxmoe.cli import ExitStatus
from jaxmoe.config import ConfigError, require
from jaxmoe.run_files import make_folder, replace_text
from jaxmoe.study.micro_model import MicroSizes
from jaxmoe.study.mxfp4_bed import MXFP4_BEDS
from jaxmoe.study.mxfp4_report import format_mxfp4_tables
from jaxmoe.study.mxfp4_trained import run_mxfp4_bed
from jaxmoe.study.router_bed import BEDS
from jaxmoe.study.router_costs import measure_costs
from jaxmoe.study.router_exact import RouterStudy, run_router_exact
from jaxmoe.study.router_report import format_tables, plot_tables
from jaxmoe.study.router_trained import RATES, run_bed
from jaxmoe.study.trained_report import format_trained_tables, plot_trained


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
        prog="python -m jaxmoe.study", description="Studies of the product on small models."
    )
    studies = parser.add_subparsers(metavar="STUDY", required=True)
    exact = studies.add_parser(
        "router_exact", help="bias and deviation of every router remedy, all answers enumerated"
    )
    exact.add_argument("--models", type=int, default=24, metavar="N", help="number of models")
    exact.add_argument("--out", type=Path, default=Path("runs/router_exact"), metavar="FOLDER",
                       help="folder of the results; the same folder continues")  # fmt: skip
    exact.set_defaults(run=run_exact_command)
    trained = studies.add_parser(
        "router",
        help="every router remedy trained over seeds on disturbed beds, and its cost of a step",
    )
    trained.add_argument("--beds", nargs="+", choices=BEDS, default=list(BEDS), metavar="BED",
                         help=f"of {', '.join(BEDS)}; all by default")  # fmt: skip
    trained.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds of a contender")
    trained.add_argument("--steps", type=int, default=40, metavar="N", help="RL steps of a run")
    trained.add_argument("--out", type=Path, default=Path("runs/router"), metavar="FOLDER",
                         help="folder of the results; the same folder continues")  # fmt: skip
    trained.set_defaults(run=run_trained_command)
    mxfp4 = studies.add_parser(
        "mxfp4", help="ways to train a model that is shipped with four-bit experts, over seeds"
    )
    mxfp4.add_argument("--beds", nargs="+", choices=MXFP4_BEDS, default=list(MXFP4_BEDS),
                       metavar="BED",
                       help=f"of {', '.join(MXFP4_BEDS)}; all by default")  # fmt: skip
    mxfp4.add_argument("--seeds", type=int, default=8, metavar="N", help="seeds of a contender")
    mxfp4.add_argument("--steps", type=int, default=60, metavar="N", help="RL steps of a run")
    mxfp4.add_argument("--out", type=Path, default=Path("runs/mxfp4"), metavar="FOLDER",
                       help="folder of the results; the same folder continues")  # fmt: skip
    mxfp4.set_defaults(run=run_mxfp4_command)
    return parser


def run_trained_command(args: argparse.Namespace) -> int:
    """Train the contenders on each bed, measure the cost of a step with each remedy, and write
    router.md and .png; return the exit status."""
    require(args.seeds > 1, f"--seeds must be at least 2, got {args.seeds}. Try --seeds 5.")
    require(args.steps > 0, f"--steps must be at least 1, got {args.steps}. Try --steps 40.")
    folder, start, results = make_folder(args.out), time.perf_counter(), {}
    # A contender's programs are compiled in half the time of its runs; a second call has them.
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    try:
        for name in args.beds:
            results[name] = run_bed(
                BEDS[name], folder, seeds=args.seeds, steps=args.steps, rates=RATES,
                report=show_line,
            )  # fmt: skip
            # Written after each bed, so that a stopped study has the tables of those before.
            replace_text(folder / "router.md", format_trained_tables(results))
            plot_trained(results, folder / "router.png")
        tables = format_trained_tables(results, measure_costs(folder, show_line))
        replace_text(folder / "router.md", tables)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        show_line(f"stopped; finished runs are in {folder}: the same command continues")
        return 130  # as a shell reports it
    show_line(tables)
    show_line(f"{time.perf_counter() - start:.0f} s; router.md and .png are in {folder}")
    return 0


def run_mxfp4_command(args: argparse.Namespace) -> int:
    """Train the contenders on each bed and write mxfp4.md and .png; return the exit status."""
    require(args.seeds > 1, f"--seeds must be at least 2, got {args.seeds}. Try --seeds 8.")
    require(args.steps > 0, f"--steps must be at least 1, got {args.steps}. Try --steps 60.")
    folder, start, results = make_folder(args.out), time.perf_counter(), {}
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    try:
        for name in args.beds:
            results[name] = run_mxfp4_bed(
                MXFP4_BEDS[name], folder, seeds=args.seeds, steps=args.steps, report=show_line
            )
            replace_text(folder / "mxfp4.md", format_mxfp4_tables(results))
            plot_trained(results, folder / "mxfp4.png")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except KeyboardInterrupt:
        show_line(f"stopped; finished runs are in {folder}: the same command continues")
        return 130  # as a shell reports it
    show_line(format_mxfp4_tables(results))
    show_line(f"{time.perf_counter() - start:.0f} s; mxfp4.md and .png are in {folder}")
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
