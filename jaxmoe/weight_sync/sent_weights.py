# SPDX-License-Identifier: Apache-2.0
"""Weight files of which most have only the values that changed since the file before.

A server can make a version from the last complete file and the changes of all later versions, or,
if it has an earlier one of them, from the changes since. This process keeps the bytes of the
version that it sent last, which it compares with the next. Each manifest has the digests of the
complete tensors, so a lost or damaged change is seen before anything is sampled; then the complete
weights are sent. Next: changes.py has the format, jaxmoe/vllm/plugin/received_bytes.py reads it.
"""

import json
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxmoe.checkpoint.tensor_files import DTYPES, PlannedTensor, planned_bytes
from jaxmoe.config import Config, ModelConfig
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.changes import FILE, INDEX_FILE, Block, encode_block
from jaxmoe.weight_sync.files import WeightFile, stage_version
from jaxmoe.weight_sync.remove_when_killed import open_private
from jaxmoe.weight_sync.sent_tensors import Experts
from jaxmoe.weight_sync.sent_versions import SentVersions
from jaxmoe.weight_sync.update import (
    count_sent_bytes,
    empty_manifest,
    fill_digests,
    plan_tensors,
)


def count_kept_bytes(cfg: Config) -> int:
    """Return the bytes that a run keeps on either side to send changes; 0 if it sends none."""
    vllm = cfg.rollout.vllm
    if vllm.complete_sync_every == 1:
        return 0
    # A server that somebody started with dense experts gets dense ones.
    experts = "dense" if cfg.quant.experts == "none" else "packed"
    return count_sent_bytes(cfg.model, vllm.dtype or cfg.model.dtype, experts)


class SentWeights(SentVersions):
    """Writes `directory`/jaxmoe-<run>/<version>/: of `complete_every` versions the first complete.

    Memory: the bytes of one version on the host. For one process.
    """

    def write(
        self,
        params: Params,
        cfg: ModelConfig,
        *,
        dtype: str,
        version: int,
        experts: Experts = "dense",
    ) -> WeightFile:
        """Write a version, complete or as changes; see `write_files` for what is raised."""
        planned = plan_tensors(params, cfg, dtype, experts)
        manifest = empty_manifest(planned, self._run, version)
        with self._lock:
            old, self._bytes = self._bytes, None
            fill = partial(fill_digests, params, cfg, planned, manifest, experts=experts)
            is_complete = self._must_be_complete(version)
            if old is None or planned != self._planned:
                old, is_complete = np.empty(sum(map(planned_bytes, planned)), np.uint8), True
            self._planned, self._manifest = planned, manifest
            if is_complete:
                fill(out=old)
                file = self._write_complete([old])
            else:
                file = self._write_changes(old, fill)
            self._bytes = old
            return file

    def _write_changes(self, old: NDArray[np.uint8], fill: Callable[..., None]) -> WeightFile:
        manifest = self._manifest
        with stage_version(self._directory, self._run, manifest["version"]) as (partial_dir, final):
            partial_dir.mkdir()
            with open(partial_dir / FILE, "xb", opener=open_private) as file:
                writer = ChangesWriter(file, self._planned, old)
                fill(write=writer.add_chunk)
            (partial_dir / INDEX_FILE).write_text(json.dumps({"files": {FILE: writer.blocks}}))
            (partial_dir / "manifest.json").write_text(json.dumps(manifest))
        self._folders.append(final)
        return self._describe(writer.nbytes)


class ChangesWriter:
    """Compares chunks of a version with the old bytes, which they replace, and writes changes."""

    def __init__(
        self, file: BinaryIO, planned: list[PlannedTensor], old: NDArray[np.uint8]
    ) -> None:
        self._file, self._planned, self._old = file, planned, old
        self._begins = [0, *accumulate(map(planned_bytes, planned))]
        self._lock = Lock()
        self.blocks: list[Block] = []
        self.nbytes = 0

    def add_chunk(self, offset: int, rows: np.ndarray) -> None:
        """Write what changed in a chunk that begins at this byte; called by several threads."""
        number = bisect_right(self._begins, offset) - 1
        name, dtype, _ = self._planned[number]
        new = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        old = self._old[offset : offset + new.size]
        mask, changed = encode_block(old, new, DTYPES[dtype].itemsize)
        if changed.size == 0:
            return
        old[:] = new
        begin = offset - self._begins[number]
        with self._lock:  # the blocks are listed in the order of the file
            self.blocks.append(Block(name, begin, new.size, len(mask), changed.size))
            self._file.write(mask)
            self._file.write(changed.data)
            self.nbytes += len(mask) + changed.size
