# SPDX-License-Identifier: Apache-2.0
"""Attacks on a sandbox: programs that print TAKEN if they get what a sandbox must not give.

Each names the measures that stop it, for bubblewrap and for Landlock. Without them it succeeds,
which a control shows; where no control can be made, the reason stands in their place. Capitals
in a program are values of the trainer that is attacked, filled in by run_attacks.py.
"""

from dataclasses import dataclass

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, resource, socket, stat, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ROOT = '/host' if os.path.isdir('/host') else ''
BAD = ctypes.c_void_p(1)
ARM = os.uname().machine == 'aarch64'
def taken(is_taken=True):
    print('TAKEN' if is_taken else 'refused')
def reached(x86, arm, *arguments):
    'True if a system call is answered by the kernel, and not by a filter.'
    ctypes.set_errno(0)
    number = arm if ARM else x86
    if number is None:
        return False
    result = libc.syscall(ctypes.c_long(number), *arguments)
    return result >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS)
"""

Stops = tuple[str, ...] | str  # names of measures, or why there is no control


@dataclass(frozen=True)
class Attack:
    """A program, and what stops it with each kind of sandbox."""

    name: str
    code: str
    bubblewrap: Stops
    landlock: Stops
    control_as: str = "root nobody"  # users of the trainer whose control succeeds


FILES = ("private_root",), ("landlock",)
USERNS = "the user namespace stops it too, and nothing can be started without that"
KERNEL = "the kernel refuses it to all but the administrator too"


def both(*measures: str) -> tuple[Stops, Stops]:
    return measures, measures


ATTACKS = [
    # what the trainer knows: environment, arguments, descriptors
    Attack(
        "own environment", "taken('SECRET' in str(dict(os.environ)))", *both("empty_environment")
    ),
    Attack(
        "environment of process 1",
        "taken('SECRET' in open('/proc/1/environ').read())",
        ("no_proc", "empty_environment"),
        "process 1 is the machine's, and not the trainer's",
    ),
    Attack(
        "environment of the trainer",
        "taken('SECRET' in open(ROOT + '/proc/HOST_PID/environ').read())",
        USERNS,
        ("landlock", "capabilities"),
    ),
    Attack(
        "arguments of the trainer",
        "taken('ARGUMENT' in open(ROOT + '/proc/HOST_PID/cmdline').read())",
        *FILES,
    ),
    Attack("list of processes", "taken('HOST_PID' in os.listdir(ROOT + '/proc'))", *FILES),
    Attack(
        "inherited descriptors",
        """
for descriptor in range(3, 300):
    try:
        if b'SECRET' in os.pread(descriptor, 100, 0): taken()
    except OSError: pass
""",
        *both("closed_descriptors"),
    ),
    Attack(
        "memory of the trainer",
        "open(ROOT + '/proc/HOST_PID/mem', 'rb'); taken()",
        USERNS,
        ("landlock", "capabilities"),
    ),
    Attack(
        "descriptors of the trainer",
        "taken(os.listdir(ROOT + '/proc/HOST_PID/fd'))",
        USERNS,
        ("landlock", "capabilities"),
    ),
    # files
    Attack("read the stored answers", "taken('GOLD' in open(ROOT + 'GOLD_FILE').read())", *FILES),
    Attack("change the stored answers", "open(ROOT + 'GOLD_FILE', 'a').close(); taken()", *FILES),
    Attack(
        "truncate the stored answers",
        "p = ROOT + 'GOLD_FILE'; os.truncate(p, os.path.getsize(p)); taken()",
        *FILES,
    ),
    Attack(
        "change permissions",
        "os.chmod(ROOT + 'GOLD_FILE', 0o666); taken()",
        ("private_root",),
        ("attributes",),
    ),
    Attack(
        "change times", "os.utime(ROOT + 'GOLD_FILE'); taken()", ("private_root",), ("attributes",)
    ),
    Attack(
        "link to the stored answers",
        "p = ROOT + 'FOLDER/link'; os.link(ROOT + 'GOLD_FILE', p); taken(); os.unlink(p)",
        *FILES,
    ),
    Attack(
        "rename a file",
        "p = ROOT + 'FOLDER/'; os.rename(p + 'b', p + 'c'); taken(); os.rename(p + 'c', p + 'b')",
        *FILES,
    ),
    Attack(
        "read through a symbolic link",
        """
p = ROOT + 'FOLDER/soft' if ROOT else '/tmp/soft'
try: os.unlink(p)
except OSError: pass
os.symlink(ROOT + 'GOLD_FILE', p)
try: taken('GOLD' in open(p).read())
finally: os.unlink(p)
""",
        *FILES,
    ),
    Attack(
        "read through a descriptor of a folder",
        "f = os.open(ROOT + 'FOLDER', os.O_RDONLY); os.open('gold.txt', 0, dir_fd=f); taken()",
        *FILES,
    ),
    Attack(
        "create a file",
        "p = ROOT + 'FOLDER/new'; open(p, 'x').close(); taken(); os.unlink(p)",
        *FILES,
    ),
    Attack("create a folder", "p = ROOT + 'FOLDER/dir'; os.mkdir(p); taken(); os.rmdir(p)", *FILES),
    Attack(
        "create a named pipe",
        "p = ROOT + 'FOLDER/fifo'; os.mkfifo(p); taken(); os.unlink(p)",
        ("private_root", "mounts"),
        ("landlock", "mounts"),
    ),
    Attack(
        "list a folder of the trainer", "taken('gold.txt' in os.listdir(ROOT + 'FOLDER'))", *FILES
    ),
    Attack("list the temporary folder", "taken('BASE' in os.listdir(ROOT + '/tmp'))", *FILES),
    Attack("read the accounts", "open(ROOT + '/etc/passwd').read(); taken()", *FILES),
    Attack("read the trainer's code", "open(ROOT + 'CODE_FILE').read(); taken()", *FILES),
    Attack(
        "read installed packages",
        """
for folder in (os.path.dirname(os.__file__) + '/site-packages', '/usr/lib/python3/dist-packages'):
    if os.path.isdir(folder) and os.listdir(folder): taken()
""",
        "no package need be installed for the interpreter itself",
        ("landlock",),
    ),
    Attack(
        "write into the interpreter",
        "open(os.__file__, 'r+').close(); taken()",
        ("read_only",),
        ("landlock",),
        control_as="root",
    ),
    Attack(
        "write outside the work folder",
        "open('/dev/x', 'x').close(); taken(); os.unlink('/dev/x')",
        ("read_only",),
        ("landlock",),
        control_as="root",
    ),
    Attack(
        "write to a device",
        "taken(set(os.listdir(ROOT + '/dev')) - {'null', 'zero', 'random', 'urandom', 'shm'})",
        *FILES,
    ),
    Attack(
        "open a terminal",
        "os.close(os.open(ROOT + '/dev/ptmx', os.O_RDWR)); taken()",
        "devices of a folder that is mounted cannot be opened either",
        ("landlock",),
    ),
    Attack("read the kernel's settings", "os.listdir(ROOT + '/sys/kernel'); taken()", *FILES),
    Attack(
        "watch files of the trainer",
        "n = libc.inotify_init(); taken(n >= 0 and libc.inotify_add_watch(n, (ROOT +"
        " 'GOLD_FILE').encode(), 2) >= 0)",
        ("mounts", "private_root"),
        ("mounts",),
    ),
    Attack(
        "a file by its handle", "taken(reached(303, 264, -100, b'/', BAD, BAD, 0))", *both("mounts")
    ),
    # processes
    Attack(
        "fork",
        "p = os.fork()\nif not p: os._exit(0)\nos.waitpid(p, 0); taken()",
        *both("processes"),
    ),
    Attack(
        "run a program",
        """
try: os.execv('/none', ['none'])
except FileNotFoundError: taken()
except OSError as error: taken(error.errno == errno.EACCES)
""",
        *both("processes"),
    ),
    Attack(
        "run a program by a descriptor",
        "taken(reached(322, 281, -1, b'', None, None, 0x1000))",
        *both("processes"),
    ),
    Attack(
        "subprocess",
        """
import subprocess
try: subprocess.run(['/none']); taken()
except FileNotFoundError: taken()
""",
        *both("processes"),
    ),
    Attack(
        "posix_spawn",
        """
try: os.posix_spawn('/none', ['none'], {}); taken()
except FileNotFoundError: taken()
""",
        *both("processes"),
    ),
    Attack("clone3", "taken(reached(435, 435, None, 0))", *both("processes")),
    Attack(
        "fork bomb",
        """
children = []
for _ in range(24):
    p = os.fork()
    if not p: time.sleep(0.3); os._exit(0)
    children.append(p)
for p in children: os.waitpid(p, 0)
taken()
""",
        ("processes", "tasks"),
        ("processes",),
    ),
    Attack(
        "thread bomb",
        """
threading.stack_size(65536)
end = threading.Event()
threads = []
try:
    for _ in range(40):
        thread = threading.Thread(target=end.wait); thread.start(); threads.append(thread)
    taken()
finally:
    end.set()
    for thread in threads: thread.join()
""",
        ("tasks", "threads"),
        ("threads",),
    ),
    Attack("user namespace", "taken(libc.unshare(0x10000000) == 0)", *both("namespaces")),
    Attack("enter a namespace", "taken(reached(308, 268, -1, 0))", *both("namespaces")),
    Attack("fixed addresses", "taken(libc.personality(0xffffffff) >= 0)", *both("namespaces")),
    # other processes
    Attack(
        "signal the trainer",
        "os.kill(HOST_PID, 0); taken()",
        ("pid_namespace", "signals"),
        ("signals", "landlock", "capabilities"),
    ),
    Attack(
        "signal a thread of the trainer",
        "taken(libc.syscall(131 if ARM else 234, HOST_PID, HOST_PID, 0) == 0)",
        ("pid_namespace", "signals"),
        ("signals", "landlock", "capabilities"),
    ),
    Attack(
        "signal all processes",
        "os.kill(-1, 0); taken()",
        ("pid_namespace", "signals"),
        ("signals", "landlock", "capabilities"),
    ),
    Attack(
        "limits of the trainer",
        "taken(resource.prlimit(HOST_PID, resource.RLIMIT_NOFILE))",
        ("pid_namespace", "priorities"),
        ("priorities", "capabilities"),
    ),
    Attack(
        "processors of the trainer",
        "os.sched_setaffinity(HOST_PID, os.sched_getaffinity(HOST_PID)); taken()",
        ("pid_namespace", "priorities"),
        ("priorities", "capabilities"),
        "nobody",
    ),
    Attack(
        "priority of the trainer",
        "os.setpriority(0, HOST_PID, os.getpriority(0, HOST_PID)); taken()",
        ("pid_namespace", "priorities"),
        ("priorities", "capabilities"),
        "nobody",
    ),
    Attack("survive the trainer", "taken(libc.prctl(1, 0, 0, 0, 0) == 0)", *both("death_signal")),
    Attack("trace", "taken(reached(101, 117, 99, 0, None, None))", *both("tracing")),
    Attack(
        "read a process's memory",
        "taken(reached(310, 270, os.getpid(), None, 0, None, 0, 0))",
        *both("tracing"),
    ),
    Attack("hold a process", "taken(reached(434, 434, os.getpid(), 0))", *both("tracing")),
    Attack(
        "compare processes",
        "taken(reached(312, 272, os.getpid(), os.getpid(), 0, 0, 0))",
        *both("tracing"),
    ),
    Attack("catch page faults", "taken(reached(323, 282, 1))", *both("tracing")),
    # the kernel
    Attack("mount", "taken(reached(165, 40, None, BAD, None, 0, None))", *both("mounts")),
    Attack("unmount", "taken(reached(166, 39, BAD, 0))", *both("mounts")),
    Attack("change the root", "taken(reached(161, 51, BAD))", *both("mounts")),
    Attack("copy a mount", "taken(reached(428, 428, -1, BAD, 0))", *both("mounts")),
    Attack("keyring", "taken(reached(250, 219, 0, -3, 0))", *both("kernel")),
    Attack("add a key", "taken(reached(248, 217, BAD, None, None, 0, -3))", *both("kernel")),
    Attack("io_uring", "taken(reached(425, 425, 1, None))", *both("kernel")),
    Attack("bpf", "taken(reached(321, 280, 99, None, 0))", KERNEL, KERNEL),
    Attack("load a module", "taken(reached(175, 105, None, 0, b''))", KERNEL, KERNEL),
    Attack("restart", "taken(reached(169, 142, 0, 0, 0, None))", KERNEL, KERNEL),
    # network
    Attack("socket", "socket.socket(); taken()", *both("sockets")),
    Attack(
        "connect to the trainer",
        "socket.create_connection(('127.0.0.1', PORT), 1); taken()",
        ("sockets", "network_namespace"),
        ("sockets", "landlock"),
    ),
    Attack(
        "listen",
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); taken()",
        ("sockets",),
        ("sockets", "landlock"),
    ),
    Attack(
        "unix socket",
        "s = socket.socket(socket.AF_UNIX); s.connect(ROOT + 'SOCKET'); taken()",
        ("sockets", "private_root"),
        ("sockets",),
    ),
    Attack(
        "abstract socket",
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0ABSTRACT'); taken()",
        ("sockets", "network_namespace"),
        ("sockets", "landlock"),
    ),
    Attack(
        "datagram by a pair",
        "a, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); taken()",
        *both("sockets"),
    ),
    Attack(
        "netlink", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); taken()", *both("sockets")
    ),
    # memory that two processes share
    Attack(
        "shared memory",
        "n = libc.shmget(0, 4096, 0o1600); taken(n >= 0); libc.shmctl(n, 0, None)",
        *both("shared_memory"),
    ),
    Attack(
        "shared memory of the trainer",
        "taken(libc.shmget(SHM_KEY, 0, 0) >= 0)",
        ("shared_memory", "ipc_namespace"),
        ("shared_memory",),
    ),
    Attack(
        "semaphores",
        "n = libc.semget(0, 1, 0o1600); taken(n >= 0); libc.semctl(n, 0, 0)",
        *both("shared_memory"),
    ),
    Attack(
        "messages",
        "n = libc.msgget(0, 0o1600); taken(n >= 0); libc.msgctl(n, 0, None)",
        *both("shared_memory"),
    ),
    Attack("file in memory", "os.memfd_create('x'); taken()", *both("shared_memory")),
    # amounts
    Attack("memory", "x = bytearray(700 << 20); taken()", *both("memory")),
    Attack("mapped memory", "x = mmap.mmap(-1, 700 << 20); taken(); x.close()", *both("memory")),
    Attack(
        "memory by pieces",
        "x = []\nfor _ in range(70): x.append(bytearray(10 << 20))\ntaken()",
        *both("memory"),
    ),
    Attack(
        "many files",
        """
for i in range(4):
    with open(f'many{i}', 'wb') as file: file.write(bytes(4 << 20))
taken()
""",
        ("disk_quota",),
        "nothing can be written there at all",
    ),
    Attack(
        "large file",
        "f = open('large', 'wb'); f.truncate(100 << 20); taken()",
        ("file_size",),
        "nothing can be written there at all",
    ),
    Attack(
        "many descriptors",
        "x = [os.open('/dev/null', 0) for _ in range(200)]; taken()",
        *both("open_files"),
    ),
    Attack(
        "locked memory",
        """
x = mmap.mmap(-1, 1 << 20)
taken(libc.mlock(ctypes.byref(ctypes.c_char.from_buffer(x)), 1 << 20) == 0)
""",
        *both("locked_memory"),
    ),
    Attack(
        "raise the limits",
        """
for limit in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
    resource.setrlimit(limit, (resource.RLIM_INFINITY, 1 << 20))
taken()
""",
        USERNS,
        "a limit that was never set need not be raised",
    ),
    Attack(
        "capabilities",
        """
data = ctypes.create_string_buffer(24)
libc.capget(ctypes.c_char_p(bytes.fromhex('2205082000000000')), data)
taken(any(data.raw))
""",
        USERNS,
        ("capabilities",),
        control_as="root",
    ),
]
