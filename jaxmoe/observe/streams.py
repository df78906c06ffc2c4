# SPDX-License-Identifier: Apache-2.0
"""Standard output that nobody reads any more: `command | head -1` must end without a traceback.

Next: jaxmoe/cli.py ends every command with it.
"""

import os
import select
import sys
from contextlib import suppress
from typing import TextIO


def reader_is_gone() -> bool:
    """True where standard output or error is a pipe whose other end was closed."""
    return any(_is_broken(stream) for stream in (sys.stdout, sys.stderr))


def flush_output() -> OSError | None:
    """Write what is buffered; a stream that refuses it is pointed at nothing from here on.

    Python would try again as it exits, and print the error. Returns what standard output met.
    """
    refused = None
    streams: list[TextIO | None] = [sys.stdout, sys.stderr]  # None where it was closed at start
    for stream in filter(None, streams):
        try:
            stream.flush()
        except OSError as error:
            refused = error if stream is sys.stdout else refused
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
            with suppress(OSError):
                stream.flush()
        except ValueError:
            pass  # a stream that was closed has nothing left to write
    return refused


def _is_broken(stream: TextIO | None) -> bool:
    try:
        poll = select.poll()
        poll.register(stream.fileno() if stream is not None else -1, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError, OverflowError):
        return False  # no file, or a platform without poll
