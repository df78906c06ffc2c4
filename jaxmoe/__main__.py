# SPDX-License-Identifier: Apache-2.0
"""`python -m jaxmoe`: the list of commands, and the version."""

import argparse
import sys
from collections.abc import Sequence

from jaxmoe import __version__

COMMANDS = {
    "train": "train by reinforcement learning: --config tiny.py",
    "eval": "score a run's newest checkpoint on the held-out rows",
    "doctor": "compare the log-probs of the rollout engine with the trainer's, and name the cause",
    "export": "write a run's newest checkpoint as a Hugging Face folder",
    "samples": "show what a run answered: samples RUN",
    "plan": "compile a run's step for another machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    lines = [f"  python -m jaxmoe.{name:<8} {text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m jaxmoe",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="GPT-OSS, trained by reinforcement learning in JAX. The commands:\n\n"
        + "\n".join(lines),
        epilog="Each has --help. train, eval, doctor, export and plan take --config FILE; without "
        "FILE it lists\nthe configs that are shipped.",
    )
    parser.add_argument("--version", action="version", version=f"jaxmoe {__version__}")
    typed = list(sys.argv[1:] if argv is None else argv)
    if typed and typed[0] in COMMANDS:
        parser.exit(2, f"error: a command is a module. Type python -m jaxmoe.{' '.join(typed)}\n")
    parser.parse_args(typed)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
