# SPDX-License-Identifier: Apache-2.0
"""Weights as files of several processes, in a folder that all processes and engines see.

All processes gather the tensors one after the other, since gathering is a collective. Each tensor
is digested and written by one process, into that process's file. No host holds more than two
tensors of the model: one is being written while the next is gathered. Neighbouring tensors go to
different hosts, which therefore write concurrently. Next: jaxmoe/weight_sync/files.py, the
same for one process.
"""

import json
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxmoe.checkpoint.entries import Entry
from jaxmoe.checkpoint.tensor_files import (
    DTYPES,
    INDEX_FILE,
    PlannedTensor,
    encode_header,
    planned_bytes,
)
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.distributed.channel import Channel
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.changes import INDEX_FILE as CHANGES_INDEX
from jaxmoe.weight_sync.directory import create_private_directory
from jaxmoe.weight_sync.files import (
    WeightFile,
    check_free_space,
    directory_error,
    remove_version,
    write_rows,
)
from jaxmoe.weight_sync.remove_when_killed import open_private
from jaxmoe.weight_sync.sent_tensors import Experts, gather_sent, list_sent
from jaxmoe.weight_sync.sent_weights import ChangesWriter
from jaxmoe.weight_sync.update import count_cores, digest_entry, empty_manifest, plan_tensors

VISIBLE_TIMEOUT_S = 60.0  # for a network file system to show files of another host


def write_sharded_files(
    params: Params,
    cfg: ModelConfig,
    directory: str | Path,
    *,
    dtype: str,
    run: str,
    version: int,
    channel: Channel,
    experts: Experts = "dense",
    stored: NDArray[np.uint8] | None = None,
    is_changes: bool = False,
) -> WeightFile:
    """Write `directory`/jaxmoe-<run>/<version>/: one *.safetensors per process, and manifest.json.

    Every process calls this and gets the complete manifest; the folder is complete or absent.
    `close` removes it. `stored` gets the bytes of this process's tensors; with `is_changes` it has
    those of the version before, and the files have what differs, as changes.py describes.
    Raises ConfigError in every process if one cannot write, or does not see the first one's folder.
    """
    # An absolute path, because a server may have another working folder.
    run_dir = Path(directory).absolute() / f"jaxmoe-{run}"
    final, partial_dir = run_dir / str(version), run_dir / f"{version}.partial"
    planned = plan_tensors(params, cfg, dtype, experts)
    owners = assign_owners([planned_bytes(item) for item in planned], channel.count)
    names = [(name_changes if is_changes else _file_name)(n) for n in range(channel.count)]
    manifest = empty_manifest(planned, run, version)

    def begin() -> bytes:
        try:
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            create_private_directory(run_dir)
            shutil.rmtree(partial_dir, ignore_errors=True)
            partial_dir.mkdir()
            check_free_space(partial_dir, 0 if is_changes else sum(map(planned_bytes, planned)))
        except OSError as error:
            raise directory_error(directory, error) from error
        return b""

    def end() -> bytes:
        index_name, index = (
            INDEX_FILE,
            {
                "weight_map": {
                    n: names[owner] for (n, _, _), owner in zip(planned, owners, strict=True)
                }
            },
        )
        if is_changes:
            blocks = [written["blocks"] for written in results]
            index_name, index = CHANGES_INDEX, {"files": dict(zip(names, blocks, strict=True))}
        try:
            (partial_dir / index_name).write_text(json.dumps(index))
            (partial_dir / "manifest.json").write_text(json.dumps(manifest))
            shutil.rmtree(final, ignore_errors=True)
            partial_dir.replace(final)
        except OSError as error:
            raise directory_error(directory, error) from error
        return b""

    try:
        channel.broadcast_from_first(begin)
        table = list(zip(list_sent(cfg, experts), planned, owners, strict=True))
        process = channel.number
        file = _ProcessFile(
            partial_dir / names[process],
            [p for _, p, o in table if o == process],
            stored,
            is_changes=is_changes,
        )
        # Runs to the end even after an error: gathering is a collective of all processes.
        for entry, item, owner in table:
            is_owner = owner == process
            array = gather_sent(params, entry, receives=is_owner)
            if is_owner:
                file.add_tensor(array, entry, item)
        results = channel.gather_results(partial(file.finish_file, directory))
        for written in results:
            for name, digest in written["digests"].items():
                manifest["tensors"][name]["digest"] = digest
        channel.broadcast_from_first(end)
    except BaseException:
        if channel.number == 0:
            remove_version(partial_dir)
        raise
    return WeightFile(
        manifest,
        {"path": str(final)},
        close=partial(remove_version, final),
        sent_nbytes=sum(written["nbytes"] for written in results),
    )


def assign_owners(nbytes: list[int], processes: int) -> list[int]:
    """Return the process that writes each tensor: the one with the fewest bytes so far."""
    loads, owners = [0] * processes, []
    for size in nbytes:
        owners.append(loads.index(min(loads)))
        loads[owners[-1]] += size
    return owners


def wait_until_visible(path: Path, timeout_s: float = VISIBLE_TIMEOUT_S) -> bool:
    """Return True once a path made by another host is visible, False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # makes a network file system refresh the folder
        time.sleep(0.1)
    return True


def check_shared_directory(directory: str | Path, marker: str, channel: Channel) -> None:
    """Raise ConfigError in all processes if one does not see the first one's file `marker`."""

    def check_visible() -> None:
        if not wait_until_visible(Path(directory) / marker, timeout_s=10.0):
            raise ConfigError(
                f"rollout.vllm.weights_dir ({directory}) must be one folder that all processes and "
                f"servers see; process {channel.number} does not see the first one's file. "
                "Try --set rollout.vllm.weights_dir=A_SHARED_FOLDER."
            )

    channel.gather_results(check_visible)


def _file_name(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"


def name_changes(number: int) -> str:
    return f"changes-{number + 1:05d}.bin"


class _ProcessFile:
    """The file that this process writes; errors are stored until all processes have reported."""

    def __init__(
        self,
        path: Path,
        planned: list[PlannedTensor],
        stored: NDArray[np.uint8] | None,
        *,
        is_changes: bool,
    ) -> None:
        self._header = b"" if is_changes else encode_header(planned)
        self._stored, self._planned, self._is_changes = stored, planned, is_changes
        self._changes: ChangesWriter | None = None
        self._offset, self._digests = 0, dict[str, str]()
        self._pending: Future[None] | None = None
        self._error: Exception | None = None
        self._file: BinaryIO | None = None
        # One writer, so that at most one tensor waits in memory while the next is gathered.
        self._writer, self._pool = ThreadPoolExecutor(1), ThreadPoolExecutor(count_cores())
        try:
            if not wait_until_visible(path.parent):
                raise FileNotFoundError(f"{path.parent} is not visible from every process")
            self._file = open(path, "xb", opener=open_private)
            self._file.write(self._header)
            self._file.flush()
            if stored is not None and is_changes:
                self._changes = ChangesWriter(self._file, planned, stored)
        except OSError as error:
            self._error = error

    def add_tensor(self, array, entry: Entry, item: PlannedTensor) -> None:
        """Write one tensor in the background; waits for the previous one first."""
        self._wait_for_pending()
        if self._error is None:
            self._pending = self._writer.submit(
                self._write_tensor, array, entry, item, self._offset
            )
        self._offset += planned_bytes(item)

    def _write_tensor(self, array, entry: Entry, item: PlannedTensor, begin: int) -> None:
        assert self._file is not None
        write, out = partial(write_rows, self._file.fileno(), len(self._header)), self._stored
        if self._changes is not None:
            write, out = self._changes.add_chunk, None
        dtype = DTYPES[item[1]]
        self._digests[item[0]] = digest_entry(self._pool, array, entry, dtype, begin, out, write)

    def _wait_for_pending(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except Exception as error:
            self._error = error

    def finish_file(self, directory: str | Path) -> dict[str, Any]:
        """Return what the others need of this file, once written: the digests of its tensors by
        name, its blocks of changes, and their bytes. Raises ConfigError."""
        self._wait_for_pending()
        self._writer.shutdown()
        self._pool.shutdown()
        if self._file is not None:
            try:
                self._file.close()  # a network file system reports a full disk here
            except OSError as error:
                self._error = self._error or error
        if isinstance(self._error, OSError):
            raise directory_error(directory, self._error) from self._error
        if self._error is not None:
            raise self._error
        changes = self._changes
        return {
            "digests": self._digests,
            "blocks": [] if changes is None else changes.blocks,
            "nbytes": self._offset if changes is None else changes.nbytes,
        }
