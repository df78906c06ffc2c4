# SPDX-License-Identifier: Apache-2.0
"""The folder of one engine's weight files, removed in the end, also where the trainer was killed:
then by a small process that waits for that, or, where it was killed too, by the next engine that
opens. It may be memory, so nothing of it may stay behind; and the place may be everybody's, as
/dev/shm is, so nobody else may look in, or lay a link where we are to write.

Next: jaxmoe/weight_sync/files.py writes into it; remove_when_killed.py is the small process.
"""

import atexit
import fcntl
import os
import stat
from pathlib import Path

from jaxmoe.config import ConfigError
from jaxmoe.weight_sync import remove_when_killed
from jaxmoe.weight_sync.remove_when_killed import no_links, remove, remove_if_released


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
        self._remover = remove_when_killed.start(self._lock)
        for lock in directory.glob("jaxmoe-*.lock"):
            if lock != self._lock:
                remove_if_released(lock, wait=False)

    def close(self) -> None:
        """Remove the folder and what is in it; may be called twice."""
        atexit.unregister(self.close)
        remove(self._lock)
        remover, self._remover = self._remover, None
        if remover is not None:
            remover.kill()
            remover.wait()
        self._file.close()


def make_private(directory: Path) -> None:
    """Make a folder that no other user may enter, or find that it is one. Raises OSError."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(f"{directory} is there already and is not this user's alone") from None
