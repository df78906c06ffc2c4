# SPDX-License-Identifier: Apache-2.0
"""A server that a trainer started ends when the trainer does, however that ends.

kill -9 leaves a trainer no time to stop what it started; so each of vLLM's processes watches it.
"""

import os
import select
import shutil
import tempfile
import threading
import time
from pathlib import Path

SCRATCH = "jaxmoe-vllm-"  # the folder of a server's sockets and temporary files begins so
VARIABLE = "JAXMOE_PARENT_PID"  # set by the trainer for the server it starts
STATUS = 113  # exit status of a process whose trainer is gone
POLL_S = 0.5  # where the system has no file descriptors of processes


def watch(pid: int) -> None:
    """End this process, without ceremony, as soon as process `pid` has ended."""
    name = f"jaxmoe watches {pid}"
    if any(thread.name == name for thread in threading.enumerate()):
        return
    threading.Thread(target=_wait_and_leave, args=(pid,), name=name, daemon=True).start()


def _wait_and_leave(pid: int) -> None:
    try:
        _wait(pid)
    except ProcessLookupError:
        pass
    scratch = Path(tempfile.gettempdir())
    if scratch.name.startswith(SCRATCH):  # nobody else is left to remove it
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(STATUS)


def _wait(pid: int) -> None:
    """Return once `pid` has ended; raises ProcessLookupError where it had before."""
    descriptor = _descriptor(pid)
    if descriptor is not None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        return
    while True:
        os.kill(pid, 0)
        time.sleep(POLL_S)


def _descriptor(pid: int) -> int | None:
    """Of this very process, whoever gets its number next; None where the system has none.

    A kernel or a sandbox may refuse what Python was built with.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None
