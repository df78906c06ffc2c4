# SPDX-License-Identifier: Apache-2.0
"""The command line all commands share: --config, --set, --workdir, --dry-run, and nothing else.

Next: jaxmoe/train.py.
"""

import argparse
import dataclasses
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from jaxmoe.config import Config, ConfigError, EngineError
from jaxmoe.config_file import load, resolve
from jaxmoe.observe.printable import printable
from jaxmoe.parallel.host import keep_freed_memory, one_thread_a_device


def parse(argv: Sequence[str] | None, description: str) -> tuple[Config, bool]:
    """The config that was typed, and whether to look only. Raises ConfigError for a mistake."""
    args = arguments(description).parse_args(argv)
    if args.dry_run:  # it leaves no file, Python's own of the config file included
        sys.dont_write_bytecode = True
    return config_of(args), args.dry_run


def arguments(description: str) -> argparse.ArgumentParser:
    """The options of every command."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", required=True, metavar="FILE", help="tiny.py, or a path")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
                        help="change one field, as in optim.lr=1e-4; may be repeated")  # fmt: skip
    parser.add_argument("--workdir", metavar="DIR", help="run folder; the same folder resumes")
    parser.add_argument("--dry-run", action="store_true",
                        help="look only: config, memory, data; nothing is written")  # fmt: skip
    return parser


def config_of(args: argparse.Namespace) -> Config:
    """The config that these options say. Raises ConfigError for a mistake."""
    keep_freed_memory()
    config = resolve(load(args.config), *args.changes)
    if config.mesh.devices > 1:
        one_thread_a_device()
    return dataclasses.replace(config, workdir=args.workdir) if args.workdir else config


class ExitStatus:
    """What a command exits with: inside, a user's mistake becomes one line and a status."""

    def __init__(self) -> None:
        self.code = 0

    def __enter__(self) -> "ExitStatus":
        if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold what it cannot encode
            sys.stdout.reconfigure(errors="backslashreplace")  # as Python's stderr does
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:  # fmt: skip
        """Whether the error was the user's, and has been told."""
        if isinstance(error, ConfigError | EngineError):
            print(f"error: {printable(str(error))}", file=sys.stderr)
            self.code = 2 if isinstance(error, ConfigError) else 1
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            print(
                f"error: the disk must have space for the run folder; {error}. Checkpoints are "
                "untouched; free some space and type the same command.",
                file=sys.stderr,
            )
            self.code = 2
        elif isinstance(error, Stopped):
            print(error)
            self.code = 128 + error.signal
        elif isinstance(error, KeyboardInterrupt):
            print("stopped without saving; the same command resumes from the last checkpoint")
            self.code = 130
        else:
            return False
        return True


class Stopped(Exception):
    """The run was asked to stop and saved first."""

    def __init__(self, number: int, where: str) -> None:
        super().__init__(f"{signal.Signals(number).name}: {where}")
        self.signal = number


@dataclass
class StopRequest:
    """Set by the first SIGTERM or Ctrl-C; the loop looks at it between steps."""

    signal: int = 0


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Let SIGTERM and Ctrl-C finish the step and save; a second Ctrl-C stops at once."""
    request = StopRequest()

    def handler(number: int, _frame: object) -> None:
        request.signal = number
        os.write(2, b"\nstopping after this step and saving; Ctrl-C again stops at once\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    old = {n: signal.signal(n, handler) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)
