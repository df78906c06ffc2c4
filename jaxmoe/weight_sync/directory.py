# SPDX-License-Identifier: Apache-2.0
"""The folder of one engine's weight files, which is removed at the end of the run.

If the trainer is killed, a small process that waits for that removes the folder; if that process is
killed too, the next engine that starts removes it. The folder may be in memory, so it must not stay
behind. Its parent may be open to every user, as /dev/shm is; so no other user may read the folder,
or place a link where we are about to write.

Next: jaxmoe/weight_sync/files.py writes into it; remove_when_killed.py is the small process.
"""

import atexit
import fcntl
import os
import stat
from pathlib import Path

from jaxmoe.config import ConfigError
from jaxmoe.weight_sync import remove_when_killed
from jaxmoe.weight_sync.remove_when_killed import open_private, remove_if_released, remove_run


class WeightsDirectory:
    """The folder `directory`/jaxmoe-<run>, reserved by a lock on the file next to it."""

    def __init__(self, directory: str | Path, run: str) -> None:
        directory = Path(directory)
        self._lock = directory / f"jaxmoe-{run}.lock"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Exclusive creation: a file or link that another user placed there is not opened.
            self._file = open(self._lock, "x", opener=open_private)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"rollout.vllm.weights_dir ({directory}) must be writable; {error}. "
                "Try --set rollout.vllm.weights_dir=ANOTHER_FOLDER."
            ) from error
        atexit.register(self.close)
        self._remover = remove_when_killed.start_remover(self._lock)
        for lock in directory.glob("jaxmoe-*.lock"):
            if lock != self._lock:
                remove_if_released(lock, wait=False)

    def close(self) -> None:
        """Remove the folder and its contents; may be called twice."""
        atexit.unregister(self.close)
        remove_run(self._lock)
        # The remover ends after the removal, so that it completes the removal if this process is
        # killed meanwhile.
        remover, self._remover = self._remover, None
        if remover is not None:
            remover.kill()
            remover.wait()
        self._file.close()


def create_private_directory(directory: Path) -> None:
    """Create a folder that no other user may enter, or check that it is one. Raises OSError."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        # stat would follow a link to a folder of this user's and accept it.
        status = directory.lstat()
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_mode & 0o077
        ):
            raise OSError(f"{directory} exists and other users may enter it") from None
