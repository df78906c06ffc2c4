# SPDX-License-Identifier: Apache-2.0
"""Weights as files of several processes, in a folder that they and the engines all see.

Tensors are gathered one after the other, by all, since that is a collective. Each is digested and
written by one process, into that one's file: no host has more than two tensors of the model, the
last one being written while the next one comes. Neighbours go to different hosts, which so write
side by side. Next: jaxmoe/weight_sync/files.py, the same for one process.
"""

import json
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from jaxmoe.checkpoint.entries import Entry, entries
from jaxmoe.checkpoint.hf import gather_entry
from jaxmoe.checkpoint.tensor_files import DTYPES, INDEX, Planned, header, planned_bytes
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.parallel.channel import Channel
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.directory import make_private
from jaxmoe.weight_sync.files import WeightFile, remove, require_room, unusable, write_all
from jaxmoe.weight_sync.remove_when_killed import no_links
from jaxmoe.weight_sync.update import cores, digest_entry, empty_manifest, plan

SEEN_S = 60.0  # until a network file system shows what another host has made


def write_shares(
    params: Params, cfg: ModelConfig, directory: str | Path, *, dtype: str, run: str, version: int,
    channel: Channel,
) -> WeightFile:  # fmt: skip
    """Write `directory`/jaxmoe-<run>/<version>/: a *.safetensors of each process, manifest.json.

    All processes call, and all get the whole manifest; the folder is whole or absent. `close`
    removes it.
    Raises ConfigError, in all, where one cannot write or does not see what the first one made.
    """
    run_dir = Path(directory).absolute() / f"jaxmoe-{run}"
    final, partial_dir = run_dir / str(version), run_dir / f"{version}.partial"
    planned = plan(params, cfg, dtype)
    owners = owners_of([planned_bytes(item) for item in planned], channel.count)
    manifest = empty_manifest(planned, run, version)

    def begin() -> bytes:
        try:
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            make_private(run_dir)
            shutil.rmtree(partial_dir, ignore_errors=True)
            partial_dir.mkdir()
            require_room(partial_dir, sum(map(planned_bytes, planned)))
        except OSError as error:
            raise unusable(directory, error) from error
        return b""

    def end() -> bytes:
        where = {n: _name(owner) for (n, _, _), owner in zip(planned, owners, strict=True)}
        try:
            (partial_dir / INDEX).write_text(json.dumps({"weight_map": where}))
            (partial_dir / "manifest.json").write_text(json.dumps(manifest))
            shutil.rmtree(final, ignore_errors=True)
            partial_dir.replace(final)
        except OSError as error:
            raise unusable(directory, error) from error
        return b""

    try:
        channel.from_first(begin)
        table = list(zip(entries(cfg), planned, owners, strict=True))
        me = channel.number
        file = _Share(partial_dir / _name(me), [p for _, p, o in table if o == me])
        for entry, item, owner in table:  # to the end, whatever breaks: the others take part
            here = owner == me
            ours = gather_entry(params, entry, here=here)
            if here:
                file.add(ours, entry, item)
        for told in channel.by_all(partial(file.digests, directory)):
            for name, found in told.items():
                manifest["tensors"][name]["digest"] = found
        channel.from_first(end)
    except BaseException:
        if channel.number == 0:
            remove(partial_dir)
        raise
    return WeightFile(manifest, {"path": str(final)}, close=partial(remove, final))


def owners_of(nbytes: list[int], processes: int) -> list[int]:
    """The process that writes each tensor: whoever has the fewest bytes of those before it."""
    held, owners = [0] * processes, []
    for size in nbytes:
        owners.append(held.index(min(held)))
        held[owners[-1]] += size
    return owners


def seen(path: Path, within_s: float = SEEN_S) -> bool:
    """Whether a path that another host has made is there, or comes in time."""
    until = time.monotonic() + within_s
    while not path.exists():
        if time.monotonic() > until:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # has a network file system look again
        time.sleep(0.1)
    return True


def require_shared(directory: str | Path, mark: str, channel: Channel) -> None:
    """Raises ConfigError, in all processes, where one does not see `mark` of the first's folder."""

    def look() -> None:
        if not seen(Path(directory) / mark, within_s=10.0):
            raise ConfigError(
                f"rollout.vllm.weights_dir ({directory}) must be one folder that all processes and "
                f"servers see; process {channel.number} does not see what the first one made. "
                "Try --set rollout.vllm.weights_dir=A_SHARED_FOLDER."
            )

    channel.by_all(look)


def _name(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"


class _Share:
    """One process's file; what breaks is kept until all have told."""

    def __init__(self, path: Path, planned: list[Planned]) -> None:
        self._header = header(planned)
        self._at, self._found = 0, dict[str, str]()
        self._pending: Future[None] | None = None
        self._error: Exception | None = None
        self._file = -1
        self._writer, self._pool = ThreadPoolExecutor(1), ThreadPoolExecutor(cores())
        try:
            if not seen(path.parent):
                raise FileNotFoundError(f"{path.parent} is not to be seen from every process")
            self._file = no_links(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            os.write(self._file, self._header)
        except OSError as error:
            self._error = error

    def add(self, ours, entry: Entry, item: Planned) -> None:
        """Write one tensor beside what follows; waits for the one before."""
        self._wait()
        if self._error is None:
            self._pending = self._writer.submit(self._write, ours, entry, item, self._at)
        self._at += planned_bytes(item)

    def _write(self, ours, entry: Entry, item: Planned, begin: int) -> None:
        write = partial(write_all, self._file, len(self._header))
        dtype = DTYPES[item[1]]
        self._found[item[0]] = digest_entry(self._pool, ours, entry, dtype, begin, None, write)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except Exception as error:
            self._error = error

    def digests(self, directory: str | Path) -> dict[str, str]:
        """Of its tensors, by name, once all are written. Raises ConfigError."""
        self._wait()
        self._writer.shutdown()
        self._pool.shutdown()
        if self._file >= 0:
            try:
                os.close(self._file)  # where a network file system tells of a full disk
            except OSError as error:
                self._error = self._error or error
        if isinstance(self._error, OSError):
            raise unusable(directory, self._error) from self._error
        if self._error is not None:
            raise self._error
        return self._found
