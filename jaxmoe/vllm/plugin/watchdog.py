# SPDX-License-Identifier: Apache-2.0
"""A watchdog that ends a server when the trainer that started it ends, however that happens.

kill -9 leaves a trainer no time to stop what it started, so each of vLLM's processes watches it.
"""

import os
import select
import shutil
import tempfile
import threading
import time
from pathlib import Path

SCRATCH_PREFIX = "jaxmoe-vllm-"  # prefix of the folder of a server's sockets and temporary files
PARENT_PID_VARIABLE = "JAXMOE_PARENT_PID"  # set by the trainer for the server it starts
ORPHAN_EXIT_STATUS = 113  # of a process whose trainer has ended
POLL_S = 0.5  # if the system has no pidfd


def watch_process(pid: int) -> None:
    """Start a thread that ends this process at once, without cleanup, after process `pid` ends."""
    name = f"jaxmoe watches {pid}"
    # vLLM registers plugins twice in some of its processes.
    if any(thread.name == name for thread in threading.enumerate()):
        return
    threading.Thread(target=_exit_after, args=(pid,), name=name, daemon=True).start()


def _exit_after(pid: int) -> None:
    try:
        _wait_for_exit(pid)
    except ProcessLookupError:
        pass
    scratch = Path(tempfile.gettempdir())
    if scratch.name.startswith(SCRATCH_PREFIX):  # no other process will remove it
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(ORPHAN_EXIT_STATUS)


def _wait_for_exit(pid: int) -> None:
    """Return once `pid` has ended; raises ProcessLookupError if it had ended before."""
    descriptor = _open_pidfd(pid)
    if descriptor is not None:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
        return
    while True:
        os.kill(pid, 0)
        time.sleep(POLL_S)


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor of the process, which survives reuse of its number; None without pidfd.

    A kernel or a sandbox may refuse the call although Python has it.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None
