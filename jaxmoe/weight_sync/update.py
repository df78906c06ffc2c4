# SPDX-License-Identifier: Apache-2.0
"""One version of the weights as an engine is told of it, whatever the transport.

Every transport takes the same arguments and returns a `WeightUpdate`:

    write_files(params, cfg, directory, *, dtype, run, version)      files.py
    write_shares(params, cfg, directory, *, dtype, run, version, channel)  shares.py
    share_in_process(params, cfg, *, dtype, run, version, mailbox)   in_process.py, by DLPack
    broadcast(group, params, cfg, *, dtype, run, version)            nccl.py
    share_ipc_handles(params, cfg, *, dtype, run, version)           cuda_ipc.py

All but the files, which are written once, are made for each engine anew; `manifest=digested(…)`
spares the others the pass over the weights.

    with write_files(params, cfg, directory, dtype="float32", run=run, version=3) as update:
        post("update_weights", {"update_info": update.update_info})   # update.send() beside
        loaded["received"] == update.digests      # once send() and the update have both ended

Next: jaxmoe/vllm/sync.py sends it and checks what the engine then has loaded.
"""

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmoe.checkpoint.entries import Entry, entries, stored
from jaxmoe.checkpoint.hf import check_params, gather_entry
from jaxmoe.checkpoint.layouts import checkpoint_rows, flat_shape, row_pieces
from jaxmoe.checkpoint.tensor_files import DTYPES as FILE_DTYPES
from jaxmoe.checkpoint.tensor_files import Planned, planned_bytes
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.checksum import digest, joined

ManifestDict = dict[str, Any]

FORMAT = 1  # of the manifest
DTYPES = ("bfloat16", "float32")  # vLLM's GPT-OSS takes packed experts at start-up only


def _nothing() -> None:
    """Files are there already."""


@dataclass(frozen=True)
class WeightUpdate:
    """One version of the weights, ready to be fetched by an engine.

    `manifest` is {"format", "run", "version", "tensors": {name: {"dtype", "shape", "digest"}}}.
    `send` must run beside the engine's update_weights, in a thread of its own, and returns when
    the last tensor has left; for files there is nothing to send. `close` removes what was
    written; it may be called twice.
    """

    manifest: ManifestDict
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

    def __enter__(self) -> "WeightUpdate":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


def new_run() -> str:
    """A name that no other engine object has and nobody can guess: 32 random hex digits."""
    return secrets.token_hex(16)


def empty_manifest(planned: list[Planned], run: str, version: int) -> ManifestDict:
    """The digests are still to come."""
    tensors = {n: {"dtype": d, "shape": list(s), "digest": ""} for n, d, s in planned}
    return {"format": FORMAT, "run": run, "version": version, "tensors": tensors}


def plan(params: Params, cfg: ModelConfig, dtype: str) -> list[Planned]:
    """(name, dtype, shape) of every tensor of the table, which params must hold, and no more.

    Raises ValueError where params are not this model's, ConfigError for another dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f"weights can be synced as {' or '.join(DTYPES)}, got {dtype!r}. "
            "Try --set rollout.vllm.dtype=bfloat16."
        )
    check_params(params, cfg)
    return [item for entry in entries(cfg) for item in stored(entry, sent_as(entry, dtype))]


def sent_as(entry: Entry, dtype: str) -> str:
    """The dtype in which a tensor travels: float32 where the trainer does not round it either.

    An engine that computes in bfloat16 may round it when it loads; vLLM 0.32 rounds router,
    norms, biases and sinks.
    """
    return dtype if entry.read == "compute" else "float32"


def fill_digests(
    params: Params, cfg: ModelConfig, planned: list[Planned], manifest: ManifestDict, *,
    out: NDArray[np.uint8] | None = None, write: Callable[[int, np.ndarray], None] | None = None,
) -> None:  # fmt: skip
    """Digest every tensor as the checkpoint lays it out, piece by piece, on every core.

    Pieces are made in `out`, all tensors' bytes one after another, or in passing memory.
    `write` gets each, and its first byte counted from the first tensor's; from several
    threads, in any order.
    """
    begin = 0
    with ThreadPoolExecutor(cores()) as pool:
        for entry, item in zip(entries(cfg), planned, strict=True):
            ours, dtype = gather_entry(params, entry), FILE_DTYPES[item[1]]
            found = digest_entry(pool, ours, entry, dtype, begin, out, write)
            del ours  # let go before the next is gathered
            manifest["tensors"][entry.name]["digest"] = found
            begin += planned_bytes(item)


def digested(
    params: Params, cfg: ModelConfig, *, dtype: str, run: str, version: int
) -> ManifestDict:
    """The whole manifest: one pass over the weights, for however many engines."""
    planned = plan(params, cfg, dtype)
    manifest = empty_manifest(planned, run, version)
    fill_digests(params, cfg, planned, manifest)
    return manifest


def digest_entry(
    pool: ThreadPoolExecutor, ours: np.ndarray, entry: Entry, dtype: np.dtype, begin: int,
    out: NDArray[np.uint8] | None, write: Callable[[int, np.ndarray], None] | None,
) -> str:  # fmt: skip
    """The digest of one tensor, whose bytes `out` or `write` get on the way.

    This thread takes pieces like the others: one that waits for each of theirs to end would
    take the interpreter's lock from them, at a fifth of the speed on two cores.
    """
    piece = partial(_digest_piece, ours, entry, dtype, begin, out, write)
    spans = list(row_pieces(entry.shape, dtype.itemsize))
    left = iter(spans)  # of a list: several threads may draw from it

    def work() -> list[tuple[int, str]]:
        try:
            return [piece(span) for span in left]
        except BaseException:
            list(left)  # the others end too
            raise

    others = [pool.submit(work) for _ in range(min(len(spans), cores()) - 1)]
    return joined(work() + [part for other in others for part in other.result()])


def _digest_piece(
    ours: np.ndarray, entry: Entry, dtype: np.dtype, begin: int, out: NDArray[np.uint8] | None,
    write: Callable[[int, np.ndarray], None] | None, span: tuple[int, int],
) -> tuple[int, str]:  # fmt: skip
    width = flat_shape(entry.shape)[1]
    first, stop = (row * width * dtype.itemsize for row in span)
    room = None if out is None else out[begin + first : begin + stop].view(dtype).reshape(-1, width)
    rows = checkpoint_rows(ours, entry.layout, span, entry.shape, dtype, room)
    if write is not None:
        write(begin + first, rows)
    return first, digest(rows)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
