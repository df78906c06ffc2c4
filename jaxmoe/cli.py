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
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

from jaxmoe.config import Config, ConfigError, EngineError
from jaxmoe.config_file import load_config, resolve
from jaxmoe.observe.printable import printable
from jaxmoe.observe.streams import flush_output, reader_is_gone
from jaxmoe.parallel.host import keep_freed_memory, use_one_thread_per_device
from jaxmoe.run_files import is_disk_error


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
    os.umask(os.umask(0o022) | 0o002)  # weights and configs are not everybody's to write
    config = resolve(load_config(args.config), *args.changes)
    if config.mesh.devices > 1:
        use_one_thread_per_device()
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
        # a broken pipe to a server is an error like others
        handled = self._tell(error, unread=isinstance(error, BrokenPipeError) and reader_is_gone())
        refused = flush_output()
        if refused is not None and error is None:
            handled = self._tell(refused, unread=isinstance(refused, BrokenPipeError))
        return handled

    def _tell(self, error: BaseException | None, *, unread: bool) -> bool:
        if unread:
            _print_error("\n".join(getattr(error, "__notes__", [])))  # what was saved
            self.code = 128 + signal.SIGPIPE
        elif isinstance(error, ConfigError | EngineError):
            _print_error(f"error: {printable(str(error))}")
            self.code = 2 if isinstance(error, ConfigError) else 1
        elif isinstance(error, OSError) and is_disk_error(error):
            _print_error(
                f"error: the disk must take the files of the run folder; {printable(str(error))}. "
                "Checkpoints are untouched; free some space or mend the disk, and type the same "
                "command."
            )
            self.code = 2
        elif isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            name = printable(str(error.filename))[:80]
            _print_error(
                f"error: a name must be that of a file; {error.strerror}: {name!r}. "
                "Type another one."
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


def _print_error(line: str) -> None:
    with suppress(OSError):  # nobody may be there to read it
        if line:
            print(line, file=sys.stderr, flush=True)


class Stopped(Exception):
    """The run was asked to stop and saved first."""

    def __init__(self, number: int, where: str) -> None:
        super().__init__(f"{signal.Signals(number).name}: {where}")
        self.signal = number


@dataclass
class StopRequest:
    """The signal that asked the run to stop, or 0. Only the signal handler writes it: a second
    writer could overwrite a signal that arrives while it decides."""

    signal: int = 0


STOP_SIGNALS = (
    signal.SIGTERM,  # Kubernetes, SLURM at the time limit, kill
    signal.SIGINT,  # Ctrl-C
    signal.SIGUSR1,  # the usual warning of SLURM's --signal
    signal.SIGHUP,  # the terminal was closed
)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Let STOP_SIGNALS finish the step and save; a second Ctrl-C stops at once.

    SIGHUP stays ignored where it was, which is what nohup does.
    """
    request = StopRequest()

    def handler(number: int, _frame: object) -> None:
        request.signal = number
        if number == signal.SIGHUP:
            _drop_lost_terminal()
        with suppress(OSError):  # nobody may be left to read it
            os.write(2, b"\nstopping after this step and saving; Ctrl-C again stops at once\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    taken = [n for n in STOP_SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    old = {n: signal.signal(n, handler) for n in taken}
    try:
        yield request
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


def _drop_lost_terminal() -> None:
    """Send later output nowhere where its terminal is gone: a write would fail, and end the run
    before it is saved."""
    for output in (1, 2):
        try:
            termios.tcgetattr(output)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)
