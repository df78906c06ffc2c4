# SPDX-License-Identifier: Apache-2.0
"""Verdicts on kernels, one file each in the user's cache folder, by all that they depend on.

Next: choice.py, which asks for them.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Key = dict[str, Any]


class KernelVerdict(NamedTuple):
    """Of one operation in one implementation on one chip."""

    kind: str  # right; wrong (errs, hangs, dies); refuses (these shapes, this chip); or unknown,
    # where the machine stood in the way, which is not kept
    reason: str

    @property
    def right(self) -> bool:
        return self.kind == "right"


def folder() -> Path:
    """$XDG_CACHE_HOME/pallas_kernels, or ~/.cache/pallas_kernels."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "pallas_kernels"


def key(
    chip: Mapping[str, str], operation: str, impl: str, dtype: str,
    real: Sequence[Mapping[str, Any]] | None,
) -> Key:  # fmt: skip
    """All that a verdict depends on: chip, versions, the kernels' source, and what was asked."""
    sizes = real and list(map(dict, real))
    asked = {"operation": operation, "impl": impl, "dtype": dtype, "real": sizes}
    return json.loads(json.dumps({**chip, "source": source(), **asked}))  # as a file has it


def source() -> str:
    """A digest of every file of this package."""
    found = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def path_of(where: Path, of: Key) -> Path:
    """The file of a key."""
    name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
    return where / f"{of['operation']}-{of['impl'].replace(':', '.')}-{name}.json"


def kept(where: Path, of: Key, tell: Callable[[str], None] = print) -> KernelVerdict | None:
    """The verdict on file; None where there is none, or, which is told, none that can be used."""
    path = path_of(where, of)
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        tell(f"{path} cannot be read ({error}); {of['operation']} is checked again")
        return None
    try:
        verdict = KernelVerdict(record["verdict"]["kind"], record["verdict"]["reason"])
        differs = [name for name in of if record["key"].get(name) != of[name]]
        sound = verdict.kind in ("right", "wrong", "refuses") and isinstance(verdict.reason, str)
    except (AttributeError, KeyError, TypeError):
        differs, sound = [], False
    if not sound or differs:
        what = f"is of another {', '.join(differs)}" if differs else "does not hold a verdict"
        tell(f"{path} {what}; {of['operation']} is checked again")
        return None
    return verdict


def keep(where: Path, of: Key, verdict: KernelVerdict, tell: Callable[[str], None] = print) -> None:
    """Write the file whole or not at all; a folder that takes none is told of."""
    path = path_of(where, of)
    record = {"key": of, "verdict": verdict._asdict()}
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=where, suffix=".tmp", delete=False) as file:
            file.write(json.dumps(record, indent=1) + "\n")
        os.replace(file.name, path)
    except OSError as error:
        tell(f"the verdict on {of['operation']} is not kept ({error}); the next run checks again")
