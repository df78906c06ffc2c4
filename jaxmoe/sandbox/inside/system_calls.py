# SPDX-License-Identifier: Apache-2.0
"""Numbers of the system calls that a sandbox restricts, by group: those of Linux's tables.

Next: jaxmoe/sandbox/inside/seccomp.py makes a filter of them.
"""

# On x86_64 and on aarch64; None where the architecture has no such call.
Numbers = tuple[int | None, int | None]

REFUSED: dict[str, dict[str, Numbers]] = {
    "processes": {
        "fork": (57, None),
        "vfork": (58, None),
        "execve": (59, 221),
        "execveat": (322, 281),
    },
    "sockets": {
        "socket": (41, 198),
        "bind": (49, 200),
        "connect": (42, 203),
        "listen": (50, 201),
        "accept": (43, 202),
        "accept4": (288, 242),
        "setsockopt": (54, 208),
        # Messages may hold descriptors, which no limit counts while they are on their way.
        "sendmsg": (46, 211),
        "sendmmsg": (307, 269),
    },
    "namespaces": {
        "unshare": (272, 97),
        "setns": (308, 268),
        "personality": (135, 92),
    },
    "mounts": {
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
        "mknod": (133, None),
        "mknodat": (259, 33),
        "quotactl": (179, 60),
        "quotactl_fd": (443, 443),
        "fanotify_init": (300, 262),
        "inotify_init": (253, None),
        "inotify_init1": (294, 26),
        "swapon": (167, 224),
        "swapoff": (168, 225),
    },
    "tracing": {
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "kcmp": (312, 272),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "pidfd_open": (434, 434),
        "pidfd_getfd": (438, 438),
        "process_madvise": (440, 440),
        "process_mrelease": (448, 448),
        "get_robust_list": (274, 100),
        "move_pages": (279, 239),
        "migrate_pages": (256, 238),
        "lookup_dcookie": (212, 18),
    },
    "kernel": {
        "bpf": (321, 280),
        "keyctl": (250, 219),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "syslog": (103, 116),
        "acct": (163, 89),
        "reboot": (169, 142),
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "adjtimex": (159, 171),
        "clock_adjtime": (305, 266),
        "vhangup": (153, 58),
        "iopl": (172, None),
        "ioperm": (173, None),
        "modify_ldt": (154, None),
        "uselib": (134, None),
        "sysfs": (139, None),
        # Rules and filters are memory of the kernel that no limit counts.
        "landlock_create_ruleset": (444, 444),
        "landlock_add_rule": (445, 445),
        "landlock_restrict_self": (446, 446),
        "seccomp": (317, 277),
    },
    # Memory that no limit of a process counts, and that may be shared with another process.
    "shared_memory": {
        "shmget": (29, 194),
        "shmat": (30, 196),
        "shmctl": (31, 195),
        "semget": (64, 190),
        "msgget": (68, 186),
        "mq_open": (240, 180),
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
    },
    # They are counted for all processes of a user, or of the machine.
    "timers": {"timer_create": (222, 107)},
    "asynchronous_io": {"io_setup": (206, 0), "io_submit": (209, 2)},
    # A page in a pipe keeps the whole huge page that it belongs to.
    "pipes": {"vmsplice": (278, 75), "splice": (275, 76), "tee": (276, 77)},
    # They tell what other processes read.
    "page_cache": {"mincore": (27, 232), "cachestat": (451, 451)},
    # A lock on a file of the interpreter reaches all who use it.
    "locks": {"flock": (73, 32)},
    "priorities": {"setpriority": (141, 140), "ioprio_set": (251, 30)},
    # Landlock does not restrict these. In a mount namespace they reach the program's files alone.
    "attributes": {
        "chmod": (90, None),
        "fchmod": (91, 52),
        "fchmodat": (268, 53),
        "chown": (92, None),
        "fchown": (93, 55),
        "lchown": (94, None),
        "fchownat": (260, 54),
        "utime": (132, None),
        "utimes": (235, None),
        "futimesat": (261, None),
        "utimensat": (280, 88),
    },
    # Landlock restricts what a file holds, and not where a link leads.
    "links": {"readlink": (89, None), "readlinkat": (267, 78)},
}
# Refused as a file system does that has no extended attributes: nothing counts their memory.
UNSUPPORTED: dict[str, dict[str, Numbers]] = {
    "extended_attributes": {
        "setxattr": (188, 5),
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
        "getxattr": (191, 8),
        "lgetxattr": (192, 9),
        "fgetxattr": (193, 10),
        "listxattr": (194, 11),
        "llistxattr": (195, 12),
        "flistxattr": (196, 13),
        "removexattr": (197, 14),
        "lremovexattr": (198, 15),
        "fremovexattr": (199, 16),
    },
}
# Answered with success, and not done: a program's files are in memory and need no writing out, and
# advice need not be taken. For the files of the interpreter, all of the machine would wait.
IGNORED: dict[str, dict[str, Numbers]] = {
    "flushes": {
        "fsync": (74, 82),
        "fdatasync": (75, 83),
        "sync": (162, 81),
        "syncfs": (306, 267),
        "sync_file_range": (277, 84),
    },
    "advice": {"fadvise64": (221, 223), "readahead": (187, 213)},
}
# Calls whose first argument names a process: allowed for the caller's own process only.
PROCESS_CALLS: dict[str, dict[str, Numbers]] = {
    "signals": {
        "kill": (62, 129),
        "tkill": (200, 130),
        "tgkill": (234, 131),
        "rt_sigqueueinfo": (129, 138),
        "rt_tgsigqueueinfo": (297, 240),
    },
    "priorities": {
        "prlimit64": (302, 261),
        "sched_setparam": (142, 118),
        "sched_setscheduler": (144, 119),
        "sched_setaffinity": (203, 122),
        "sched_setattr": (314, 274),
    },
}
SENDS_TO_A_PIDFD: Numbers = (424, 424)

# Calls that are restricted by their arguments.
CLONE, CLONE3, PRCTL, SOCKETPAIR = (56, 220), (435, 435), (157, 167), (53, 199)
FCNTL, IOCTL, MMAP, MADVISE = (72, 25), (16, 29), (9, 222), (28, 233)
