# SPDX-License-Identifier: Apache-2.0
"""Weights as a file that an engine on this machine opens, in shared memory or on a disk.

Fresh pages of shared memory cost more than writing the bytes. A version is therefore written over
an older one that nobody reads any more, through a memory mapping, which also saves a copy in the
kernel. Next: jaxmoe/weight_sync/update.py converts the tensors, directory.py removes the
folder; sharded_files.py does the same for several processes.
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

from jaxmoe.checkpoint.tensor_files import SINGLE_FILE, encode_header, planned_bytes
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.directory import create_private_directory
from jaxmoe.weight_sync.remove_when_killed import open_private
from jaxmoe.weight_sync.sent_tensors import Experts
from jaxmoe.weight_sync.update import WeightUpdate, empty_manifest, fill_digests, plan_tensors

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class WeightFile(WeightUpdate):
    """A weight update in a file, identified by `inode`; `pages` are its bytes if it is mapped."""

    pages: NDArray[np.uint8] | None = None
    inode: int = 0
    sent_nbytes: int = 0  # that a server reads which has the version before; 0: unknown


def write_files(
    params: Params,
    cfg: ModelConfig,
    directory: str | Path,
    *,
    dtype: str,
    run: str,
    version: int,
    experts: Experts = "dense",
    reuse: WeightFile | None = None,
) -> WeightFile:
    """Write `directory`/jaxmoe-<run>/<version>/ with model.safetensors and manifest.json.

    The files are written to a temporary folder that is then renamed, so the folder is complete or
    absent; an existing folder of the same version is replaced. `reuse` is an earlier version of
    this run that nobody reads any more: its file is overwritten. Memory beyond params and file: a
    few MiB per core, plus one gathered tensor if devices share a tensor. For a single process;
    several processes use sharded_files.py. No other user may enter jaxmoe-<run>. Raises ConfigError
    if the directory is full or not writable, or if another user may enter jaxmoe-<run>.
    """
    planned = plan_tensors(params, cfg, dtype, experts)
    manifest = empty_manifest(planned, run, version)
    begin = encode_header(planned)
    nbytes = sum(map(planned_bytes, planned))
    with stage_version(directory, run, version) as (partial_dir, final):
        partial_dir.mkdir()
        reused = reuse is not None and _reuse_file(reuse, partial_dir, len(begin) + nbytes)
        if not reused:
            check_free_space(partial_dir, nbytes)
        # No fsync: after a crash of the machine the file is of no use.
        with open(
            partial_dir / SINGLE_FILE, "r+b" if reused else "xb", opener=open_private
        ) as file:
            file.write(begin)
            file.flush()
            inode = os.fstat(file.fileno()).st_ino
            pages = _map_file(file.fileno(), reuse) if reuse is not None and reused else None
            if pages is None:
                write = partial(write_rows, file.fileno(), len(begin))
                fill_digests(params, cfg, planned, manifest, experts=experts, write=write)
            else:
                out = pages[len(begin) :]
                fill_digests(params, cfg, planned, manifest, experts=experts, out=out)
        (partial_dir / "manifest.json").write_text(json.dumps(manifest))
    info, close = {"path": str(final)}, partial(remove_version, final)
    return WeightFile(manifest, info, close=close, pages=pages, inode=inode)


@contextmanager
def stage_version(directory: str | Path, run: str, version: int) -> Iterator[tuple[Path, Path]]:
    """Yield (folder to create and fill, `directory`/jaxmoe-<run>/<version>), then rename the first.

    At the end the second folder is complete or unchanged; if the block fails, the first is removed.
    Raises ConfigError for an OSError, and if another user may enter jaxmoe-<run>.
    """
    # An absolute path, because a server may have another working folder.
    run_dir = Path(directory).absolute() / f"jaxmoe-{run}"
    final, partial_dir = run_dir / str(version), run_dir / f"{version}.partial"
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        create_private_directory(run_dir)
    except OSError as error:  # the existing folder is not ours to remove
        raise directory_error(directory, error) from error
    try:
        shutil.rmtree(partial_dir, ignore_errors=True)
        yield partial_dir, final
        shutil.rmtree(final, ignore_errors=True)
        partial_dir.replace(final)
    except OSError as error:
        remove_version(partial_dir)
        raise directory_error(directory, error) from error
    # After Ctrl-C too: the folder may be in memory, where it would stay.
    except BaseException:
        remove_version(partial_dir)
        raise


def directory_error(directory: str | Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"rollout.vllm.weights_dir ({directory}) must be writable; {error}. "
        "Free some space, or try --set rollout.vllm.weights_dir=ANOTHER_FOLDER."
    )


def _reuse_file(reuse: WeightFile, partial_dir: Path, nbytes: int) -> bool:
    """Move the file of an older version to `partial_dir` if its size fits; remove the older folder.

    The manifest is removed first, so that a half-written file cannot be taken for a version.
    """
    old = Path(reuse.update_info["path"])
    with suppress(OSError):
        (old / "manifest.json").unlink()
        if (old / SINGLE_FILE).stat().st_size == nbytes:
            (old / SINGLE_FILE).replace(partial_dir / SINGLE_FILE)
    shutil.rmtree(old, ignore_errors=True)
    return (partial_dir / SINGLE_FILE).exists()


def _map_file(file: int, reuse: WeightFile) -> NDArray[np.uint8] | None:
    """Return the file's bytes as a mapping if it is in shared memory; None on a disk.

    Not on a disk: a mapped page without room on the filesystem would kill the process, and the
    filesystem decides when other processes see the written bytes.
    """
    status = os.fstat(file)
    if not SHARED_MEMORY.is_dir() or status.st_dev != SHARED_MEMORY.stat().st_dev:
        return None
    # Renaming keeps the inode, so the old mapping is of this file, and its page faults are paid
    # for.
    if reuse.pages is not None and reuse.inode == status.st_ino:
        return reuse.pages
    pages = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return np.frombuffer(pages, np.uint8)


def check_free_space(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(f"it needs {nbytes / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free")


def remove_version(version: Path) -> None:
    shutil.rmtree(version, ignore_errors=True)
    with suppress(OSError):  # another version is still there
        version.parent.rmdir()


def write_rows(file: int, file_offset: int, row_offset: int, rows: np.ndarray) -> None:
    remaining, row_offset = rows.reshape(-1).view(np.uint8).data, file_offset + row_offset
    while remaining:
        # pwrite leaves the file's position alone, so threads can share the file. It may write less
        # than it is given: Linux stops at 2 GiB.
        n_written = os.pwrite(file, remaining, row_offset)
        row_offset, remaining = row_offset + n_written, remaining[n_written:]
