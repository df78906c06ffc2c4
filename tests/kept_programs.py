# SPDX-License-Identifier: Apache-2.0
"""Compiled programs of the tests, kept from one run of pytest to the next in the user's cache.

A run has a folder of its own, with links to the kept programs that are not small: pytest's own
process reads those where they are kept. The run's new ones are kept when it ends.
jax never changes a program that is there. It writes one bit by bit, and who reads half of one gets
a warning, which is an error here: what a killed process left is not kept.
"""

import contextlib
import os
import shutil
import tempfile
import time
import zlib
from pathlib import Path

MAX_KEPT_BYTES = 1e9  # a complete run has a tenth; a change of the code adds programs
LINKED_BYTES = 20_000  # single operations, nearly all programs, are smaller
STALE_S = 24 * 3600  # of a run that was killed


def open_programs(cache: Path) -> Path:
    """Return a new folder of this run, beside those that are kept; raises OSError."""
    (cache / "kept").mkdir(parents=True, exist_ok=True)
    for folder in cache.glob("run-*"):
        if time.time() - folder.stat().st_mtime > STALE_S:
            shutil.rmtree(folder, ignore_errors=True)
    if sum(file.stat().st_size for file in os.scandir(cache / "kept")) > MAX_KEPT_BYTES:
        shutil.rmtree(cache / "kept", ignore_errors=True)
        (cache / "kept").mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="run-", dir=cache))


def link_kept_programs(cache: Path, programs: Path) -> None:
    """Put the larger kept programs into a folder of the run, where its commands read them too."""
    programs.mkdir(exist_ok=True)
    for file in os.scandir(cache / "kept"):
        with contextlib.suppress(OSError):
            if file.stat().st_size > LINKED_BYTES:
                link_program(file.path, programs / file.name)


def read_program(programs, read, cache: str, name: str) -> bytes | None:
    """Read a program as jax does, `read`, or else where it is kept."""
    with contextlib.suppress(OSError):
        return read(programs, name) or Path(cache, "kept", f"{name}-cache").read_bytes()
    return None


def keep_programs(cache: Path, run: Path) -> None:
    """Keep the complete programs of a run's folders, and remove the folders."""
    for file in run.rglob("*-cache"):
        kept = cache / "kept" / file.name
        if not kept.exists() and is_complete(file.read_bytes()):
            link_program(file, kept)
    shutil.rmtree(run, ignore_errors=True)


def link_program(source: Path | str, target: Path) -> None:
    """Link a program. Without links nothing is kept, and a program that another run has linked or
    removed meanwhile is left out."""
    with contextlib.suppress(OSError):
        os.link(source, target)


def is_complete(program: bytes) -> bool:
    """True if jax can read the program. One that zlib did not compress is not kept."""
    try:
        zlib.decompress(program)
    except zlib.error:
        return False
    return True
