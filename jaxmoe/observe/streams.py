# SPDX-License-Identifier: Apache-2.0
"""Handle a closed standard output: `command | head -1` must end without a traceback.

Next: jaxmoe/cli.py calls it at the end of every command.
"""

import os
import select
import sys
from contextlib import suppress
from typing import TextIO


def reader_is_gone() -> bool:
    """True if standard output or error is a pipe whose reader closed it."""
    return any(_is_broken(stream) for stream in (sys.stdout, sys.stderr))


def flush_output() -> OSError | None:
    """Flush standard output and error; a stream that fails is redirected to /dev/null.

    Otherwise Python would flush again at exit and print the error. Returns the error of standard
    output, or None.
    """
    stdout_error = None
    streams: list[TextIO | None] = [sys.stdout, sys.stderr]  # None if closed at the start
    for stream in filter(None, streams):
        try:
            stream.flush()
        except OSError as error:
            stdout_error = error if stream is sys.stdout else stdout_error
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
            with suppress(OSError):
                stream.flush()
        except ValueError:
            pass  # a closed stream has nothing to flush
    return stdout_error


def _is_broken(stream: TextIO | None) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno() if stream is not None else -1, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError, OverflowError):
        return False  # no file, or a platform without poll
