# SPDX-License-Identifier: Apache-2.0
"""The host's memory allocator. Next: jaxmoe/cli.py calls it before anything is allocated."""

import ctypes
import sys

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
