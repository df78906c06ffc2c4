# SPDX-License-Identifier: Apache-2.0
"""Every write into a run folder: atomic, through no link, and one line where the disk refuses it.

Two programs may write at once (a training, and a page of its samples), so each writes a temporary
file of its own and renames it. Other users may be able to write into the folder, so no link is
followed: `python -m jaxmoe.samples` on somebody else's run must not write into the reader's files.
Next: jaxmoe/observe/metrics.py, jaxmoe/checkpoint/run.py.
"""

import errno
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from jaxmoe.config.errors import ConfigError

_MODE = 0o664  # less the umask: a run folder is never writable by everybody
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO in the way must not block
_LEFTOVER = re.compile(r"\.[^/]+\.[0-9a-f]{16}\.tmp")
_OLD_S = 3600.0  # nobody takes so long to write one of these files


# of a disk, a quota or a limit (ulimit), and of no bug in a program
_DISK_ERRORS = {
    getattr(errno, name)
    for name in (
        "ENOSPC", "EDQUOT", "EROFS", "EIO", "ESTALE", "EFBIG", "EMFILE", "ENFILE", "ENXIO",
        "ENODEV", "ENOTCONN", "EREMOTEIO", "ENOLCK", "ETIMEDOUT", "EHOSTDOWN",
    )
    if hasattr(errno, name)
}  # fmt: skip


class RunFolderError(ConfigError):
    """The disk did not take a file of the run folder."""


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A binary file that becomes `path` when the block ends, and vanishes when the block raises.

    durable: on disk before the rename, for a file that cannot be made again.
    Raises RunFolderError, `path` being as it was.
    """
    # a prefix: with the whole of a long name the temporary one would be too long
    aside = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    with _in_one_line(path):
        _refuse_link(path)
        file = open(aside, "xb", opener=_no_links)
        try:
            with file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file as `replacing` does; what UTF-8 cannot hold is written as its escape."""
    with replacing(path, durable=durable) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def new_file(path: Path) -> BinaryIO:
    """A file that is not there yet, unbuffered. Raises RunFolderError."""
    with _in_one_line(path):
        return open(path, "xb", buffering=0, opener=_no_links)


def open_to_append(path: Path) -> BinaryIO:
    """A file to append to, unbuffered: what was written is in it. Raises RunFolderError."""
    with _in_one_line(path):
        return open(path, "ab", buffering=0, opener=_no_links)


def append(file: IO[bytes], content: bytes) -> None:
    """Write all of it. Raises RunFolderError."""
    with _in_one_line(Path(file.name)):
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]


def open_lock(path: Path) -> IO[bytes]:
    """The file that a lock is taken on: made if missing, never truncated. Raises OSError."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, _MODE), "r+b", buffering=0)


def make_folder(path: Path) -> Path:
    """A folder within a run folder, made if missing. Raises RunFolderError where it is a link."""
    with _in_one_line(path):
        _refuse_link(path)
        path.mkdir(parents=True, exist_ok=True)
    return path


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of writers that were killed long ago."""
    with suppress(OSError):
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                with suppress(OSError):
                    if time.time() - path.lstat().st_mtime > _OLD_S:
                        path.unlink()


def is_disk_error(error: OSError) -> bool:
    """True where the disk or a limit is to blame, wherever it was met."""
    return error.errno in _DISK_ERRORS


def without_inodes(folder: Path) -> str | None:
    """ "no inodes left" where a disk takes no further file, however much space it has."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    return "no inodes left" if disk.f_files and not disk.f_favail else None


def _no_links(path: str | Path, flags: int) -> int:
    return os.open(path, flags | _FLAGS, _MODE)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


@contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(_told(path, error)) from error


def _told(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return (
            f"{path} must be a file or folder of the run, and is a link, through which nothing is "
            f"written. Look where it points, and remove it: rm {shlex.quote(str(path))}"
        )
    why = error.strerror or str(error)
    if error.errno == errno.ENOSPC and (left := without_inodes(path.parent)):
        why = f"{why} ({left})"
    return (
        f"the disk must take {path}; {why}. Checkpoints are untouched; free some space or mend the "
        "disk, and type the same command."
    )
