# SPDX-License-Identifier: Apache-2.0
"""Stored verdicts on kernels: one file each in the user's cache folder, keyed by all inputs.

Next: choice.py, which uses them.
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
    """The result of checking one implementation of one operation on one device.

    kind: right; wrong (errors, a hang, a crash); refuses (unsupported shapes or device); or
    unknown, if the machine prevented the check, which is not stored.
    """

    kind: str
    reason: str

    @property
    def is_right(self) -> bool:
        return self.kind == "right"


def verdict_folder() -> Path:
    """$XDG_CACHE_HOME/pallas_kernels, or ~/.cache/pallas_kernels."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "pallas_kernels"


def verdict_key(
    chip: Mapping[str, str],
    operation: str,
    impl: str,
    dtype: str,
    real: Sequence[Mapping[str, Any]] | None,
) -> Key:
    """Everything that a verdict depends on: device, versions, the kernels' source, the request."""
    sizes = real and list(map(dict, real))
    request = {"operation": operation, "impl": impl, "dtype": dtype, "real": sizes}
    return json.loads(json.dumps({**chip, "source": source_digest(), **request}))  # tuples: lists


def source_digest() -> str:
    """Digest of every Python file of this package."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def verdict_path(folder: Path, key: Key) -> Path:
    """The file of a key."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{key['operation']}-{key['impl'].replace(':', '.')}-{name}.json"


def load_verdict(
    folder: Path, key: Key, log_line: Callable[[str], None] = print
) -> KernelVerdict | None:
    """Load a stored verdict; None if there is none, or, with a log line, if it cannot be used."""
    path = verdict_path(folder, key)
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log_line(f"cannot read {path} ({error}); checking {key['operation']} again")
        return None
    try:
        verdict = KernelVerdict(record["verdict"]["kind"], record["verdict"]["reason"])
        differs = [name for name in key if record["key"].get(name) != key[name]]
        valid = verdict.kind in ("right", "wrong", "refuses") and isinstance(verdict.reason, str)
    except (AttributeError, KeyError, TypeError):
        differs, valid = [], False
    if not valid or differs:
        problem = f"has a different {', '.join(differs)}" if differs else "contains no verdict"
        log_line(f"{path} {problem}; checking {key['operation']} again")
        return None
    return verdict


def save_verdict(
    folder: Path, key: Key, verdict: KernelVerdict, log_line: Callable[[str], None] = print
) -> None:
    """Write the file atomically; if the folder is not writable, log a line and continue."""
    path = verdict_path(folder, key)
    record = {"key": key, "verdict": verdict._asdict()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
            file.write(json.dumps(record, indent=1) + "\n")
        # Several processes may check at once, and a reader must not see half a file.
        os.replace(file.name, path)
    except OSError as error:
        log_line(
            f"cannot store the verdict on {key['operation']} ({error}); the next run checks again"
        )
