# SPDX-License-Identifier: Apache-2.0
"""Weight files of several processes, of which most have only what changed since the file before.

Each process keeps the bytes of the tensors that it writes, and compares them with the next version.
Next: sent_weights.py is the same for one process, sharded_files.py writes the files.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxmoe.checkpoint.tensor_files import planned_bytes
from jaxmoe.config import ModelConfig
from jaxmoe.distributed.channel import Channel
from jaxmoe.shapes import Params
from jaxmoe.weight_sync.files import WeightFile
from jaxmoe.weight_sync.sent_tensors import Experts
from jaxmoe.weight_sync.sent_versions import SentVersions
from jaxmoe.weight_sync.sharded_files import assign_owners, write_sharded_files
from jaxmoe.weight_sync.update import plan_tensors


class SentShards(SentVersions):
    """SentWeights of several processes, all of which call `write`.

    Memory: the bytes of this process's tensors.
    read: returns the bytes of each tensor of the last of these folders; None if one is damaged.
    """

    def __init__(
        self,
        directory: str | Path,
        run: str,
        complete_every: int,
        channel: Channel,
        read: Callable[[list[Path]], Mapping[str, NDArray[np.uint8]] | None],
    ) -> None:
        super().__init__(directory, run, complete_every)
        self._channel, self._read = channel, read

    def write(
        self,
        params: Params,
        cfg: ModelConfig,
        *,
        dtype: str,
        version: int,
        experts: Experts = "dense",
    ) -> WeightFile:
        """Write a version, complete or as changes; see `write_sharded_files`.

        A version that is written once more is complete.
        """
        planned = plan_tensors(params, cfg, dtype, experts)
        sizes = [planned_bytes(item) for item in planned]
        owners = assign_owners(sizes, self._channel.count)
        with self._lock:
            old, self._bytes = self._bytes, None
            is_unknown = old is None or planned != self._planned
            # The first process may have written a complete file since.
            is_complete = any(
                self._channel.gather_values(is_unknown or self._must_be_complete(version))
            )
            if old is None or is_unknown:
                pairs = zip(sizes, owners, strict=True)
                nbytes = sum(size for size, owner in pairs if owner == self._channel.number)
                old = np.empty(nbytes, np.uint8)
            file = write_sharded_files(
                params,
                cfg,
                self._directory,
                dtype=dtype,
                run=self._run,
                version=version,
                channel=self._channel,
                experts=experts,
                stored=old,
                is_changes=not is_complete,
            )
            self._planned, self._manifest, self._bytes = planned, file.manifest, old
            folder = Path(file.update_info["path"])
            if self._channel.number > 0:  # the first process removes files
                self._unused.clear()
            if is_complete:
                return self._begin_with(folder)
            self._folders.append(folder)
            return self._describe(file.sent_nbytes)

    def _read_parts(self) -> Iterable[NDArray[np.uint8]] | None:
        """Return the bytes of all tensors from the files of all processes; None if one is damaged.

        For the first process alone, at any time.
        """
        if (tensors := self._read(self._folders)) is None:
            return None
        return [tensors[name] for name, *_ in self._planned]
