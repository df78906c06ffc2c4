# SPDX-License-Identifier: Apache-2.0
"""The host: its allocator, how much memory is left, and the threads of CPU devices.

Next: jaxmoe/cli.py sets the allocator before anything is allocated; jaxmoe/memory.py compares.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

# mallopt's parameters, as glibc's malloc.h numbers them
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_GROWTH_BYTES = 512 * 2**20


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed instead of giving it back; False where there is no glibc.

    On a CPU, XLA frees and allocates the same large buffers every step, and the kernel clears
    each of their pages anew: a fifth of the small model's step on one core.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        options = ((_MMAP_MAX, 0), (_ARENA_MAX, 1), (_TOP_PAD, _GROWTH_BYTES),
                   (_TRIM_THRESHOLD, 2**31 - 1))  # fmt: skip
        return all(libc.mallopt(name, value) == 1 for name, value in options)
    except (OSError, AttributeError):  # another libc
        return False


def one_thread_a_device(environ: MutableMapping[str, str] = os.environ) -> None:
    """For several CPU devices in one process, before jax opens them; a GPU or TPU takes no notice.

    They share a pool of threads: collectives that wait side by side take all of them, and XLA ends
    the process after 40 s. It orders those of a sequence, but begins the next one while a loop
    before it still runs its own, unless it reads what the loop made: loops that send stand where
    nothing beside them does (tests/jaxmoe/parallel/collectives.py, `beside_loops`), which two
    forwards of four layers or more in one program cannot.
    """
    flag = "--xla_cpu_multi_thread_eigen"
    if flag not in environ.get("XLA_FLAGS", ""):
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {flag}=false".strip()


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take before the kernel ends it; None where nobody says.

    The least of the machine's MemAvailable and of what each control group around the process
    leaves, version 1 or 2. File pages that the kernel would drop count as free.
    """
    told = (line.partition(":") for line in _lines(root / "proc/meminfo"))
    left = [int(value.split()[0]) * 1024 for name, _, value in told if name == "MemAvailable"]
    left += _groups(root)
    return max(0, min(left)) if left else None


def _groups(root: Path) -> Iterator[int]:
    """What each control group around this process leaves of its limit."""
    mounted = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, kinds, inside = line.strip().split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top = mounted / kinds
        limit, used, cached = {
            "": ("memory.max", "memory.current", "inactive_file"),
            "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }[kinds]
        here = top / inside.strip("/")
        # in a container the path may be the host's, of which only the top is mounted
        for folder in [here, *(p for p in here.parents if p == top or top in p.parents)]:
            numbers = [" ".join(_lines(folder / name)) for name in (limit, used)]
            if not all(number.strip().isdecimal() for number in numbers):  # "max": no limit
                continue
            stat = (line.split() for line in _lines(folder / "memory.stat"))
            dropped = sum(int(words[1]) for words in stat if words[:1] == [cached])
            yield int(numbers[0]) - int(numbers[1]) + dropped


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
