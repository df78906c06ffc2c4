# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe.samples RUN`: what the policy answered, step by step.

Prints the newest recorded step, or --step N, and writes RUN/samples.html.
Next: jaxmoe/envs/recorded.py says what is recorded.
"""

import argparse
import sys
from pathlib import Path

from jaxmoe.cli import ExitStatus
from jaxmoe.config import ConfigError
from jaxmoe.observe.metrics import read_samples
from jaxmoe.observe.samples_page import as_text, by_step, write_page
from jaxmoe.run_files import RunFolderError


def main(argv: list[str] | None = None) -> int:
    with ExitStatus() as status:
        args = arguments().parse_args(argv)
        show(Path(args.run), args.step)
    return status.code


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Show what the policy answered, step by step.")
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--step", type=int, metavar="N", help="that step alone; else the newest")
    return parser


def show(run: Path, step: int | None = None) -> None:
    """Print one step and write the page, of that step or of all.

    Raises ConfigError where nothing was recorded, or not that step, or no page can be written.
    """
    rows = read_samples(run / "samples.jsonl")
    steps = by_step(rows)
    if not steps:
        raise ConfigError(
            f"RUN must be the folder of a run that was evaluated, with samples.jsonl in it; got "
            f"{run}. Try python -m jaxmoe.samples runs/tiny."
        )
    if step is not None and step not in steps:
        near = min(steps, key=lambda n: abs(n - step))
        raise ConfigError(
            f"--step must be one that was recorded ({', '.join(map(str, steps))}), got {step}. "
            f"Try --step {near}."
        )
    chosen = max(steps) if step is None else step
    page = run / "samples.html"
    try:  # before the text: `| head` closes the pipe as soon as it has its lines
        write_page(rows if step is None else steps[step], f"Samples of {run.resolve().name}", page)
    except RunFolderError as error:
        print(as_text(chosen, steps[chosen]))
        raise ConfigError(f"{error} To read it here, try a copy of the folder.") from error
    print(as_text(chosen, steps[chosen]))
    print(f"\nsteps recorded: {', '.join(map(str, steps))}\npage  {page}")


if __name__ == "__main__":
    sys.exit(main())
