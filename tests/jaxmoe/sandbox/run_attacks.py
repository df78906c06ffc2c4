# SPDX-License-Identifier: Apache-2.0
"""A trainer that is attacked: `python -m tests.jaxmoe.sandbox.run_attacks KIND USER WHICH`.

It has a secret in its environment, in its arguments and in an open file; files, sockets and shared
memory that can be reached; and a Python of its own, which it owns, for its sandboxes: a lease on
another one would stop all who use it. WHICH is "contained"; "controls", then the measures that
stop an attack are left out; or "without_landlock". Prints {attack: what it printed}.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxmoe
from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.sandbox.bubblewrap import find_bubblewrap
from jaxmoe.sandbox.inside.limits import NOBODY
from jaxmoe.sandbox.interpreter import PACKAGE_FOLDERS, Interpreter, find_interpreter
from jaxmoe.sandbox.launch import Launcher
from tests.jaxmoe.sandbox.attacks import ATTACKS, PRELUDE, Attack
from tests.jaxmoe.sandbox.kernel_attacks import KERNEL_ATTACKS, KERNEL_PRELUDE

SECRET, ARGUMENT = "trainer-secret-8151", "argument-secret-2342"
_SHM_KEY = 0x5B0C5
ALL_ATTACKS = [*ATTACKS, *KERNEL_ATTACKS]
_UNUSED = (
    "test tests idlelib lib2to3 ensurepip tkinter config-* pydoc_data turtledemo distutils "
    "*.opt-?.pyc"
).split()
_libc = ctypes.CDLL(None, use_errno=True)
_signals: list[int] = []  # that reached the trainer


@contextmanager
def open_victim() -> Iterator[dict[str, str]]:
    """The belongings of the trainer, by the word that stands for each in an attack."""
    base = Path(tempfile.mkdtemp(prefix="attacked-"))
    base.chmod(0o777)
    for name in ("gold.txt", "b"):
        (base / name).write_text("GOLD")
        (base / name).chmod(0o666)
    os.setxattr(base / "gold.txt", "user.answer", b"GOLD")
    (base / "pointer").symlink_to("GOLD")
    secret = tempfile.TemporaryFile()
    secret.write(SECRET.encode())
    secret.flush()
    os.set_inheritable(secret.fileno(), True)
    tcp = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(base / "socket"))
    abstract = socket.socket(socket.AF_UNIX)
    name = f"attacked-{os.getpid()}"
    abstract.bind("\0" + name)
    for listener in (unix, abstract):
        listener.listen(64)
    key = _SHM_KEY + os.getpid()
    memory = _libc.shmget(key, 4096, 0o1666)
    try:
        yield {
            "GOLD_FILE": str(base / "gold.txt"),
            "FOLDER": str(base),
            "BASE": base.name,
            "SOCKET": str(base / "socket"),
            "ABSTRACT": name,
            "PORT": str(tcp.getsockname()[1]),
            "HOST_PID": str(os.getpid()),
            "SHM_KEY": str(key),
            "SECRET": SECRET,
            "ARGUMENT": ARGUMENT,
            "CODE_FILE": jaxmoe.__file__,
        }
    finally:
        _libc.shmctl(memory, 0, None)
        for file in (secret, tcp, unix, abstract):
            file.close()
        shutil.rmtree(base)


def fill_code(attack: Attack, victim: dict[str, str]) -> str:
    """The program of an attack with the trainer's values in it."""
    code = attack.code
    for word in sorted(victim, key=len, reverse=True):
        code = code.replace(word, victim[word])
    return code


@contextmanager
def copy_interpreter() -> Iterator[Interpreter]:
    """A copy of the interpreter, which belongs to this user and is closed to all others."""
    source = find_interpreter()
    assert source is not None
    folder = Path(tempfile.mkdtemp(prefix="attacked-python-"))
    copy = Interpreter(folder, folder / "bin" / source.executable.name, source.version)
    ignored = shutil.ignore_patterns(*PACKAGE_FOLDERS, *_UNUSED)
    try:
        shutil.copytree(source.standard_library, copy.standard_library, True, ignored)
        for path in [source.executable, *source.prefix.glob("lib/libpython*.so*")]:
            target = folder / path.relative_to(source.prefix)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target, follow_symlinks=False)
        yield copy
    finally:
        shutil.rmtree(folder)


class Runner:
    """Runs attacks in a sandbox that is started again when an attack ends it."""

    def __init__(self, kind: str, python: Interpreter, removed: frozenset[str]) -> None:
        config = SandboxConfig(disk_mb=8, memory_mb=512, call_s=20.0)
        self._launcher = Launcher(kind, config, removed)
        vars(self._launcher)["interpreter"] = python  # what it would find by itself
        self._sandbox = None

    def run(self, code: str) -> str:
        if self._sandbox is None:
            self._sandbox = self._launcher.start()
            self._sandbox.wait_ready()
            prepared = self._sandbox.run(PRELUDE + KERNEL_PRELUDE, 20.0)
            assert prepared.output == "", prepared
        cleaned = self._sandbox.run("clean()", 20.0)
        assert cleaned.output == "", cleaned
        result = self._sandbox.run(code, 20.0)
        if not result.is_alive:
            self.close()
        if "sent" in result.output:  # on a busy machine a signal may come after the answer
            deadline = time.monotonic() + 0.2
            while not _signals and time.monotonic() < deadline:
                time.sleep(0.01)
        if _signals:
            _signals.clear()
            return "TAKEN: a signal reached the trainer"
        return result.output or result.status.value

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.kill()
            self._sandbox = None


def run_contained(
    kind: str, python: Interpreter, victim: dict[str, str], removed: frozenset[str]
) -> dict[str, str]:
    runner = Runner(kind, python, removed)
    outputs = {attack.name: runner.run(fill_code(attack, victim)) for attack in ALL_ATTACKS}
    runner.close()
    return outputs


def run_controls(
    kind: str, python: Interpreter, victim: dict[str, str], user: str
) -> dict[str, str]:
    """The outputs without the measures that stop each attack."""
    outputs = {}
    groups: dict[frozenset[str], list[Attack]] = {}
    for attack in ALL_ATTACKS:
        stops = getattr(attack, kind)
        if not isinstance(stops, str) and user in attack.control_as.split():
            groups.setdefault(frozenset(stops), []).append(attack)
    for removed, attacks in groups.items():
        runner = Runner(kind, python, removed)
        for attack in attacks:
            outputs[attack.name] = runner.run(fill_code(attack, victim))
        runner.close()
    return outputs


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    _libc.prctl(4, 1, 0, 0, 0)  # dumpable again, as a process that nobody started is


def main() -> None:
    kind, user, selected, _ = sys.argv[1:]
    os.environ["SECRET_KEY"] = SECRET
    _libc.setenv(b"SECRET_KEY", SECRET.encode(), 1)
    find_bubblewrap()  # imports what nobody may be unable to read
    if user == "nobody":
        become_nobody()
    with open_victim() as victim, copy_interpreter() as python:
        if selected == "controls":
            outputs = run_controls(kind, python, victim, "nobody" if os.getuid() else "root")
        else:
            removed = frozenset({"landlock"} if selected == "without_landlock" else ())
            outputs = run_contained(kind, python, victim, removed)
    print(json.dumps(outputs))


if __name__ == "__main__":
    signal.signal(signal.SIGWINCH, lambda number, _: _signals.append(number))
    thread = threading.Thread(target=main)  # the sandboxes live as long as this thread
    thread.start()
    while thread.is_alive():  # signals are handled here
        thread.join(0.05)
