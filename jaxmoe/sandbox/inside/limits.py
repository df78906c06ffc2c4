# SPDX-License-Identifier: Apache-2.0
"""Limits and privileges that a sandbox's process gives up, before it runs a program."""

import ctypes
import os
import resource
import signal
import struct

MAX_TASKS = 16  # threads of a program
MAX_OPEN_FILES = 64
MAX_FILES = 10_000  # each takes a kilobyte of the kernel's memory, beside what is in it
MAX_PENDING_SIGNALS = 64  # also of timers; the kernel counts them for all processes of a user
NOBODY = 65534
_SET_DEATH_SIGNAL, _DROP_BOUNDING, _SET_SECUREBITS = 1, 24, 28
_SECUREBITS_LOCKED = 0x2F  # no capability for user id 0, and no change of this
_CAPABILITY_VERSION = 0x20080522
_REMOUNT, _NO_SUID, _NO_DEVICES = 32, 2, 4


def set_limits(memory_mb: int, disk_mb: int, removed: frozenset[str]) -> None:
    """Set the resource limits of this process, hard and soft. Raises ValueError or OSError.

    A limit that this process already has stays where it is lower, except those of the config, which
    the trainer compared with its own.
    disk_mb: of one file; a quota for all files is the sandbox's.
    removed: names of measures that a test leaves out.
    """
    limits = {
        "memory": (resource.RLIMIT_AS, memory_mb << 20),
        "tasks": (resource.RLIMIT_NPROC, MAX_TASKS),
        "file_size": (resource.RLIMIT_FSIZE, disk_mb << 20),
        "open_files": (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        # At 1 byte the kernel starts no program that collects core dumps either; at 0 it does.
        "core_dumps": (resource.RLIMIT_CORE, 1),
        "pending_signals": (resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS),
        "real_time": (resource.RLIMIT_RTPRIO, 0),
        "niceness": (resource.RLIMIT_NICE, 0),
        "locked_memory": (resource.RLIMIT_MEMLOCK, 0),
        "queues": (resource.RLIMIT_MSGQUEUE, 0),
    }
    for name, (limit, value) in limits.items():
        if name in removed:
            continue
        _, hard = resource.getrlimit(limit)
        if name not in ("memory", "file_size") and hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(limit, (value, value))


def limit_files(folder: str) -> None:
    """Limit the number of files, folders and links below a mount in memory. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_ulong(_REMOUNT | _NO_SUID | _NO_DEVICES)
    if libc.mount(b"tmpfs", folder.encode(), None, flags, f"nr_inodes={MAX_FILES}".encode()):
        raise OSError(ctypes.get_errno(), "the number of files cannot be limited", folder)


def die_with_parent(parent: int | None) -> None:
    """Ask the kernel to kill this process when its parent's thread ends.

    parent: its id, or None if something else ends this process in case it ended before.
    """
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it ended before the request
        os._exit(1)


def drop_privileges() -> None:
    """Become nobody, if this process may and the interpreter stays readable; no capabilities."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        is_readable = _can_nobody_read_interpreter()
        for capability in range(64):
            libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0)
        libc.prctl(_SET_SECUREBITS, _SECUREBITS_LOCKED, 0, 0, 0)
        if is_readable:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    if libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))):
        raise OSError(ctypes.get_errno(), "capset")


def _can_nobody_read_interpreter() -> bool:
    """True unless the interpreter's files are closed to user nobody, as below /root."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        with open(os.__file__):
            return True
    except OSError:
        return False
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
