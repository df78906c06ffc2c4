# SPDX-License-Identifier: Apache-2.0
"""Weights as a file that an engine on this machine opens: in shared memory, or on a disk.

Fresh pages of shared memory cost more than the bytes in them. So a version is written over one
that nobody reads any more, and there through a mapping, which saves the kernel's copy.
Next: jaxmoe/weight_sync/update.py converts the tensors, directory.py removes what is left;
shares.py is the same for several processes.
"""

import json
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxmoe.checkpoint.tensor_files import SINGLE, header, planned_bytes
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.directory import make_private
from jaxmoe.weight_sync.remove_when_killed import no_links
from jaxmoe.weight_sync.update import WeightUpdate, empty_manifest, fill_digests, plan

MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class WeightFile(WeightUpdate):
    """`pages`: the bytes of its file, where they are mapped; `inode`: of which file."""

    pages: NDArray[np.uint8] | None = None
    inode: int = 0


def write_files(
    params: Params, cfg: ModelConfig, directory: str | Path, *, dtype: str, run: str, version: int,
    reuse: WeightFile | None = None,
) -> WeightFile:  # fmt: skip
    """Write `directory`/jaxmoe-<run>/<version>/ with model.safetensors and manifest.json.

    Written beside it and renamed, so that the folder is whole or absent; an older one of the same
    version is replaced. `reuse` is an earlier version of this run that nobody reads any more: its
    file is written over. Memory beyond params and file: a few MiB per core, and where devices
    share a tensor one tensor, gathered. Of one process: several have shares.py.
    No other user may enter jaxmoe-<run>. Raises ConfigError where the directory is full, cannot be
    written, or has one that another user may enter.
    """
    planned = plan(params, cfg, dtype)
    manifest = empty_manifest(planned, run, version)
    begin = header(planned)
    nbytes = sum(map(planned_bytes, planned))
    with new_version(directory, run, version) as (partial_dir, final):
        partial_dir.mkdir()
        reused = reuse is not None and _move_here(reuse, partial_dir, len(begin) + nbytes)
        if not reused:
            require_room(partial_dir, nbytes)
        # no fsync: what a crash of the machine leaves is of no use
        with open(partial_dir / SINGLE, "r+b" if reused else "xb", opener=no_links) as file:
            file.write(begin)
            file.flush()
            inode = os.fstat(file.fileno()).st_ino
            pages = _mapped(file.fileno(), reuse) if reuse is not None and reused else None
            if pages is None:
                write = partial(write_all, file.fileno(), len(begin))
                fill_digests(params, cfg, planned, manifest, write=write)
            else:
                fill_digests(params, cfg, planned, manifest, out=pages[len(begin) :])
        (partial_dir / "manifest.json").write_text(json.dumps(manifest))
    info, close = {"path": str(final)}, partial(remove, final)
    return WeightFile(manifest, info, close=close, pages=pages, inode=inode)


@contextmanager
def new_version(directory: str | Path, run: str, version: int) -> Iterator[tuple[Path, Path]]:
    """Gives (folder to be made and filled, `directory`/jaxmoe-<run>/<version>) and renames it.

    In the end the second is whole, or what it was; where the block breaks off nothing is left.
    Raises ConfigError for an OSError, and where another user may enter jaxmoe-<run>.
    """
    run_dir = Path(directory).absolute() / f"jaxmoe-{run}"  # a server may stand in another folder
    final, partial_dir = run_dir / str(version), run_dir / f"{version}.partial"
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        make_private(run_dir)
    except OSError as error:  # what is there is not ours to remove
        raise unusable(directory, error) from error
    try:
        shutil.rmtree(partial_dir, ignore_errors=True)
        yield partial_dir, final
        shutil.rmtree(final, ignore_errors=True)
        partial_dir.replace(final)
    except OSError as error:
        remove(partial_dir)
        raise unusable(directory, error) from error
    except BaseException:
        remove(partial_dir)
        raise


def unusable(directory: str | Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"rollout.vllm.weights_dir ({directory}) must take the weights; {error}. "
        "Free some space, or try --set rollout.vllm.weights_dir=ANOTHER_FOLDER."
    )


def _move_here(reuse: WeightFile, partial_dir: Path, nbytes: int) -> bool:
    """Move the file of an older version here, if it has the size that is needed; remove the rest.

    Its manifest goes first: what is half written over is not to be taken for a version.
    """
    old = Path(reuse.update_info["path"])
    with suppress(OSError):
        (old / "manifest.json").unlink()
        if (old / SINGLE).stat().st_size == nbytes:
            (old / SINGLE).replace(partial_dir / SINGLE)
    shutil.rmtree(old, ignore_errors=True)
    return (partial_dir / SINGLE).exists()


def _mapped(file: int, reuse: WeightFile) -> NDArray[np.uint8] | None:
    """The file's bytes, where they are memory and every page is there; None on a disk.

    A mapped page that the filesystem has no room for would end the process, and when others see
    what is in it is for the filesystem to say.
    """
    status = os.fstat(file)
    if not MEMORY.is_dir() or status.st_dev != MEMORY.stat().st_dev:
        return None
    if reuse.pages is not None and reuse.inode == status.st_ino:
        return reuse.pages
    pages = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return np.frombuffer(pages, np.uint8)


def require_room(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(f"they need {nbytes / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free")


def remove(version: Path) -> None:
    shutil.rmtree(version, ignore_errors=True)
    with suppress(OSError):  # another version is still there
        version.parent.rmdir()


def write_all(file: int, begin: int, at: int, rows: np.ndarray) -> None:
    left, at = rows.reshape(-1).view(np.uint8).data, begin + at
    while left:
        done = os.pwrite(file, left, at)
        at, left = at + done, left[done:]
