# SPDX-License-Identifier: Apache-2.0
"""A seccomp filter for a Python interpreter that has started: no new process, no socket.

System calls are refused by group, so that a test can remove one group and see what it was for.
Next: jaxmoe/sandbox/inside/limits.py sets the limits that the kernel counts by itself.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

from jaxmoe.sandbox.inside.system_calls import (
    CLONE,
    CLONE3,
    FCNTL,
    IGNORED,
    IOCTL,
    MADVISE,
    MMAP,
    PRCTL,
    PROCESS_CALLS,
    REFUSED,
    SENDS_TO_A_PIDFD,
    SOCKETPAIR,
    UNSUPPORTED,
)

EPERM, ENOSYS, ENOTSUP = 1, 38, 95
_X86, _ARM = "x86_64", "aarch64"
_AUDIT_ARCHITECTURE = {_X86: 0xC000003E, _ARM: 0xC00000B7}
_FIRST_UNKNOWN = 452  # later calls than those of the table do not exist, as on an older kernel
_X32_BIT = 0x40000000

GROUPS = (
    *REFUSED,
    *UNSUPPORTED,
    *IGNORED,
    "signals",
    "threads",
    "death_signal",
    "file_commands",
    "device_commands",
    "huge_pages",
)

_LOAD, _EQUAL, _SET, _COMPARE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_CLONE_THREAD = 0x10000
_SET_DEATH_SIGNAL, _SET_SECCOMP = 1, 22
_UNIX, _STREAM = 1, 1
# Commands of fcntl that concern this process alone: copies, flags, sizes and questions. The others
# take a lease on a file, watch a folder, send signals to any process, or enlarge a pipe.
_FILE_COMMANDS = (0, 1, 2, 3, 4, 5, 9, 11, 16, 36, 1025, 1030, 1032, 1034)
_SET_LOCK, _SET_LOCK_WAITING = 6, 7
# Of ioctl: is it a terminal and how large, bytes to read, waiting, inheritance. Others set the
# process that a socket sends signals to, or flags of files.
_DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Of madvise: pages merged with those of others, or taken out of everybody's memory.
_ADVICE_ON_SHARED_PAGES = (12, 20, 21, 25)
_HUGE_PAGES = 0x40000  # of mmap: from a pool of the whole machine


def is_supported() -> bool:
    """True if there is a table for this machine's architecture."""
    return platform.machine() in _AUDIT_ARCHITECTURE


def compile_filter(groups: frozenset[str], pid: int, machine: str) -> bytes:
    """The program of a filter that refuses these groups for the process `pid`.

    The group "threads" refuses threads; new processes are refused by "processes".
    """
    column = 0 if machine == _X86 else 1
    lines = [
        _pack(_LOAD, 4),
        _pack(_EQUAL, _AUDIT_ARCHITECTURE[machine], 1, 0),
        _pack(_RETURN, _KILL),
        _pack(_LOAD, 0),
    ]
    if machine == _X86:  # the same calls have other numbers in the x32 convention
        lines += [_pack(_COMPARE, _X32_BIT, 0, 1), _error(ENOSYS)]
    lines += [_pack(_COMPARE, _FIRST_UNKNOWN, 0, 1), _error(ENOSYS)]
    for table, error in ((REFUSED, EPERM), (UNSUPPORTED, ENOTSUP), (IGNORED, 0)):
        for group, calls in table.items():
            for numbers in calls.values() if group in groups else ():
                lines += _answer(numbers[column], error)
    if "signals" in groups:
        lines += _answer(SENDS_TO_A_PIDFD[column], EPERM)
    for group, calls in PROCESS_CALLS.items():
        if group in groups:
            allowed = (pid,) if group == "signals" else (pid, 0)
            for numbers in calls.values():
                lines += _allow_arguments(numbers[column], 0, allowed)
    if "processes" in groups:
        # Its arguments are in memory, which a filter cannot read. libc falls back to clone.
        lines += _if_call(CLONE3[column], [_error(ENOSYS)])
        is_thread = [_pack(_LOAD, 16), _pack(_SET, _CLONE_THREAD, 1, 0), _error(EPERM)]
        refused = [_error(EPERM)] if "threads" in groups else [*is_thread, _pack(_RETURN, _ALLOW)]
        lines += _if_call(CLONE[column], refused)
    if "sockets" in groups:
        # asyncio needs a pair of streams. A datagram socket could be sent to any address, and
        # another family may load a module of the kernel.
        kinds = [_STREAM | flags for flags in (0, 0o4000, 0o2000000, 0o2004000)]
        is_unix = [_pack(_LOAD, 16), _pack(_EQUAL, _UNIX, 1, 0), _error(EPERM)]
        lines += _allow_arguments(SOCKETPAIR[column], 1, tuple(kinds), is_unix)
    if "file_commands" in groups:
        # One process never waits for a lock of its own, so it has every lock that it asks for.
        locks = _list_answers(1, (_SET_LOCK, _SET_LOCK_WAITING), 0)
        lines += _allow_arguments(FCNTL[column], 1, _FILE_COMMANDS, locks)
    if "device_commands" in groups:
        lines += _allow_arguments(IOCTL[column], 1, _DEVICE_COMMANDS)
    if "huge_pages" in groups:
        has_flag = [_pack(_LOAD, 40), _pack(_SET, _HUGE_PAGES, 0, 1), _error(EPERM)]
        lines += _if_call(MMAP[column], [*has_flag, _pack(_RETURN, _ALLOW)])
    if "page_cache" in groups:
        refused = _list_answers(2, _ADVICE_ON_SHARED_PAGES, EPERM)
        lines += _if_call(MADVISE[column], [*refused, _pack(_RETURN, _ALLOW)])
    # A program that clears its death signal would survive a trainer that is killed.
    options = (_SET_DEATH_SIGNAL,) if "death_signal" in groups else ()
    options += (_SET_SECCOMP,) if "kernel" in groups else ()
    refused = _list_answers(0, options, EPERM)
    lines += _if_call(PRCTL[column], [*refused, _pack(_RETURN, _ALLOW)])
    return b"".join([*lines, _pack(_RETURN, _ALLOW)])


def install_filter(groups: frozenset[str]) -> None:
    """Install the filter for this thread and those that it starts. Raises OSError."""
    program = compile_filter(groups, os.getpid(), platform.machine())
    buffer = ctypes.create_string_buffer(program, len(program))
    fields = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privs, set_seccomp, filter_mode = 38, 22, 2
    if libc.prctl(set_no_new_privs, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(set_seccomp, filter_mode, ctypes.c_char_p(fields), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _pack(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def _error(number: int) -> bytes:
    return _pack(_RETURN, 0x00050000 | number)


def _answer(number: int | None, error: int) -> list[bytes]:
    return [] if number is None else _if_call(number, [_error(error)])


def _if_call(number: int, lines: list[bytes]) -> list[bytes]:
    """Lines for one call; they must return."""
    return [_pack(_EQUAL, number, 0, len(lines)), *lines]


def _list_answers(index: int, values: tuple[int, ...], error: int) -> list[bytes]:
    """Lines that answer with an error, of which 0 is success, if an argument has such a value."""
    tests = [line for x in values for line in (_pack(_EQUAL, x, 0, 1), _error(error))]
    return [_pack(_LOAD, 16 + 8 * index), *tests]


def _allow_arguments(
    number: int | None, index: int, allowed: tuple[int, ...], before: Sequence[bytes] = ()
) -> list[bytes]:
    """Refuse a call unless its argument `index`, of 32 bits, is one of `allowed`.

    before: lines that look at it first.
    """
    if number is None:
        return []
    n = len(allowed)
    tests = [_pack(_EQUAL, value, n - i, 0) for i, value in enumerate(allowed)]
    return _if_call(
        number,
        [*before, _pack(_LOAD, 16 + 8 * index), *tests, _error(EPERM), _pack(_RETURN, _ALLOW)],
    )
