# SPDX-License-Identifier: Apache-2.0
"""A small program, run by path, that removes a trainer's weight files if it is killed.

kill -9 leaves a trainer no time to remove its files, and in /dev/shm they would occupy memory until
the next run. A server cannot remove them, since it may run on another host or serve other trainers.
This program waits for the lock that the trainer holds on a file next to the folder: the kernel
releases the lock however the trainer ends. It imports the standard library only, so it starts at
once and takes 10 MB. Next: jaxmoe/weight_sync/directory.py, which starts it.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

# Needed by Python itself; keys of other services are not passed on.
_VARIABLES = "PATH", "LD_LIBRARY_PATH"


def start_remover(lock: Path) -> subprocess.Popen[bytes] | None:
    """Start this program for a lock that this process holds; None if no process can be started.

    In that case the next run removes the folder.
    """
    if not sys.executable:
        return None
    with suppress(OSError):
        # A session of its own, since whatever kills the trainer's process group must not reach it.
        # -I and -S ignore the user's variables and packages, so nothing of these can break it.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(lock.absolute())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        )


def remove_if_released(lock: Path, *, wait: bool) -> None:
    """Remove the folder of a run that no longer holds its lock, if the lock is this user's."""
    with suppress(OSError), open(lock, "r+", opener=open_private) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            return
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        # Only if the lock file was not replaced meanwhile.
        if os.path.samestat(os.fstat(file.fileno()), os.lstat(lock)):
            remove_run(lock)


def remove_run(lock: Path) -> None:
    """Remove the folder of this lock, then the lock file."""
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)


def open_private(path: str | Path, flags: int) -> int:
    """Opener for open(): a new file is readable by this user only, and a link raises OSError."""
    # Without O_NONBLOCK a pipe under this name would block; a descriptor that a child inherits
    # would hold the lock after the trainer's end.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole job, whose trainer then saves
    remove_if_released(Path(sys.argv[1]), wait=True)
