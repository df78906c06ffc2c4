# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of the small files of an export: config.json with a flipped bit may be another model's.

The list has the format of `sha256sum`, so `sha256sum -c jaxmoe.sha256` compares without us. It
leaves out the safetensors, which hold a digest of every tensor themselves.
Next: jaxmoe/model/config.py and jaxmoe/data/tokenizer.py compare before they read.
"""

import hashlib
import re
from pathlib import Path

from jaxmoe.config.errors import ConfigError

LIST = "jaxmoe.sha256"
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)", re.ASCII)


def write_file_sums(folder: Path) -> None:
    """List every file of a folder but the safetensors in its jaxmoe.sha256."""
    names = sorted(p.name for p in folder.iterdir() if p.suffix != ".safetensors")
    lines = [f"{_sha256(folder / name)}  {name}\n" for name in names if name != LIST]
    (folder / LIST).write_text("".join(lines))


def check_file_sums(folder: Path) -> None:
    """Compare what a folder's jaxmoe.sha256 lists; a folder without one is another writer's.

    Raises ConfigError for a file of other bytes than were written. A file that is gone is for
    whoever needs it to miss.
    """
    path = folder / LIST
    if not path.is_file():
        return
    try:
        for name, want in _read_list(path):
            file = folder / name
            if file.is_file() and _sha256(file) != want:
                raise ConfigError(
                    f"{file} has other bytes than were written, by {LIST} beside it. Copy or "
                    f"export it again; if it was changed on purpose: rm {path}"
                )
    except OSError as error:
        raise ConfigError(f"{folder} must be readable; {error}. Copy it again.") from error


def _read_list(path: Path) -> list[tuple[str, str]]:
    """(name, sum) of every line."""
    found: list[tuple[str, str]] = []
    for line in path.read_bytes().decode("latin-1").removesuffix("\n").split("\n"):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"{path} must be lines as of sha256sum, got {line[:80]!r}. Copy it again, or: "
                f"rm {path}"
            )
        found.append((match[2], match[1]))
    return found


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
