# SPDX-License-Identifier: Apache-2.0
"""Waiting for a pipe with a deadline. Next: jaxmoe/sandbox/process.py."""

import select
import time

_MAX_WAIT_S = 1e6  # poll refuses a number of milliseconds above 2**31


def wait_for(descriptor: int, event: int, deadline: float) -> None:
    """Wait until a descriptor is ready. Raises TimeoutError at the deadline, EOFError at its end.

    poll, because select accepts no descriptor above 1023.
    """
    poll = select.poll()
    poll.register(descriptor, event)
    events = poll.poll(min(max(0.0, deadline - time.monotonic()), _MAX_WAIT_S) * 1000)
    if not events:
        raise TimeoutError
    if not events[0][1] & event:
        raise EOFError
