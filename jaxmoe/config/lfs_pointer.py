# SPDX-License-Identifier: Apache-2.0
"""Refuse a pointer of Git LFS, the few lines that a clone without LFS has in place of the data.

Readers of large files ask first: headers of tensors, tokenizers, rows of data.
"""

import shlex
from pathlib import Path

from jaxmoe.config.errors import ConfigError

_FIRST_LINE = b"version https://git-lfs.github.com/spec/"


def check_no_lfs_pointer(path: Path) -> None:
    """Raise ConfigError if a file is a pointer of Git LFS."""
    with open(path, "rb") as file:
        start = file.read(len(_FIRST_LINE))
    if start == _FIRST_LINE:
        raise ConfigError(
            f"{path} must hold its data; it is a pointer of Git LFS, and the data was not fetched. "
            f"Type: git -C {shlex.quote(str(path.parent))} lfs pull"
        )
