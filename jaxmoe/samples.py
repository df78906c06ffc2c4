# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.samples RUN`: show the policy's answers at each recorded step.

Prints the newest recorded step, or --step N, and writes RUN/samples.html.
Next: jaxmoe/collection/recorded.py decides what is recorded.
"""

import argparse
import sys
from pathlib import Path

from jaxmoe.cli import ExitStatus
from jaxmoe.config import ConfigError
from jaxmoe.observe.metrics import read_samples
from jaxmoe.observe.samples_page import format_samples, group_by_step, write_page
from jaxmoe.run_files import RunFolderError


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        args = build_samples_parser().parse_args(argv)
        show_samples(Path(args.run), args.step)
    return status.code


def build_samples_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Show the policy's answers at each recorded step.")
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--step", type=int, metavar="N", help="show only this step; default: the newest"
    )
    return parser


def show_samples(run: Path, step: int | None = None) -> None:
    """Print one step (default: the newest) and write the page of that step (default: of all).

    Raises: ConfigError if no samples or not that step were recorded, or the page cannot be written.
    """
    rows = read_samples(run / "samples.jsonl")
    steps = group_by_step(rows)
    if not steps:
        raise ConfigError(
            f"RUN must be the folder of a run with recorded samples (samples.jsonl); got {run}. "
            "Try python -m jaxmoe.samples runs/tiny."
        )
    if step is not None and step not in steps:
        nearest = min(steps, key=lambda n: abs(n - step))
        raise ConfigError(
            f"--step must be a recorded step ({', '.join(map(str, steps))}), got {step}. "
            f"Try --step {nearest}."
        )
    chosen = max(steps) if step is None else step
    page = run / "samples.html"
    # Written before anything is printed, because `| head` closes the pipe early.
    try:
        write_page(rows if step is None else steps[step], f"Samples of {run.resolve().name}", page)
    except RunFolderError as error:
        print(format_samples(chosen, steps[chosen]))
        raise ConfigError(f"{error} To read it here, try a copy of the folder.") from error
    print(format_samples(chosen, steps[chosen]))
    print(f"\nsteps recorded: {', '.join(map(str, steps))}\npage  {page}")


if __name__ == "__main__":
    sys.exit(main())
