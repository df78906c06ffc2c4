# SPDX-License-Identifier: Apache-2.0
"""Writes into a run folder: atomic, never through links, with errors of one line.

Two programs may write at once (a training, and the page of its samples), so each writes its own
temporary file and renames it. Other users may be able to write into the folder, so links are not
followed: `python -m jaxmoe.samples` on another user's run must not overwrite the reader's files.
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

_MODE = 0o664  # minus the umask: files of a run are never writable by everybody
# O_NONBLOCK, because opening a FIFO of that name must not block.
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LEFTOVER = re.compile(r"\.[^/]+\.[0-9a-f]{16}\.tmp")
# No write of such a file takes this long, so an older one has no writer.
_OLD_S = 3600.0


# Errors of a disk, a quota or a limit (ulimit), which are not bugs of the program.
_DISK_ERRORS = {
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EDQUOT",
        "EROFS",
        "EIO",
        "ESTALE",
        "EFBIG",
        "EMFILE",
        "ENFILE",
        "ENXIO",
        "ENODEV",
        "ENOTCONN",
        "EREMOTEIO",
        "ENOLCK",
        "ETIMEDOUT",
        "EHOSTDOWN",
    )
    if hasattr(errno, name)
}


class RunFolderError(ConfigError):
    """A file of the run folder could not be written."""


@contextmanager
def replace_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A binary file that replaces `path` when the block ends; it is removed if the block raises.

    durable: True to sync it to disk before the rename, for a file that cannot be recreated.
    Raises: RunFolderError; `path` is then unchanged.
    """
    # A prefix only, since the complete name plus a suffix could be too long.
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.tmp")
    with _as_run_folder_error(path):
        _refuse_link(path)
        file = open(temporary, "xb", opener=_open_without_links)
        try:
            with file:
                yield file
                # Without the sync, a crash of the machine after the rename may leave an empty file.
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        # Also on Ctrl-C, so that no temporary file is left behind.
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file with `replace_file`; lone surrogates are written as escapes."""
    with replace_file(path, durable=durable) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def new_file(path: Path) -> BinaryIO:
    """Create a file that does not exist yet, unbuffered. Raises RunFolderError."""
    with _as_run_folder_error(path):
        return open(path, "xb", buffering=0, opener=_open_without_links)


def open_to_append(path: Path) -> BinaryIO:
    """Open a file to append to, unbuffered. Raises RunFolderError."""
    with _as_run_folder_error(path):
        # Unbuffered, so that a line survives if the process is killed after the write.
        return open(path, "ab", buffering=0, opener=_open_without_links)


def append_bytes(file: IO[bytes], content: bytes) -> None:
    """Write all bytes to an unbuffered file. Raises RunFolderError."""
    with _as_run_folder_error(Path(file.name)):
        # An unbuffered write may write only a part.
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[file.write(remaining) :]


def open_lock(path: Path) -> IO[bytes]:
    """Open a file to lock; it is created if missing and never truncated. Raises OSError."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, _MODE), "r+b", buffering=0)


def make_folder(path: Path) -> Path:
    """Create a folder in a run folder if it is missing. Raises RunFolderError if it is a link."""
    with _as_run_folder_error(path):
        _refuse_link(path)
        path.mkdir(parents=True, exist_ok=True)
    return path


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files of writers that were killed long ago."""
    with suppress(OSError):
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                with suppress(OSError):
                    # A younger file may belong to another program that is writing it.
                    if time.time() - path.lstat().st_mtime > _OLD_S:
                        path.unlink()


def is_disk_error(error: OSError) -> bool:
    """True if the cause is the disk or a limit, not the program."""
    return error.errno in _DISK_ERRORS


def describe_missing_inodes(folder: Path) -> str | None:
    """ "no inodes left" if the disk cannot hold another file, regardless of free space."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return None
    # Filesystems without a fixed number of inodes report 0 of them.
    return "no inodes left" if disk.f_files and not disk.f_favail else None


def _open_without_links(path: str | Path, flags: int) -> int:
    return os.open(path, flags | _FLAGS, _MODE)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


@contextmanager
def _as_run_folder_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(_format_disk_error(path, error)) from error


def _format_disk_error(path: Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return (
            f"{path} must be a file or folder of the run, not a link. Check where it points, and "
            f"remove it: rm {shlex.quote(str(path))}"
        )
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC and (inode_note := describe_missing_inodes(path.parent)):
        reason = f"{reason} ({inode_note})"
    return (
        f"{path} must be writable; {reason}. Checkpoints are unchanged; free some space or repair "
        "the disk, and type the same command."
    )
