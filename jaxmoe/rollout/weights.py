# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to an engine: a publication is what one version is announced with.

Every way takes the same arguments and returns a `Publication`:

    files(params, cfg, directory, *, dtype, run, version) -> Publication        (here)
    shared(params, cfg, *, dtype, run, version)           in process, weights_shared.py
    broadcast(group, params, cfg, *, dtype, run, version) NCCL, weights_nccl.py
    handles(params, cfg, *, dtype, run, version)          CUDA IPC, weights_ipc.py

    with files(params, cfg, directory, dtype="float32", run=run, version=3) as published:
        post("update_weights", {"update_info": published.update_info})   # published.send() beside
        held["received"] == published.digests      # once send() and the update have both ended

Next: jaxmoe/rollout/vllm/publish.py hands it over and checks what the engine then holds.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint.hf import Entry, check_params, entries, gather_entry, planned_tensors
from jaxmoe.checkpoint.layouts import checkpoint_rows, row_pieces
from jaxmoe.checkpoint.tensor_files import DTYPES as FILE_DTYPES
from jaxmoe.checkpoint.tensor_files import SINGLE, Planned, header, planned_bytes
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.rollout.checksum import digest, joined
from jaxmoe.shapes import Params

Manifest = dict[str, Any]

FORMAT = 1  # of the manifest
DTYPES = ("bfloat16", "float32")  # vLLM's GPT-OSS takes packed experts at start-up only


def _nothing() -> None:
    """Files are there already."""


@dataclass(frozen=True)
class Publication:
    """One version of the weights, ready to be fetched by an engine.

    `manifest` is {"format", "run", "version", "tensors": {name: {"dtype", "shape", "digest"}}}.
    `send` must run beside the engine's update_weights, in a thread of its own, and returns when
    the last tensor has left; for files there is nothing to send. `close` removes what was
    written; it may be called twice.
    """

    manifest: Manifest
    update_info: dict[str, Any]
    send: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing

    @property
    def label(self) -> str:
        """What the engine calls this version: "<run>:<version>"."""
        return f"{self.manifest['run']}:{self.manifest['version']}"

    @property
    def digests(self) -> dict[str, str]:
        return {name: tensor["digest"] for name, tensor in self.manifest["tensors"].items()}

    def __enter__(self) -> "Publication":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def new_run() -> str:
    """A name that no other engine object has: 12 random hex digits."""
    return secrets.token_hex(6)


def empty_manifest(planned: list[Planned], run: str, version: int) -> Manifest:
    """The digests are still to come."""
    tensors = {n: {"dtype": d, "shape": list(s), "digest": ""} for n, d, s in planned}
    return {"format": FORMAT, "run": run, "version": version, "tensors": tensors}


def plan(params: Params, cfg: ModelConfig, dtype: str) -> list[Planned]:
    """(name, dtype, shape) of every tensor of the table, which params must hold, and no more.

    Raises ValueError where params are not this model's, ConfigError for another dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f"weights can be published as {' or '.join(DTYPES)}, got {dtype!r}. "
            "Try --set rollout.vllm.dtype=bfloat16."
        )
    check_params(params, cfg)
    return planned_tensors(cfg, dtype)


def files(
    params: Params, cfg: ModelConfig, directory: str | Path, *, dtype: str, run: str, version: int,
    over: Publication | None = None,
) -> Publication:  # fmt: skip
    """Write `directory`/jaxmoe-<run>/<version>/ with model.safetensors and manifest.json.

    Written aside and renamed, so that the folder is whole or absent; an older one of the same
    version is replaced. `over` is an earlier publication of this run that nobody reads any more:
    its file is written over, as fresh pages of shared memory cost more than the bytes in them.
    Memory beyond params and file: a few MiB per core, and where devices
    share a tensor one tensor, gathered. Over several processes all must call; the first one
    writes, and alone has the digests.
    Raises ConfigError where the directory is full or cannot be written.
    """
    home = Path(directory) / f"jaxmoe-{run}"
    final, aside = home / str(version), home / f"{version}.partial"
    planned = plan(params, cfg, dtype)
    manifest = empty_manifest(planned, run, version)
    publication = Publication(manifest, {"path": str(final)}, close=lambda: _remove(final))
    if jax.process_index() > 0:
        for entry in entries(cfg):
            gather_entry(params, entry)
        return publication
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if over is not None:
            _take_over(Path(over.update_info["path"]), aside, header_and_tensors(planned))
        if not (aside / SINGLE).exists():
            _require_room(aside, sum(map(planned_bytes, planned)))
        _write(aside / SINGLE, params, cfg, planned, manifest)
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
    return publication


def _take_over(old: Path, aside: Path, nbytes: int) -> None:
    """Move the file of an older version here, if it has the size that is needed; remove the rest.

    Its manifest goes first: what is half written over is not to be taken for a version.
    """
    with suppress(OSError):
        (old / "manifest.json").unlink()
        if (old / SINGLE).stat().st_size == nbytes:
            (old / SINGLE).replace(aside / SINGLE)
    shutil.rmtree(old, ignore_errors=True)


def header_and_tensors(planned: list[Planned]) -> int:
    """Bytes of the file."""
    return len(header(planned)) + sum(map(planned_bytes, planned))


def _require_room(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(f"they need {nbytes / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free")


def _remove(version: Path) -> None:
    shutil.rmtree(version, ignore_errors=True)
    with suppress(OSError):  # another version is still there
        version.parent.rmdir()


def _write(
    path: Path, params: Params, cfg: ModelConfig, planned: list[Planned], manifest: Manifest
) -> None:
    """The file and its digests. No fsync: what a crash of the machine leaves is of no use."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        begin = file.write(header(planned))
        file.flush()
        fill_digests(params, cfg, planned, manifest, partial(_write_all, file.fileno(), begin))


def _write_all(file: int, begin: int, at: int, rows: np.ndarray) -> None:
    left, at = rows.reshape(-1).view(np.uint8).data, begin + at
    while left:
        done = os.pwrite(file, left, at)
        at, left = at + done, left[done:]


def fill_digests(
    params: Params, cfg: ModelConfig, planned: list[Planned], manifest: Manifest,
    pass_on: Callable[[int, np.ndarray], None] | None = None,
) -> None:  # fmt: skip
    """Digest every tensor as the checkpoint lays it out, piece by piece, on every core.

    `pass_on` gets each piece too, and its first byte counted from the first tensor's; from
    several threads, in any order.
    """
    begin = 0
    with ThreadPoolExecutor(_cores()) as pool:
        for entry, item in zip(entries(cfg), planned, strict=True):
            found = _digest_entry(pool, params, entry, FILE_DTYPES[item[1]], begin, pass_on)
            manifest["tensors"][entry.name]["digest"] = found
            begin += planned_bytes(item)


def _digest_entry(
    pool: ThreadPoolExecutor, params: Params, entry: Entry, dtype: np.dtype, begin: int,
    pass_on: Callable[[int, np.ndarray], None] | None,
) -> str:  # fmt: skip
    """One tensor; what was gathered of it is let go before the next."""
    piece = partial(_digest_piece, gather_entry(params, entry), entry, dtype, begin, pass_on)
    spans = list(row_pieces(entry.shape, dtype.itemsize))
    return joined(pool.map(piece, spans) if len(spans) > 1 else map(piece, spans))


def _digest_piece(
    ours: np.ndarray, entry: Entry, dtype: np.dtype, begin: int,
    pass_on: Callable[[int, np.ndarray], None] | None, span: tuple[int, int],
) -> tuple[int, str]:  # fmt: skip
    rows = checkpoint_rows(ours, entry.layout, span, entry.shape, dtype)
    first = span[0] * rows.shape[1] * dtype.itemsize
    if pass_on is not None:
        pass_on(begin + first, rows)
    return first, digest(rows)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
