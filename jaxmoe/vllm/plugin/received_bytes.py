# SPDX-License-Identifier: Apache-2.0
"""The bytes of the weights that a worker received last, to which changes are applied.

vLLM stores weights in other forms, so a copy in host memory is needed. It has a label only while it
is one complete version, whose digests are compared with the manifest's at each update. Numpy alone.
Next: jaxmoe/weight_sync/sent_weights.py writes what is read here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxmoe.vllm.plugin.manifest import (
    DTYPE_BYTES,
    Manifest,
    UpdateRejected,
    check_file_headers,
    open_without_links,
    read_manifest,
)
from jaxmoe.weight_sync.changes import INDEX_FILE, Block, apply_block


class ReceivedBytes:
    """The bytes of each tensor of version `label`; None: nothing is known of them."""

    def __init__(self) -> None:
        self.label: str | None = None
        self._bytes: dict[str, NDArray[np.uint8]] = {}

    def read(self, folders: list[Path]) -> Mapping[str, NDArray[np.uint8]]:
        """Return the bytes of the last folder's tensors, to be compared with its manifest.

        The first folder is complete, each other one has the changes since the one before it. If
        they differ from the manifest, call `forget`. Raises UpdateRejected for damaged files.
        """
        manifests = [read_manifest(folder) for folder in folders]
        labels = [manifest.label for manifest in manifests]
        # A complete version is sent alone if there is a doubt.
        start = labels.index(self.label) if self.label in labels and len(folders) > 1 else -1
        self.label = None  # after an error too
        if start < 0:
            start, self._bytes = 0, {}  # freed first: two copies may not fit
            for name, span in check_file_headers(manifests[0], folders[0]).items():
                self._bytes[name] = np.fromfile(
                    span.path, np.uint8, span.end - span.begin, offset=span.begin
                )
        for manifest, folder in zip(manifests[start + 1 :], folders[start + 1 :], strict=True):
            try:
                for name, blocks in read_index(folder).items():
                    with open(folder / name, "rb", opener=open_without_links) as file:
                        for block in blocks:
                            self._apply(block, file, manifest)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UpdateRejected(
                    f"weights {manifest.label} are rejected: {folder} must have the changes since "
                    f"the version before; {error!r}."
                ) from error
        self.label = labels[-1]
        return self._bytes

    def forget(self) -> None:
        """Have the next update start from a complete version."""
        self.label, self._bytes = None, {}

    def _apply(self, block: Block, file: BinaryIO, manifest: Manifest) -> None:
        raw = self._bytes[block.tensor][block.begin :][: block.nbytes]
        if raw.size != block.nbytes or block.mask_nbytes + block.changed_nbytes > 2 * raw.size:
            raise ValueError(f"{block} does not fit the tensor")
        mask, changed = file.read(block.mask_nbytes), file.read(block.changed_nbytes)
        if len(mask) + len(changed) != block.mask_nbytes + block.changed_nbytes:
            raise ValueError("the file is cut off")
        itemsize = DTYPE_BYTES[manifest.tensors[block.tensor].dtype]
        apply_block(raw, mask, np.frombuffer(changed, np.uint8), itemsize)


def read_index(folder: Path) -> dict[str, list[Block]]:
    """Return the blocks of a folder's changes, by file.

    Raises OSError or ValueError if it has no list.
    """
    with open(folder / INDEX_FILE, opener=open_without_links) as file:
        index = json.load(file)["files"]
    files = {name: [Block(*fields) for fields in blocks] for name, blocks in index.items()}
    for name, blocks in files.items():
        if Path(name).name != name:
            raise ValueError(f"{name!r} must be the name of a file")
        for tensor, *numbers in blocks:
            if type(tensor) is not str or not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError(f"{(tensor, *numbers)} must be a name and four numbers")
    return files
