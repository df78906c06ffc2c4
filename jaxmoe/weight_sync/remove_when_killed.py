# SPDX-License-Identifier: Apache-2.0
"""Removes a trainer's weight files when the trainer was killed; a process of its own, run by path.

kill -9 leaves a trainer no time to remove them, and in /dev/shm they would take memory until the
next run. A server cannot do it, since it may be of another host or have other trainers. This
program waits for the lock that the trainer has on a file beside the folder: the kernel releases the
lock however the trainer ends. It imports the standard library only, so it takes 10 MB and no time.
Next: jaxmoe/weight_sync/directory.py, which starts it.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_NEEDED = ("PATH", "LD_LIBRARY_PATH")  # by Python itself; keys of other services stay out


def start(lock: Path) -> subprocess.Popen[bytes] | None:
    """Start this program for a lock that this process has; None where no process can be started.

    The next run then removes the folder.
    """
    if not sys.executable:
        return None
    with suppress(OSError):
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(lock.absolute())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd="/", start_new_session=True,
            env={name: os.environ[name] for name in _NEEDED if name in os.environ},
        )  # fmt: skip


def remove_if_released(lock: Path, *, wait: bool) -> None:
    """Remove the folder of a run that no longer has its lock. Other users' locks are theirs."""
    with suppress(OSError), open(lock, "r+", opener=no_links) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            return
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(file.fileno()), os.lstat(lock)):  # not made anew meanwhile
            remove(lock)


def remove(lock: Path) -> None:
    """Remove the folder of this lock, then the lock."""
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)


def no_links(path: str | Path, flags: int) -> int:
    """An opener for open(): a new file is this user's alone, a link at its place an OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a whole job may get it, and the trainer saves then
    remove_if_released(Path(sys.argv[1]), wait=True)
