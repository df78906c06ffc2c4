# SPDX-License-Identifier: Apache-2.0
"""One version of the weights as it is described to an engine, for every transport.

Every transport takes the same arguments and returns a `WeightUpdate`:

    write_files(params, cfg, directory, *, dtype, run, version)      files.py
    write_sharded_files(…, channel) as write_files, by each process  sharded_files.py
    share_in_process(params, cfg, *, dtype, run, version, mailbox)   dlpack.py
    broadcast_weights(group, params, cfg, *, dtype, run, version)    nccl.py
    share_ipc_handles(params, cfg, *, dtype, run, version)           cuda_ipc.py

With `experts="packed"` experts are sent in four bits (sent_tensors.py), which params must hold.

Files are written once for all engines; the others are made for each engine. With
`manifest=compute_manifest(…)` these need no further pass over the weights.

    with write_files(params, cfg, directory, dtype="float32", run=run, version=3) as update:
        post("update_weights", {"update_info": update.update_info})   # update.send() concurrently
        loaded["received"] == update.digests      # after both have ended

Next: jaxmoe/vllm/client/sync.py sends it and checks what the engine then has loaded.
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

from jaxmoe.checkpoint.entries import Entry
from jaxmoe.checkpoint.hf import check_param_tree
from jaxmoe.checkpoint.layouts import checkpoint_rows, flat_shape, row_chunks
from jaxmoe.checkpoint.tensor_files import DTYPES as FILE_DTYPES
from jaxmoe.checkpoint.tensor_files import PlannedTensor, planned_bytes
from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.checksum import digest_array, join_digests
from jaxmoe.weight_sync.sent_tensors import Experts, gather_sent, list_sent, plan_sent

ManifestDict = dict[str, Any]

FORMAT = 1  # of the manifest
DTYPES = ("bfloat16", "float32")  # of tensors that are not in four bits


def _send_nothing() -> None:
    """Do nothing: files are already where the engine reads them."""


@dataclass(frozen=True)
class WeightUpdate:
    """One version of the weights, ready for an engine to fetch.

    `manifest` is {"format", "run", "version", "tensors": {name: {"dtype", "shape", "digest"}}}.
    `send` must run concurrently with the engine's update_weights, in its own thread, and returns
    when the last tensor has left; for files it does nothing. `close` removes what was written; it
    may be called twice.
    """

    manifest: ManifestDict
    update_info: dict[str, Any]
    send: Callable[[], None] = _send_nothing
    close: Callable[[], None] = _send_nothing

    @property
    def label(self) -> str:
        """The engine's name of this version: "<run>:<version>"."""
        return f"{self.manifest['run']}:{self.manifest['version']}"

    @property
    def digests(self) -> dict[str, str]:
        return {name: tensor["digest"] for name, tensor in self.manifest["tensors"].items()}

    def __enter__(self) -> "WeightUpdate":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def create_run_id() -> str:
    """Return 32 random hex digits, which no other engine object has and nobody can guess."""
    return secrets.token_hex(16)


def empty_manifest(planned: list[PlannedTensor], run: str, version: int) -> ManifestDict:
    """Return the manifest of planned tensors, with empty digests."""
    tensors = {n: {"dtype": d, "shape": list(s), "digest": ""} for n, d, s in planned}
    return {"format": FORMAT, "run": run, "version": version, "tensors": tensors}


def plan_tensors(
    params: Params, cfg: ModelConfig, dtype: str, experts: Experts = "dense"
) -> list[PlannedTensor]:
    """Return (name, dtype, shape) of every tensor to send; `params` must hold exactly these.

    Raises ValueError if params are not this model's, ConfigError for another dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(
            f"weights can be synced as {' or '.join(DTYPES)}, got {dtype!r}. "
            "Try --set rollout.vllm.dtype=bfloat16."
        )
    check_param_tree(params, cfg)
    return [plan_sent(entry, dtype) for entry in list_sent(cfg, experts)]


def count_sent_bytes(cfg: ModelConfig, dtype: str, experts: Experts) -> int:
    """Return the bytes of all tensors of a version."""
    return sum(planned_bytes(plan_sent(entry, dtype)) for entry in list_sent(cfg, experts))


def fill_digests(
    params: Params,
    cfg: ModelConfig,
    planned: list[PlannedTensor],
    manifest: ManifestDict,
    *,
    experts: Experts = "dense",
    out: NDArray[np.uint8] | None = None,
    write: Callable[[int, np.ndarray], None] | None = None,
) -> None:
    """Digest every tensor in the checkpoint's layout, chunk by chunk, on every core.

    Chunks are made in `out`, which holds all tensors' bytes one after another, or in temporary
    memory. `write` gets each chunk and the offset of its first byte from the first tensor's first
    byte; it is called from several threads, in any order.
    """
    begin = 0
    with ThreadPoolExecutor(count_cores()) as pool:
        for entry, item in zip(list_sent(cfg, experts), planned, strict=True):
            array, dtype = gather_sent(params, entry), FILE_DTYPES[item[1]]
            digest = digest_entry(pool, array, entry, dtype, begin, out, write)
            del array  # freed before the next tensor is gathered
            manifest["tensors"][entry.name]["digest"] = digest
            begin += planned_bytes(item)


def compute_manifest(
    params: Params,
    cfg: ModelConfig,
    *,
    dtype: str,
    run: str,
    version: int,
    experts: Experts = "dense",
) -> ManifestDict:
    """Return the complete manifest, by one pass over the weights, for any number of engines."""
    planned = plan_tensors(params, cfg, dtype, experts)
    manifest = empty_manifest(planned, run, version)
    fill_digests(params, cfg, planned, manifest, experts=experts)
    return manifest


def digest_entry(
    pool: ThreadPoolExecutor,
    array: np.ndarray,
    entry: Entry,
    dtype: np.dtype,
    begin: int,
    out: NDArray[np.uint8] | None,
    write: Callable[[int, np.ndarray], None] | None,
) -> str:
    """Return the digest of one tensor; `out` or `write` get its bytes on the way.

    This thread digests chunks like the others. A thread that only waited for them would take the
    interpreter's lock from them, which made it five times slower on two cores.
    """
    digest_span = partial(_digest_span, array, entry, dtype, begin, out, write)
    spans = list(row_chunks(entry.shape, dtype.itemsize))
    remaining = iter(spans)  # threads may share a list's iterator

    def digest_spans() -> list[tuple[int, str]]:
        try:
            return [digest_span(span) for span in remaining]
        except BaseException:
            list(remaining)  # exhausts it, so that the other threads end too
            raise

    futures = [pool.submit(digest_spans) for _ in range(min(len(spans), count_cores()) - 1)]
    return join_digests(digest_spans() + [part for future in futures for part in future.result()])


def _digest_span(
    array: np.ndarray,
    entry: Entry,
    dtype: np.dtype,
    begin: int,
    out: NDArray[np.uint8] | None,
    write: Callable[[int, np.ndarray], None] | None,
    span: tuple[int, int],
) -> tuple[int, str]:
    width = flat_shape(entry.shape)[1]
    first, stop = (row * width * dtype.itemsize for row in span)
    buffer = None
    if out is not None:
        buffer = out[begin + first : begin + stop].view(dtype).reshape(-1, width)
    rows = checkpoint_rows(array, entry.layout, span, entry.shape, dtype, buffer)
    if write is not None:
        write(begin + first, rows)
    return first, digest_array(rows)


def count_cores() -> int:
    # os.cpu_count() includes cores that this process may not use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
