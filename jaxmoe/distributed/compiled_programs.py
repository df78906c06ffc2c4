# SPDX-License-Identifier: Apache-2.0
"""Keep compiled programs between runs, in JAX's persistent cache.

A start of the small model spends half a minute compiling, and a resume compiles the same again.
Next: jaxmoe/cli.py calls this before a command uses a device.
"""

import hashlib
import os
import platform
import zlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import jax

from jaxmoe.distributed.processes import names_several_processes

MAX_BYTES = 2 * 2**30
FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
SWITCH_VARIABLE = "JAX_ENABLE_COMPILATION_CACHE"
_ZSTANDARD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHECKED = "checked"  # its time: programs that are older were complete


def keep_compiled_programs(environ: Mapping[str, str] = os.environ) -> str | None:
    """Have JAX keep compiled programs in the user's cache folder; return a line that says so.

    The folder is programs/ in $XDG_CACHE_HOME/jaxmoe or ~/.cache/jaxmoe, with a subfolder for each
    processor: XLA compiles for the instructions of the one that it runs on, and JAX's key does
    not name it (of a GPU or TPU it does). At most MAX_BYTES stay at a start; the least recently
    used go first. Nothing changes (None) if the environment has a folder (FOLDER_VARIABLE) or turns
    the cache off (SWITCH_VARIABLE=false), or if there are several processes: JAX keeps the programs
    of process 0 alone, and the others would compile while it waits for them.
    """
    if (
        environ.get(FOLDER_VARIABLE)
        or environ.get(SWITCH_VARIABLE, "true").lower() in ("false", "0", "f", "n", "no", "off")
        or names_several_processes(environ)
    ):
        return None
    root = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmoe" / "programs"
    folder = root / identify_processor()
    try:
        # Programs are code: nobody else may write them.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (root, folder):
            status = path.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                return f"programs are not kept: {path} must be yours, and writable by you alone"
        _remove_incomplete(folder)
        kept_bytes = _limit_bytes(root, MAX_BYTES)
    except OSError as error:
        return f"programs are not kept: {error.strerror}: {error.filename}"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return (
        f"programs compiled before: {kept_bytes / 1e6:.1f} MB in {root}, at most "
        f"{MAX_BYTES / 1e9:.1f} GB; {SWITCH_VARIABLE}=false compiles all anew"
    )


def identify_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A name of this processor's model and instructions, and of the jaxlib that compiles for it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    words = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    # One core stands for all; on a machine with two kinds, a set has both.
    described = sorted({line for line in lines if line.startswith(words)}) or lines
    text = "\n".join([platform.machine(), *described])
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _limit_bytes(root: Path, limit: int) -> int:
    """Remove the least recently used programs beyond `limit` bytes; return the bytes that stay."""
    used = sorted(
        ((max(s.st_atime, s.st_mtime), s.st_size, path) for path, s in _list_programs(root)),
        key=lambda entry: entry[0],
    )
    total = sum(size for _, size, _ in used)
    for _, size, path in used:
        if total <= limit:
            break
        path.unlink(missing_ok=True)  # another run may have removed it
        total -= size
    return total


def _remove_incomplete(folder: Path) -> None:
    """Remove what a killed run wrote in part; JAX would warn of it and never replace it."""
    checked = folder / _CHECKED
    since = checked.stat().st_mtime if checked.exists() else 0.0
    for path, status in _list_programs(folder):
        if status.st_mtime >= since and not _is_complete(path.read_bytes()):
            path.unlink(missing_ok=True)
    checked.touch()


def _list_programs(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in root.rglob("*-cache"):
        try:
            yield path, path.stat()
        except FileNotFoundError:  # another run removed it
            continue


def _is_complete(data: bytes) -> bool:
    """True if JAX can decompress the program."""
    try:
        if data.startswith(_ZSTANDARD_MAGIC):
            import_module("zstandard").ZstdDecompressor().decompress(data)
        else:
            zlib.decompress(data)
    except Exception:  # each of the libraries has errors of its own
        return False
    return True
