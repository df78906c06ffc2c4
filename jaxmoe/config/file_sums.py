# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of the small files of an export, since a flipped bit in config.json changes the model.

The list has the format of `sha256sum`, so `sha256sum -c jaxmoe.sha256` can check it. Safetensors
are not listed, because they contain a digest of every tensor.
Next: jaxmoe/model/config.py and jaxmoe/data/tokenizer.py check files before they read them.
"""

import hashlib
import re
from pathlib import Path

from jaxmoe.config.errors import ConfigError

LIST = "jaxmoe.sha256"
# Names without a slash, so that no line can point outside of the folder.
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)", re.ASCII)


def write_file_sums(folder: Path) -> None:
    """Write jaxmoe.sha256, which lists all files of a folder except safetensors."""
    names = sorted(p.name for p in folder.iterdir() if p.suffix != ".safetensors")
    lines = [f"{_sha256(folder / name)}  {name}\n" for name in names if name != LIST]
    (folder / LIST).write_text("".join(lines))


def check_file_sums(folder: Path) -> None:
    """Check the files that jaxmoe.sha256 lists; a folder without it is not checked.

    Raises ConfigError for a file whose bytes changed. Missing files are ignored here.
    """
    path = folder / LIST
    if not path.is_file():
        return
    try:
        for name, expected in _read_list(path):
            file = folder / name
            if file.is_file() and _sha256(file) != expected:
                raise ConfigError(
                    f"{file} has changed since it was written, according to {LIST}. Copy or "
                    f"export it again; if it was changed on purpose: rm {path}"
                )
    except OSError as error:
        raise ConfigError(f"{folder} must be readable; {error}. Copy it again.") from error


def _read_list(path: Path) -> list[tuple[str, str]]:
    """Return (name, sum) of every line."""
    entries: list[tuple[str, str]] = []
    # Latin-1 decodes any bytes. splitlines would also separate lines at characters that sha256sum
    # does not.
    for line in path.read_bytes().decode("latin-1").removesuffix("\n").split("\n"):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(
                f"{path} must be lines as of sha256sum, got {line[:80]!r}. Copy it again, or: "
                f"rm {path}"
            )
        entries.append((match[2], match[1]))
    return entries


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
