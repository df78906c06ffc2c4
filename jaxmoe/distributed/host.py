# SPDX-License-Identifier: Apache-2.0
"""The host: its allocator, its free memory, and the threads of CPU devices.

Next: jaxmoe/cli.py sets the allocator before anything is allocated; jaxmoe/run/memory.py compares.
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
    """Make glibc reuse freed memory instead of returning it to the kernel; False without glibc.

    On a CPU, XLA frees and allocates the same large buffers every step, and the kernel clears all
    their pages each time: a fifth of the small model's step on one core.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        # Mapped blocks would return to the kernel when freed, and memory of one arena is not reused
        # by another. The heap grows in large steps and is never trimmed.
        options = (
            (_MMAP_MAX, 0),
            (_ARENA_MAX, 1),
            (_TOP_PAD, _GROWTH_BYTES),
            (_TRIM_THRESHOLD, 2**31 - 1),
        )
        return all(libc.mallopt(name, value) == 1 for name, value in options)
    except (OSError, AttributeError):  # another libc
        return False


def use_one_thread_per_device(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set XLA_FLAGS for several CPU devices in one process, before jax opens them.

    GPUs and TPUs ignore the flag. CPU devices share a thread pool: collectives that wait
    concurrently can take all threads, and XLA ends the process after 40 s. XLA orders consecutive
    collectives, but starts the next one while a loop before it still runs its own, unless it reads
    a result of the loop. So loops with collectives must not run concurrently with others
    (tests/jaxmoe/parallel/collectives.py, `beside_loops`); two forwards of four layers or more in
    one program would.
    """
    flag = "--xla_cpu_multi_thread_eigen"
    if flag not in environ.get("XLA_FLAGS", ""):
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {flag}=false".strip()


def count_free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still allocate; None where that is unknown.

    The minimum of the machine's MemAvailable and of the room in each control group around the
    process, version 1 or 2. File pages that the kernel would drop count as free.
    """
    fields = (line.partition(":") for line in _read_lines(root / "proc/meminfo"))
    free = [int(value.split()[0]) * 1024 for name, _, value in fields if name == "MemAvailable"]
    free += _list_cgroup_free_bytes(root)
    return max(0, min(free)) if free else None


def _list_cgroup_free_bytes(root: Path) -> Iterator[int]:
    """Yield the bytes left below the limit of each control group around this process."""
    cgroup_root = root / "sys/fs/cgroup"
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = cgroup_root / controllers
        limit, used, cached = {
            "": ("memory.max", "memory.current", "inactive_file"),
            "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        }[controllers]
        group = top / path.strip("/")
        # In a container the path may be the host's, of which only the top is mounted.
        for folder in [group, *(p for p in group.parents if p == top or top in p.parents)]:
            numbers = [" ".join(_read_lines(folder / name)) for name in (limit, used)]
            if not all(number.strip().isdecimal() for number in numbers):  # "max": no limit
                continue
            stat = (line.split() for line in _read_lines(folder / "memory.stat"))
            reclaimable = sum(int(words[1]) for words in stat if words[:1] == [cached])
            yield int(numbers[0]) - int(numbers[1]) + reclaimable


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
