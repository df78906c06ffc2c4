# SPDX-License-Identifier: Apache-2.0
"""Landlock: the files that a process may use, without namespaces or privileges.

Nothing may be written. Landlock does not hide that a file exists, nor its size and its times.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Sequence

MIN_VERSION = 3  # below it, files could be truncated
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on x86_64 and aarch64
_READ_FILE, _READ_FOLDER, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
# The kinds of access to files, by version: 13 in the first, later ones add one each.
_N_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_MAX_FILE_RIGHTS = 16
_NETWORK_VERSION, _SCOPE_VERSION = 4, 6


def read_version() -> int:
    """The version of the kernel's Landlock; 0 if it has none."""
    return max(0, _libc().syscall(_CREATE_RULESET, None, 0, 1))


def restrict_files(readable: Sequence[str]) -> None:
    """Allow this process to read and to map the files below `readable`, and nothing else.

    TCP, abstract sockets and signals to other processes are refused where the kernel can.
    Raises: OSError if the kernel has no Landlock, or an older one than MIN_VERSION.
    """
    version = read_version()
    if version < MIN_VERSION:
        raise OSError(f"Landlock must have version {MIN_VERSION} or later, got {version}")
    libc = _libc()
    files = (1 << _N_FILE_RIGHTS.get(version, _MAX_FILE_RIGHTS)) - 1
    network = 3 if version >= _NETWORK_VERSION else 0
    scope = 3 if version >= _SCOPE_VERSION else 0
    n_fields = 1 + (version >= _NETWORK_VERSION) + (version >= _SCOPE_VERSION)
    attributes = struct.pack("=QQQ", files, network, scope)[: 8 * n_fields]
    ruleset = libc.syscall(
        _CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), 0
    )
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path in readable:
        _allow_reading(libc, ruleset, path)
    if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def _allow_reading(libc: ctypes.CDLL, ruleset: int, path: str) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # nothing to read there
        return
    is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    rights = _READ_FILE | _EXECUTE | (_READ_FOLDER if is_folder else 0)
    rule = struct.pack("=Qi", rights, descriptor)
    failed = libc.syscall(_ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0)
    os.close(descriptor)
    if failed:
        raise OSError(ctypes.get_errno(), "landlock_add_rule", path)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
