# SPDX-License-Identifier: Apache-2.0
"""A seccomp filter for a Python interpreter that has started: no new process, no socket.

System calls are refused by group, so that a test can remove one group and see what it was for.
The numbers are those of Linux's tables for x86_64 and aarch64.
"""

import ctypes
import os
import platform
import struct

EPERM, ENOSYS = 1, 38
_X86, _ARM = "x86_64", "aarch64"
_AUDIT_ARCHITECTURE = {_X86: 0xC000003E, _ARM: 0xC00000B7}
_FIRST_UNKNOWN = 452  # later calls than those of the table do not exist, as on an older kernel
_X32_BIT = 0x40000000

# name: (number on x86_64, number on aarch64); None where the architecture has no such call.
_REFUSED: dict[str, dict[str, tuple[int | None, int | None]]] = {
    "processes": {
        "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    },
    "sockets": {
        "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201),
        "accept": (43, 202), "accept4": (288, 242),
    },
    "namespaces": {
        "unshare": (272, 97), "setns": (308, 268), "personality": (135, 92),
    },
    "mounts": {
        "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
        "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
        "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
        "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265), "mknod": (133, None), "mknodat": (259, 33),
        "quotactl": (179, 60), "quotactl_fd": (443, 443), "fanotify_init": (300, 262),
        "inotify_init": (253, None), "inotify_init1": (294, 26), "swapon": (167, 224),
        "swapoff": (168, 225),
    },
    "tracing": {
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "kcmp": (312, 272), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
        "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
        "process_mrelease": (448, 448), "get_robust_list": (274, 100), "move_pages": (279, 239),
        "migrate_pages": (256, 238), "lookup_dcookie": (212, 18),
    },
    "kernel": {
        "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
        "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
        "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
        "syslog": (103, 116), "acct": (163, 89), "reboot": (169, 142), "sethostname": (170, 161),
        "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112),
        "adjtimex": (159, 171), "clock_adjtime": (305, 266), "vhangup": (153, 58),
        "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
        "uselib": (134, None), "sysfs": (139, None),
    },
    # Memory that no limit of a process counts, and that may be shared with another process.
    "shared_memory": {
        "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
        "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
    },
    "priorities": {"setpriority": (141, 140), "ioprio_set": (251, 30)},
    # Landlock does not restrict these. In a mount namespace they reach the program's files alone.
    "attributes": {
        "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
        "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
        "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
        "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
        "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
        "flock": (73, 32),
    },
}  # fmt: skip
# Calls whose first argument names a process: allowed for the caller's own process only.
_PROCESS_CALLS = {
    "signals": {
        "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
        "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    },
    "priorities": {
        "prlimit64": (302, 261), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
        "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    },
}  # fmt: skip
_SENDS_TO_A_PIDFD = {"pidfd_send_signal": (424, 424)}
GROUPS = (*_REFUSED, "signals", "threads", "death_signal")

_LOAD, _EQUAL, _SET, _COMPARE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_CLONE, _CLONE3, _PRCTL, _SOCKETPAIR = (56, 220), (435, 435), (157, 167), (53, 199)
_CLONE_THREAD = 0x10000
_SET_DEATH_SIGNAL = 1
_SOCK_STREAM, _SOCK_DGRAM = 1, 2


def is_supported() -> bool:
    """True if there is a table for this machine's architecture."""
    return platform.machine() in _AUDIT_ARCHITECTURE


def compile_filter(groups: frozenset[str], pid: int, machine: str) -> bytes:
    """The program of a filter that refuses these groups for the process `pid`.

    The group "threads" refuses threads; new processes are refused by "processes".
    """
    column = 0 if machine == _X86 else 1
    lines = [
        _pack(_LOAD, 4), _pack(_EQUAL, _AUDIT_ARCHITECTURE[machine], 1, 0), _pack(_RETURN, _KILL),
        _pack(_LOAD, 0),
    ]  # fmt: skip
    if machine == _X86:  # the same calls have other numbers in the x32 convention
        lines += [_pack(_COMPARE, _X32_BIT, 0, 1), _error(ENOSYS)]
    lines += [_pack(_COMPARE, _FIRST_UNKNOWN, 0, 1), _error(ENOSYS)]
    for group, calls in _REFUSED.items():
        if group in groups:
            for numbers in calls.values():
                lines += _refuse(numbers[column])
    if "signals" in groups:
        lines += _refuse(_SENDS_TO_A_PIDFD["pidfd_send_signal"][column])
    for group, calls in _PROCESS_CALLS.items():
        if group in groups:
            allowed = (pid,) if group == "signals" else (pid, 0)
            for numbers in calls.values():
                lines += _allow_arguments(numbers[column], 0, allowed)
    if "processes" in groups:
        # Its arguments are in memory, which a filter cannot read. libc falls back to clone.
        lines += _if_call(_CLONE3[column], [_error(ENOSYS)])
        is_thread = [_pack(_LOAD, 16), _pack(_SET, _CLONE_THREAD, 1, 0), _error(EPERM)]
        refused = [_error(EPERM)] if "threads" in groups else [*is_thread, _pack(_RETURN, _ALLOW)]
        lines += _if_call(_CLONE[column], refused)
    if "sockets" in groups:
        # asyncio needs a pair of streams. A datagram socket could be sent to any address.
        kinds = [_SOCK_STREAM | flags for flags in (0, 0o4000, 0o2000000, 0o2004000)]
        lines += _allow_arguments(_SOCKETPAIR[column], 1, tuple(kinds))
    if "death_signal" in groups:
        # A program that clears it would survive a trainer that is killed.
        check = [_pack(_LOAD, 16), _pack(_EQUAL, _SET_DEATH_SIGNAL, 0, 1), _error(EPERM)]
        lines += _if_call(_PRCTL[column], [*check, _pack(_RETURN, _ALLOW)])
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


def _refuse(number: int | None) -> list[bytes]:
    return [] if number is None else _if_call(number, [_error(EPERM)])


def _if_call(number: int, lines: list[bytes]) -> list[bytes]:
    """Lines for one call; they must return."""
    return [_pack(_EQUAL, number, 0, len(lines)), *lines]


def _allow_arguments(number: int | None, index: int, allowed: tuple[int, ...]) -> list[bytes]:
    """Refuse a call unless its argument `index`, of 32 bits, is one of `allowed`."""
    if number is None:
        return []
    n = len(allowed)
    tests = [_pack(_EQUAL, value, n - i, 0) for i, value in enumerate(allowed)]
    return _if_call(
        number,
        [_pack(_LOAD, 16 + 8 * index), *tests, _error(EPERM), _pack(_RETURN, _ALLOW)],
    )
