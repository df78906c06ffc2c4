# SPDX-License-Identifier: Apache-2.0
"""The folder of one engine's weight files: removed in the end, or by the next engine that opens
where this one was killed. It may be memory, so nothing of it may stay behind; and the place may be
everybody's, as /dev/shm is, so nobody else may look in, or lay a link where we are to write.

Next: jaxmoe/weight_sync/files.py writes into it.
"""

import atexit
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from jaxmoe.config import ConfigError


class WeightsDirectory:
    """`directory`/jaxmoe-<run>, ours for as long as we hold the lock beside it."""

    def __init__(self, directory: str | Path, run: str) -> None:
        directory = Path(directory)
        self._lock = directory / f"jaxmoe-{run}.lock"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = open(self._lock, "x", opener=no_links)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"rollout.vllm.weights_dir ({directory}) must take the weights; {error}. "
                "Try --set rollout.vllm.weights_dir=ANOTHER_FOLDER."
            ) from error
        atexit.register(self.close)
        for lock in directory.glob("jaxmoe-*.lock"):
            _remove_if_left(lock)

    def close(self) -> None:
        """Remove the folder and what is in it; may be called twice."""
        atexit.unregister(self.close)
        _remove(self._lock)
        self._file.close()


def no_links(path: str | Path, flags: int) -> int:
    """An opener for open(): a new file is this user's alone, a link at its place an OSError."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def make_private(directory: Path) -> None:
    """Make a folder that no other user may enter, or find that it is one. Raises OSError."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(f"{directory} is there already and is not this user's alone") from None


def _remove_if_left(lock: Path) -> None:
    """Where nobody holds the lock any more: its run was killed. Other users' are theirs."""
    with suppress(OSError), open(lock, "r+", opener=no_links) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            return
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(lock)


def _remove(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    lock.unlink(missing_ok=True)
