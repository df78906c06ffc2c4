# SPDX-License-Identifier: Apache-2.0
"""A trainer that is attacked: `python -m tests.jaxmoe.envs.sandbox.run_attacks KIND USER WHICH`.

It has a secret in its environment, in its arguments and in an open file; files, sockets and shared
memory that can be reached; and runs every attack in sandboxes of its own. WHICH is "contained", or
"controls": then the measures that stop an attack are left out. Prints {attack: what it printed}.
"""

import ctypes
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxmoe
from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.envs.sandbox.bubblewrap import find_bubblewrap
from jaxmoe.envs.sandbox.inside.limits import NOBODY
from jaxmoe.envs.sandbox.launch import Launcher
from tests.jaxmoe.envs.sandbox.attacks import ATTACKS, PRELUDE, Attack

SECRET, ARGUMENT = "trainer-secret-8151", "argument-secret-2342"
_SHM_KEY = 0x5B0C5
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def open_victim() -> Iterator[dict[str, str]]:
    """The belongings of the trainer, by the word that stands for each in an attack."""
    base = Path(tempfile.mkdtemp(prefix="attacked-"))
    base.chmod(0o777)
    for name in ("gold.txt", "b"):
        (base / name).write_text("GOLD")
        (base / name).chmod(0o666)
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
            "GOLD_FILE": str(base / "gold.txt"), "FOLDER": str(base), "BASE": base.name,
            "SOCKET": str(base / "socket"), "ABSTRACT": name, "PORT": str(tcp.getsockname()[1]),
            "HOST_PID": str(os.getpid()), "SHM_KEY": str(key), "SECRET": SECRET,
            "ARGUMENT": ARGUMENT, "CODE_FILE": jaxmoe.__file__,
        }  # fmt: skip
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


class Runner:
    """Runs attacks in a sandbox that is started again when an attack ends it."""

    def __init__(self, kind: str, removed: frozenset[str]) -> None:
        config = SandboxConfig(disk_mb=8, memory_mb=512, call_s=20.0)
        self._launcher = Launcher(kind, config, removed)
        self._sandbox = None

    def run(self, code: str) -> str:
        if self._sandbox is None:
            self._sandbox = self._launcher.start()
            self._sandbox.wait_ready()
            prepared = self._sandbox.run(PRELUDE, 20.0)
            assert prepared.output == "", prepared
        result = self._sandbox.run(code, 20.0)
        if not result.is_alive:
            self.close()
        return result.output or result.status.value

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.kill()
            self._sandbox = None


def run_contained(kind: str, victim: dict[str, str]) -> dict[str, str]:
    runner = Runner(kind, frozenset())
    outputs = {attack.name: runner.run(fill_code(attack, victim)) for attack in ATTACKS}
    runner.close()
    return outputs


def run_controls(kind: str, victim: dict[str, str], user: str) -> dict[str, str]:
    """The outputs without the measures that stop each attack."""
    outputs = {}
    groups: dict[frozenset[str], list[Attack]] = {}
    for attack in ATTACKS:
        stops = getattr(attack, kind)
        if not isinstance(stops, str) and user in attack.control_as.split():
            groups.setdefault(frozenset(stops), []).append(attack)
    for removed, attacks in groups.items():
        runner = Runner(kind, removed)
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
    kind, user, which, _ = sys.argv[1:]
    os.environ["SECRET_KEY"] = SECRET
    _libc.setenv(b"SECRET_KEY", SECRET.encode(), 1)
    find_bubblewrap()  # imports what nobody may be unable to read
    if user == "nobody":
        become_nobody()
    with open_victim() as victim:
        if which == "contained":
            outputs = run_contained(kind, victim)
        else:
            outputs = run_controls(kind, victim, "nobody" if os.getuid() else "root")
    print(json.dumps(outputs))


if __name__ == "__main__":
    thread = threading.Thread(target=main)  # the sandboxes live as long as this thread
    thread.start()
    thread.join()
