# SPDX-License-Identifier: Apache-2.0
"""The folders of the versions that were sent, of which most have only changes.

Next: sent_weights.py writes them from one process, sent_shards.py from several.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from jaxmoe.checkpoint.tensor_files import (
    SINGLE_FILE,
    PlannedTensor,
    encode_header,
    planned_bytes,
)
from jaxmoe.weight_sync.files import (
    WeightFile,
    check_free_space,
    remove_version,
    stage_version,
)
from jaxmoe.weight_sync.remove_when_killed import open_private
from jaxmoe.weight_sync.update import ManifestDict


class SentVersions:
    """Folders of `directory`/jaxmoe-<run>/: the last complete one, and the changes since."""

    def __init__(self, directory: str | Path, run: str, complete_every: int) -> None:
        self._directory, self._run, self._complete_every = directory, run, complete_every
        self._lock = Lock()  # a server may need the complete weights at any time
        self._planned: list[PlannedTensor] = []
        self._manifest: ManifestDict = {}
        self._folders: list[Path] = []  # from the last complete file on
        self._unused: list[Path] = []  # may still be read
        # Of `_manifest`: those that this process compares with the next version's; None: unknown.
        self._bytes: NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of a version."""
        return sum(map(planned_bytes, self._planned))

    def write_complete(self, version: int) -> WeightFile | None:
        """Write the version that was written last once more, complete; None if it is another, or if
        its bytes cannot be read."""
        with self._lock:
            if self._bytes is None or self._manifest.get("version") != version:
                return None
            if len(self._folders) == 1:
                return self._describe(self.nbytes)
            parts = self._read_parts()
            return None if parts is None else self._write_complete(parts)

    def _read_parts(self) -> Iterable[NDArray[np.uint8]] | None:
        """Return the bytes of all tensors, in their order; by default this process has them."""
        assert self._bytes is not None
        return [self._bytes]

    def _must_be_complete(self, version: int) -> bool:
        """True if no changes may follow, or if this version was written already."""
        written = [folder.name for folder in self._folders]
        return len(written) >= self._complete_every or str(version) in written

    def _write_complete(self, parts: Iterable[NDArray[np.uint8]]) -> WeightFile:
        """Write the bytes of all tensors, in their order, as the only file that is needed."""
        manifest = self._manifest
        with stage_version(self._directory, self._run, manifest["version"]) as (partial_dir, final):
            partial_dir.mkdir()
            check_free_space(partial_dir, self.nbytes)
            with open(partial_dir / SINGLE_FILE, "xb", opener=open_private) as file:
                file.write(encode_header(self._planned))
                for part in parts:
                    file.write(part.data)
            (partial_dir / "manifest.json").write_text(json.dumps(manifest))
        return self._begin_with(final)

    def _begin_with(self, folder: Path) -> WeightFile:
        """Need no older folder than this complete one."""
        self._unused += self._folders
        self._folders = [folder]
        return self._describe(self.nbytes)

    def _describe(self, sent_nbytes: int) -> WeightFile:
        path, *changes = map(str, self._folders)
        info = {"path": path, "changes": changes}
        return WeightFile(self._manifest, info, close=self._remove_unused, sent_nbytes=sent_nbytes)

    def _remove_unused(self) -> None:
        """Remove files that the current version does not need."""
        with self._lock:
            unused, self._unused = self._unused, []
            for folder in unused:
                if folder not in self._folders:
                    remove_version(folder)
