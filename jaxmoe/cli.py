# SPDX-License-Identifier: Apache-2.0
"""The common options of all commands: --config, --set, --workdir, --dry-run.

Next: jaxmoe/train.py.
"""

import argparse
import dataclasses
import errno
import io
import os
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

from jaxmoe.config import Config, ConfigError, EngineError
from jaxmoe.config_file import load_config, resolve
from jaxmoe.distributed.compiled_programs import keep_compiled_programs
from jaxmoe.distributed.host import keep_freed_memory, use_one_thread_per_device
from jaxmoe.observe.printable import escape_unprintable
from jaxmoe.observe.streams import flush_output, reader_is_gone
from jaxmoe.run_files import is_disk_error

INTERRUPTED = 130  # the exit status after Ctrl-C, as a shell reports it


def parse_config(argv: Sequence[str] | None, description: str) -> tuple[Config, bool]:
    """(config, dry_run) of a command line. Raises ConfigError for an invalid config."""
    args = build_parser(description).parse_args(argv)
    return open_command(args), args.dry_run


def open_command(args: argparse.Namespace) -> Config:
    """The config of a command that computes; it then finds the programs of earlier runs."""
    # A dry run writes no file, not even the bytecode of the config file.
    if args.dry_run:
        sys.dont_write_bytecode = True
    config = config_from_args(args)
    line = None if args.dry_run else keep_compiled_programs()
    if line is not None:
        print(line, flush=True)
    return config


def build_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every command."""
    parser = argparse.ArgumentParser(description=description)
    # Not required here: load_config lists the shipped ones where there is none.
    parser.add_argument(
        "--config",
        nargs="?",
        default="",
        const="",
        metavar="FILE",
        help="tiny.py, or a path; without FILE: list the shipped ones",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="change one field, as in optim.lr=1e-4; may be repeated",
    )
    parser.add_argument("--workdir", metavar="DIR", help="run folder; the same folder resumes")
    parser.add_argument(
        "--dry-run", action="store_true", help="check config, memory and data; write nothing"
    )
    return parser


def config_from_args(args: argparse.Namespace) -> Config:
    """The config of parsed options. Raises ConfigError if it is invalid."""
    keep_freed_memory()
    # No file of a run may be writable by everybody. A umask can only be read by setting it.
    os.umask(os.umask(0o022) | 0o002)
    config = resolve(load_config(args.config), *args.changes)
    if config.mesh.devices > 1:
        use_one_thread_per_device()
    if args.workdir is None:
        return config
    return dataclasses.replace(config, workdir=args.workdir)


class ExitStatus:
    """A context manager that turns a user's mistake into one line and an exit status."""

    def __init__(self) -> None:
        self.code = 0

    def __enter__(self) -> "ExitStatus":
        # A path may not be encodable. It is then printed with escapes, as Python's stderr does.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Return True if the error was handled, which suppresses its traceback."""
        # A broken pipe to a server is not a closed standard output.
        handled = self._handle_error(
            error, pipe_closed=isinstance(error, BrokenPipeError) and reader_is_gone()
        )
        output_error = flush_output()
        if output_error is not None and error is None:
            handled = self._handle_error(
                output_error, pipe_closed=isinstance(output_error, BrokenPipeError)
            )
        return handled

    def _handle_error(self, error: BaseException | None, *, pipe_closed: bool) -> bool:
        if pipe_closed:
            # The notes of the error say what was saved.
            _print_error("\n".join(getattr(error, "__notes__", [])))
            self.code = 128 + signal.SIGPIPE
        elif isinstance(error, ConfigError | EngineError):
            _print_error(f"error: {escape_unprintable(str(error))}")
            self.code = 2 if isinstance(error, ConfigError) else 1
        elif isinstance(error, OSError) and is_disk_error(error):
            _print_error(
                "error: the files of the run folder must be writable; "
                f"{escape_unprintable(str(error))}. Checkpoints are unchanged; free some space or "
                "repair the disk, and type the same command."
            )
            self.code = 2
        elif isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            name = escape_unprintable(str(error.filename))[:80]
            _print_error(
                f"error: a path must be valid; {error.strerror}: {name!r}. Type another one."
            )
            self.code = 2
        elif isinstance(error, Stopped):
            print(error)
            self.code = 128 + error.signal
        elif isinstance(error, KeyboardInterrupt):
            print("stopped without saving; the same command resumes from the last checkpoint")
            self.code = INTERRUPTED
        else:
            return False
        return True


def _print_error(line: str) -> None:
    with suppress(OSError):  # the terminal may be closed
        if line:
            print(line, file=sys.stderr, flush=True)


class Stopped(Exception):
    """The run received a stop signal and saved before it ended."""

    def __init__(self, number: int, saved_note: str) -> None:
        super().__init__(f"{signal.Signals(number).name}: {saved_note}")
        self.signal = number


@dataclass
class StopRequest:
    """The stop signal that the run received, or 0.

    Only the signal handler writes it: a second writer could overwrite a new signal.
    """

    signal: int = 0


STOP_SIGNALS = (
    signal.SIGTERM,  # from Kubernetes, SLURM at the time limit, kill
    signal.SIGINT,  # Ctrl-C
    signal.SIGUSR1,  # the usual warning of SLURM's --signal
    signal.SIGHUP,  # the terminal was closed
)


@contextmanager
def handle_stop_signals() -> Iterator[StopRequest]:
    """Handle STOP_SIGNALS: finish the step and save; a second Ctrl-C stops at once.

    A signal that is ignored stays ignored (nohup ignores SIGHUP), except SIGINT.
    """
    request = StopRequest()

    def on_signal(number: int, _frame: object) -> None:
        request.signal = number
        if number == signal.SIGHUP:
            _drop_lost_terminal()
        with suppress(OSError):  # the terminal may be closed
            # print would raise an error if the signal interrupted another print.
            os.write(2, b"\nstopping after this step and saving; Ctrl-C again stops at once\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    handled = [
        n for n in STOP_SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN
    ]
    previous_handlers = {n: signal.signal(n, on_signal) for n in handled}
    try:
        yield request
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


def _drop_lost_terminal() -> None:
    """Redirect output to /dev/null if its terminal is gone.

    A failing write would end the run before it is saved.
    """
    for output in (1, 2):
        try:
            termios.tcgetattr(output)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)
