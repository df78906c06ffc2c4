# SPDX-License-Identifier: Apache-2.0
"""Attacks by what the kernel keeps for a program, or shares between programs.

Leases, signals, attributes, timers, input and output, keys, pipes, locks, and memory that no limit
of a process counts. Some take hold of the files of the interpreter, so run_attacks.py gives them
one of their own.
"""

from tests.jaxmoe.sandbox.attacks import Attack, both

KERNEL_PRELUDE = """
import signal, socket, struct
signal.signal(signal.SIGIO, signal.SIG_IGN)
LIBRARY = os.path.dirname(os.__file__)
def command(file, number, argument=0):
    'True if fcntl accepts a command.'
    fcntl.fcntl(file, number, argument)
    return True
def is_done(x86, arm, *arguments):
    'True if the kernel looks at a wrong descriptor, and no filter answers that all is well.'
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(arm if ARM else x86), -1, *arguments)
    return result < 0 and ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)
def is_locked(path):
    'True if a lock of this process is seen through another description of the file.'
    with open(path, 'rb') as other:
        asked = struct.pack('hhqqixxxx', fcntl.F_WRLCK, 0, 0, 0, 0)
        answer = fcntl.fcntl(other, 36, asked)
    return struct.unpack('hhqqixxxx', answer)[0] != fcntl.F_UNLCK
def list_descriptors():
    found = set()
    for x in range(64):
        try: os.fstat(x); found.add(x)
        except OSError: pass
    return found
def clean():
    'Remove what an attack left, so that the next one fails for no want of descriptors or space.'
    for name in globals().keys() - NAMES: del globals()[name]
    for x in list_descriptors() - DESCRIPTORS: os.close(x)
    for name in os.listdir('.') if os.path.isdir('/sandbox') else ():
        os.rmdir(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)
DESCRIPTORS, NAMES = list_descriptors(), {'DESCRIPTORS', 'NAMES', *globals()}
"""

_LEAVE = "an administrator must have allowed it to the user of the trainer"
_NO_FILES = "nothing can be written there at all"
_PIPE = "r, w = os.pipe()\n"
_PAIR = "a, b = socket.socketpair()\n"
# What the trainer gets if they work: run_attacks.py waits for this signal.
_SEND = "fcntl.fcntl(r, 10, signal.SIGWINCH)\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\n"
_SEND += "os.write(w, b'x')\nprint('sent')"

KERNEL_ATTACKS = [
    # leases: whoever opens the file waits for 45 seconds
    Attack(
        "write lease on the interpreter",
        "f = os.open(LIBRARY + '/this.py', 0); taken(command(f, 1024, fcntl.F_WRLCK))",
        *both("file_commands"),
    ),
    Attack(
        "read lease on the interpreter",
        "f = os.open(LIBRARY + '/wave.py', 0); taken(command(f, 1024, fcntl.F_RDLCK))",
        *both("file_commands"),
    ),
    Attack(
        "leases on what the next interpreter opens",
        """
names = ('ast', 'struct', 'token', 'heapq', 'keyword')
files = [os.open(f'{LIBRARY}/{name}.py', 0) for name in names]
taken(all(command(f, 1024, fcntl.F_WRLCK) for f in files))
""",
        *both("file_commands"),
    ),
    Attack(
        "lease on an extension module",
        """
folder = LIBRARY + '/lib-dynload/'
f = os.open(folder + sorted(os.listdir(folder))[0], 0); taken(command(f, 1024, fcntl.F_WRLCK))
""",
        *both("file_commands"),
    ),
    Attack(
        "lease by a system call of its own",
        "f = os.open(LIBRARY + '/chunk.py', 0) if"
        " os.path.exists(LIBRARY + '/chunk.py') else os.open(LIBRARY + '/cmd.py', 0);"
        " taken(libc.syscall(25 if ARM else 72, f, 1024, 1) == 0)",
        *both("file_commands"),
    ),
    Attack(
        "lease with high bits in the command",
        "f = os.open(LIBRARY + '/cmd.py', 0);"
        " taken(libc.syscall(25 if ARM else 72, f, ctypes.c_long((7 << 32) | 1024), 1) == 0)",
        *both("file_commands"),
    ),
    Attack(
        "lease on a file of its own",
        "f = open('leased', 'w'); taken(command(f, 1024, fcntl.F_WRLCK))",
        ("file_commands",),
        _NO_FILES,
    ),
    # signals that the kernel sends for a program
    Attack(
        "signal the trainer by a pipe",
        f"{_PIPE}command(r, fcntl.F_SETOWN, HOST_PID)\n{_SEND}",
        ("file_commands", "pid_namespace"),
        ("file_commands", "landlock", "capabilities"),
    ),
    Attack(
        "signal a thread of the trainer by a pipe",
        f"{_PIPE}command(r, 15, struct.pack('ii', 0, HOST_PID))\n{_SEND}",
        ("file_commands", "pid_namespace"),
        ("file_commands", "landlock", "capabilities"),
    ),
    Attack(
        "signal the trainer by a socket",
        f"""{_PAIR}
fcntl.ioctl(a, 0x8901, struct.pack('i', HOST_PID)); fcntl.fcntl(a, 10, signal.SIGWINCH)
fcntl.ioctl(a, 0x5452, struct.pack('i', 1)); b.send(b'x'); print('sent')
""",
        ("file_commands", "device_commands", "pid_namespace"),
        ("file_commands", "device_commands", "landlock", "capabilities"),
    ),
    Attack(
        "owner of a pipe's signals",
        f"{_PIPE}taken(command(r, fcntl.F_SETOWN, os.getpid()))",
        *both("file_commands"),
    ),
    Attack(
        "owner by a structure",
        f"{_PIPE}taken(command(r, 15, struct.pack('ii', 1, 1)))",
        ("file_commands",),
        ("file_commands",),
    ),
    Attack(
        "group that a pipe signals",
        f"{_PIPE}taken(command(r, fcntl.F_SETOWN, -os.getpgrp()))",
        ("file_commands",),
        ("file_commands",),
    ),
    Attack(
        "signal of a pipe", f"{_PIPE}taken(command(r, 10, signal.SIGUSR1))", *both("file_commands")
    ),
    Attack(
        "owner of a socket's signals",
        f"{_PAIR}fcntl.ioctl(a, 0x8901, struct.pack('i', os.getpid())); taken()",
        *both("device_commands"),
    ),
    Attack(
        "group of a socket",
        f"{_PAIR}fcntl.ioctl(a, 0x8902, struct.pack('i', os.getpid())); taken()",
        *both("device_commands"),
    ),
    Attack(
        "signals of a socket",
        f"{_PAIR}fcntl.ioctl(a, 0x5452, struct.pack('i', 1)); taken()",
        *both("device_commands"),
    ),
    Attack("queue a signal", "taken(reached(129, 138, HOST_PID, 0, BAD))", *both("signals")),
    Attack(
        "queue a signal for a thread",
        "taken(reached(297, 240, HOST_PID, HOST_PID, 0, BAD))",
        *both("signals"),
    ),
    Attack("signal by a descriptor", "taken(reached(424, 424, -1, 0, None, 0))", *both("signals")),
    # changes of folders
    Attack(
        "watch a folder of the interpreter",
        "f = os.open(LIBRARY + '/email', os.O_RDONLY);"
        " taken(command(f, fcntl.F_NOTIFY, fcntl.DN_ACCESS))",
        *both("file_commands"),
    ),
    Attack(
        "watch a folder for ever",
        "f = os.open(LIBRARY + '/json', os.O_RDONLY);"
        " taken(command(f, fcntl.F_NOTIFY, fcntl.DN_MULTISHOT | fcntl.DN_ACCESS))",
        *both("file_commands"),
    ),
    Attack(
        "watch its own folder",
        "f = os.open('.', os.O_RDONLY); taken(command(f, fcntl.F_NOTIFY, fcntl.DN_CREATE))",
        ("file_commands",),
        _NO_FILES,
    ),
    Attack("watch a file system", "taken(reached(300, 262, 0x200, 0))", *both("mounts")),
    # extended attributes, and where links lead
    Attack(
        "attribute of a file of its own",
        "open('x', 'w').close(); os.setxattr('x', 'user.a', b'1'); taken()",
        ("extended_attributes",),
        _NO_FILES,
    ),
    Attack(
        "memory by attributes",
        """
for i in range(16):
    open(f'x{i}', 'w').close()
    for j in range(16): os.setxattr(f'x{i}', f'user.a{j}', bytes(60000))
taken()
""",
        ("extended_attributes", "files"),
        _NO_FILES,
    ),
    Attack(
        "attribute by a descriptor",
        "f = os.open('x3', os.O_CREAT | os.O_RDWR); os.setxattr(f, 'user.b', b'1'); taken()",
        ("extended_attributes",),
        _NO_FILES,
    ),
    Attack(
        "attribute of the interpreter",
        "p = LIBRARY + '/cmd.py';"
        " os.setxattr(p, 'user.a', b'1'); taken(); os.removexattr(p, 'user.a')",
        ("extended_attributes", "read_only"),
        ("extended_attributes",),
    ),
    Attack(
        "attribute of the interpreter by a descriptor",
        "f = os.open(LIBRARY + '/cmd.py', 0);"
        " os.setxattr(f, 'user.a', b'1'); taken(); os.removexattr(f, 'user.a')",
        ("extended_attributes", "read_only"),
        ("extended_attributes",),
    ),
    Attack(
        "read an attribute of the stored answers",
        "taken(b'GOLD' in os.getxattr(ROOT + 'GOLD_FILE', 'user.answer'))",
        ("private_root", "extended_attributes"),
        ("extended_attributes",),
    ),
    Attack(
        "list the attributes of the stored answers",
        "taken('user.answer' in os.listxattr(ROOT + 'GOLD_FILE'))",
        ("private_root", "extended_attributes"),
        ("extended_attributes",),
    ),
    Attack(
        "change an attribute of the stored answers",
        "os.setxattr(ROOT + 'GOLD_FILE', 'user.other', b'1'); taken()",
        ("private_root", "extended_attributes"),
        ("extended_attributes",),
    ),
    Attack(
        "read where a link leads",
        "taken('GOLD' in os.readlink(ROOT + 'FOLDER/pointer'))",
        ("private_root",),
        ("links",),
    ),
    Attack(
        "read where a link below a folder leads",
        "taken('GOLD' in os.readlink('pointer', dir_fd=os.open(ROOT + 'FOLDER', os.O_PATH)))",
        ("private_root",),
        ("links",),
    ),
    Attack(
        "path of the interpreter on the machine",
        "taken(os.readlink('/proc/self/exe'))",
        ("no_proc",),
        ("links",),
    ),
    # timers and queues that are counted for a user
    Attack(
        "timer",
        "taken(libc.syscall(107 if ARM else 222, 1, None, ctypes.byref(ctypes.c_int())) == 0)",
        *both("timers"),
    ),
    Attack(
        "many timers",
        """
x = ctypes.c_int()
made = [libc.syscall(107 if ARM else 222, 1, None, ctypes.byref(x)) for _ in range(500)]
taken(made.count(0) == 500)
""",
        *both("timers", "pending_signals"),
    ),
    Attack(
        "many signals that wait",
        """
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
sent = [libc.syscall(138 if ARM else 129, os.getpid(), 40,
        ctypes.create_string_buffer(struct.pack('iii', 40, 0, -1), 128)) for _ in range(200)]
taken(sent.count(0) == 200)
""",
        *both("pending_signals"),
    ),
    # input, output and processors of the whole machine
    Attack(
        "asynchronous input and output",
        "x = ctypes.c_ulong();"
        " taken(libc.syscall(0 if ARM else 206, 1, ctypes.byref(x)) == 0);"
        " libc.syscall(1 if ARM else 207, x)",
        *both("asynchronous_io"),
    ),
    Attack(
        "submit input and output", "taken(reached(209, 2, 0, 1, BAD))", *both("asynchronous_io")
    ),
    Attack("write the disks out by a file", "taken(is_done(74, 82))", *both("flushes")),
    Attack("write the data of a file out", "taken(is_done(75, 83))", *both("flushes")),
    Attack("write a file system out", "taken(is_done(306, 267))", *both("flushes")),
    Attack("write a part of a file out", "taken(is_done(277, 84, 0, 0, 7))", *both("flushes")),
    Attack(
        "drop a file of the interpreter from memory",
        "taken(is_done(221, 223, 0, 0, 4))",
        *both("advice"),
    ),
    Attack(
        "read a file of the interpreter ahead", "taken(is_done(187, 213, 0, 1))", *both("advice")
    ),
    Attack(
        "priority of its input and output", "taken(reached(251, 30, 99, 0, 0))", *both("priorities")
    ),
    Attack(
        "a processor for itself",
        "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1));"
        " taken(); os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))",
        _LEAVE,
        _LEAVE,
    ),
    Attack(
        "a higher priority",
        """
x = ctypes.create_string_buffer(struct.pack('IIQiI', 48, 0, 0, -5, 0), 48)
taken(libc.syscall(274 if ARM else 314, 0, x, 0) == 0)
""",
        _LEAVE,
        _LEAVE,
    ),
    Attack(
        "a program that collects its core",
        "taken(resource.getrlimit(resource.RLIMIT_CORE)[0] != 1)",
        *both("core_dumps"),
    ),
    # keys
    Attack("a session of keys", "taken(reached(250, 219, 1, BAD))", *both("kernel")),
    Attack("keys that stay", "taken(reached(250, 219, 22, -1, -2))", *both("kernel")),
    Attack(
        "memory by keys",
        "taken(libc.syscall(217 if ARM else 248, b'user', b'x', bytes(9999), 9999, -2) >= 0)",
        *both("kernel"),
    ),
    Attack("ask for a key", "taken(reached(249, 218, BAD, None, None, 0))", *both("kernel")),
    # pipes and sockets
    Attack("enlarge a pipe", f"{_PIPE}taken(command(w, 1031, 1 << 20))", *both("file_commands")),
    Attack(
        "enlarge a pipe of the trainer",
        """
pipes = [x for x in range(3, 9) if os.path.exists('/dev/null') and not os.isatty(x)]
for x in pipes:
    try:
        if stat.S_ISFIFO(os.fstat(x).st_mode): taken(command(x, 1031, 1 << 18))
    except OSError: pass
""",
        *both("file_commands"),
    ),
    Attack(
        "pages kept in a pipe",
        f"""{_PIPE}
x = ctypes.create_string_buffer(4096); y = struct.pack('PN', ctypes.addressof(x), 4096)
taken(libc.syscall(75 if ARM else 278, w, ctypes.c_char_p(y), ctypes.c_ulong(1), 0) == 4096)
""",
        *both("pipes"),
    ),
    Attack("from pipe to pipe", "taken(is_done(275, 76, None, -1, None, 1, 0))", *both("pipes")),
    Attack("a copy of a pipe", "taken(is_done(276, 77, -1, 1, 0))", *both("pipes")),
    Attack(
        "descriptors on their way",
        f"{_PAIR}socket.send_fds(a, [b'x'], [a.fileno()] * 250); taken()",
        *both("sockets"),
    ),
    Attack("many messages at once", "taken(is_done(307, 269, BAD, 1, 0))", *both("sockets")),
    Attack("enlarge a socket", f"{_PAIR}a.setsockopt(1, 7, 1 << 20); taken()", *both("sockets")),
    Attack(
        "a family of sockets that loads a module",
        "taken(reached(53, 199, 30, 1, 0, BAD))",
        *both("sockets"),
    ),
    # locks
    Attack(
        "lock the interpreter",
        "f = open(LIBRARY + '/cmd.py', 'rb'); fcntl.lockf(f,"
        " fcntl.LOCK_SH); taken(is_locked(LIBRARY + '/cmd.py'))",
        *both("file_commands"),
    ),
    Attack(
        "lock the interpreter, and wait",
        "f = open(LIBRARY + '/cmd.py', 'rb');"
        " fcntl.fcntl(f, 7, struct.pack('hhqqixxxx', 0, 0, 0, 0, 0));"
        " taken(is_locked(LIBRARY + '/cmd.py'))",
        *both("file_commands"),
    ),
    Attack(
        "lock by a description",
        "f = open(LIBRARY + '/cmd.py', 'rb');"
        " taken(command(f, 37, struct.pack('hhqqixxxx', 0, 0, 0, 0, 0)))",
        *both("file_commands"),
    ),
    Attack(
        "lock a whole file of the interpreter",
        "f = open(os.__file__); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); taken()",
        *both("locks"),
    ),
    Attack(
        "lock a device",
        "f = open('/dev/null'); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); taken()",
        *both("locks"),
    ),
    Attack(
        "memory by locks",
        """
f = open('locked', 'w')
for i in range(3000): fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * (3000 - i))
taken(is_locked('locked'))
""",
        ("file_commands",),
        _NO_FILES,
    ),
    # memory that no limit of a process counts
    Attack(
        "many empty files",
        "for i in range(12_000): open(f'e{i}', 'w').close()\ntaken()",
        ("files",),
        _NO_FILES,
    ),
    Attack(
        "many links",
        "for i in range(12_000): os.symlink('x' * 100, f'l{i}')\ntaken()",
        ("files",),
        _NO_FILES,
    ),
    Attack(
        "many names of a file",
        "open('one', 'w').close()\nfor i in range(12_000): os.link('one', f'n{i}')\ntaken()",
        ("files",),
        _NO_FILES,
    ),
    Attack(
        "many folders", "for i in range(12_000): os.mkdir(f'd{i}')\ntaken()", ("files",), _NO_FILES
    ),
    Attack(
        "rules of Landlock",
        "x = ctypes.c_ulong(1); taken(libc.syscall(444, ctypes.byref(x), 8, 0) >= 0)",
        *both("kernel"),
    ),
    Attack("a rule of Landlock", "taken(is_done(445, 445, 1, BAD, 0))", *both("kernel")),
    Attack("filters of system calls", "taken(reached(317, 277, 1, 0, BAD))", *both("kernel")),
    Attack("filters by prctl", "taken(reached(157, 167, 22, 2, BAD))", *both("kernel")),
    Attack(
        "huge pages of the machine",
        "taken(reached(9, 222, None, 2 << 20, 3, 0x40022, -1, 0))",
        *both("huge_pages"),
    ),
    Attack("secret memory", "taken(reached(447, 447, 99))", *both("shared_memory")),
    Attack(
        "queue of messages", "taken(reached(240, 180, BAD, 0, 0, None))", *both("shared_memory")
    ),
    Attack(
        "locked memory by another call",
        """
x = mmap.mmap(-1, 4096)
y = ctypes.addressof(ctypes.c_char.from_buffer(x))
taken(libc.syscall(284 if ARM else 325, ctypes.c_void_p(y), 4096, 1) == 0)
""",
        *both("locked_memory"),
    ),
    Attack(
        "memory that is locked from the start",
        "mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x2000); taken()",
        *both("locked_memory"),
    ),
    # what other processes have in memory
    Attack(
        "pages that others read", "taken(reached(27, 232, BAD, 4096, BAD))", *both("page_cache")
    ),
    Attack(
        "pages of a file that others read",
        "taken(is_done(451, 451, BAD, BAD, 0))",
        *both("page_cache"),
    ),
    Attack(
        "pages that are equal to others'",
        "taken(reached(28, 233, None, 4096, 12))",
        *both("page_cache"),
    ),
    Attack(
        "take the interpreter out of memory",
        "taken(reached(28, 233, None, 4096, 21))",
        *both("page_cache"),
    ),
    Attack(
        "flags of a file of the interpreter",
        "x = ctypes.c_long();"
        " taken(libc.syscall(29 if ARM else 16, os.open(LIBRARY + '/cmd.py', 0),"
        " ctypes.c_ulong(0x80086601), ctypes.byref(x)) == 0)",
        *both("device_commands"),
    ),
    Attack(
        "lifetime of a file of the interpreter",
        "f = os.open(LIBRARY + '/cmd.py', 0); taken(command(f, 1036, struct.pack('Q', 1)))",
        *both("file_commands"),
    ),
]
