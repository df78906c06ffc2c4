# SPDX-License-Identifier: Apache-2.0
"""Weights as a file that an engine on this machine opens: in shared memory, or on a disk.

Fresh pages of shared memory cost more than the bytes in them. So a version is written over one
that nobody reads any more, and there through a mapping, which saves the kernel's copy.
Next: jaxmoe/weight_sync/update.py makes the pieces, directory.py removes what is left.
"""

import json
import mmap
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from numpy.typing import NDArray

from jaxmoe.checkpoint.hf import entries, gather_entry
from jaxmoe.checkpoint.tensor_files import SINGLE, header, planned_bytes
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.update import WeightUpdate, empty_manifest, fill_digests, plan

MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class PublishedFile(WeightUpdate):
    """`pages`: the bytes of its file, where they are mapped; `inode`: of which file."""

    pages: NDArray[np.uint8] | None = None
    inode: int = 0


def files(
    params: Params, cfg: ModelConfig, directory: str | Path, *, dtype: str, run: str, version: int,
    over: PublishedFile | None = None,
) -> PublishedFile:  # fmt: skip
    """Write `directory`/jaxmoe-<run>/<version>/ with model.safetensors and manifest.json.

    Written aside and renamed, so that the folder is whole or absent; an older one of the same
    version is replaced. `over` is an earlier publication of this run that nobody reads any more:
    its file is written over. Memory beyond params and file: a few MiB per core, and where devices
    share a tensor one tensor, gathered. Over several processes all must call; the first one
    writes, and alone has the digests.
    Raises ConfigError where the directory is full or cannot be written.
    """
    home = Path(directory).absolute() / f"jaxmoe-{run}"  # a server may stand in another folder
    final, aside = home / str(version), home / f"{version}.partial"
    planned = plan(params, cfg, dtype)
    manifest = empty_manifest(planned, run, version)
    info, close = {"path": str(final)}, partial(_remove, final)
    if jax.process_index() > 0:
        for entry in entries(cfg):
            gather_entry(params, entry)
        return PublishedFile(manifest, info, close=close)
    begin = header(planned)
    nbytes = sum(map(planned_bytes, planned))
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        reused = over is not None and _take_over(over, aside, len(begin) + nbytes)
        if not reused:
            _require_room(aside, nbytes)
        # no fsync: what a crash of the machine leaves is of no use
        with open(aside / SINGLE, "r+b" if reused else "wb") as file:
            file.write(begin)
            file.flush()
            inode = os.fstat(file.fileno()).st_ino
            pages = _mapped(file.fileno(), over) if over is not None and reused else None
            if pages is None:
                write = partial(_write_all, file.fileno(), len(begin))
                fill_digests(params, cfg, planned, manifest, pass_on=write)
            else:
                fill_digests(params, cfg, planned, manifest, out=pages[len(begin) :])
        (aside / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(final, ignore_errors=True)
        aside.replace(final)
    except OSError as error:
        _remove(aside)
        raise ConfigError(
            f"rollout.vllm.weights_dir ({directory}) must take the weights; {error}. "
            "Free some space, or try --set rollout.vllm.weights_dir=ANOTHER_FOLDER."
        ) from error
    except BaseException:
        _remove(aside)
        raise
    return PublishedFile(manifest, info, close=close, pages=pages, inode=inode)


def _take_over(over: PublishedFile, aside: Path, nbytes: int) -> bool:
    """Move the file of an older version here, if it has the size that is needed; remove the rest.

    Its manifest goes first: what is half written over is not to be taken for a version.
    """
    old = Path(over.update_info["path"])
    with suppress(OSError):
        (old / "manifest.json").unlink()
        if (old / SINGLE).stat().st_size == nbytes:
            (old / SINGLE).replace(aside / SINGLE)
    shutil.rmtree(old, ignore_errors=True)
    return (aside / SINGLE).exists()


def _mapped(file: int, over: PublishedFile) -> NDArray[np.uint8] | None:
    """The file's bytes, where they are memory and every page is there; None on a disk.

    A mapped page that the filesystem has no room for would end the process, and when others see
    what is in it is for the filesystem to say.
    """
    status = os.fstat(file)
    if not MEMORY.is_dir() or status.st_dev != MEMORY.stat().st_dev:
        return None
    if over.pages is not None and over.inode == status.st_ino:
        return over.pages
    pages = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return np.frombuffer(pages, np.uint8)


def _require_room(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(f"they need {nbytes / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free")


def _remove(version: Path) -> None:
    shutil.rmtree(version, ignore_errors=True)
    with suppress(OSError):  # another version is still there
        version.parent.rmdir()


def _write_all(file: int, begin: int, at: int, rows: np.ndarray) -> None:
    left, at = rows.reshape(-1).view(np.uint8).data, begin + at
    while left:
        done = os.pwrite(file, left, at)
        at, left = at + done, left[done:]
