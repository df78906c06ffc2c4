# SPDX-License-Identifier: Apache-2.0
"""Start the process of a sandbox: its command, and the text of the code that runs inside.

The code is sent through the pipe, so it needs no file inside, and the command line is short and
says nothing of this machine. Next: jaxmoe/sandbox/process.py talks to the process.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.sandbox.bubblewrap import find_bubblewrap, locate_inside, make_arguments
from jaxmoe.sandbox.interpreter import Interpreter, find_interpreter, list_readable_paths
from jaxmoe.sandbox.process import MAX_OUTPUT_CHARS, Sandbox, SandboxError

_PACKAGE = "jaxmoe.sandbox.inside"
# In the order in which they import each other.
_MODULES = ("system_calls", "seccomp", "landlock", "plain_data", "limits", "worker")
_START = f"""
import json, os, sys, types
line = b""
while not line.endswith(b"\\n"):
    part = os.read(0, 65536)
    if not part:
        sys.exit(1)
    line += part
setup = json.loads(line)
for name, source in setup.pop("modules").items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
main = sys.modules["{_PACKAGE}.worker"].main
del line, part, module, name, source
main(setup)
"""


@dataclass(frozen=True)
class Launcher:
    """Starts sandboxes of one kind, which is not "auto".

    removed: names of measures that a test leaves out, to see what each of them is for.
    """

    kind: str
    config: SandboxConfig
    removed: frozenset[str] = frozenset()

    @cached_property
    def interpreter(self) -> Interpreter:
        interpreter = find_interpreter()
        if interpreter is None:
            raise SandboxError("this user can read no Python interpreter")
        return interpreter

    @property
    def disk_mb(self) -> int:
        """Landlock has no quota, so nothing can be written there."""
        return 0 if self.kind == "landlock" else self.config.disk_mb

    def start(self) -> Sandbox:
        """Start a process, and return before it is ready. Raises SandboxError.

        The process ends with the thread that called this: a thread of its own should, which lives
        as long as the sandboxes do. See jaxmoe/sandbox/starter.py.
        """
        try:
            return self._start_bubblewrap() if self.kind == "bubblewrap" else self._start_plain()
        except OSError as error:
            raise SandboxError(str(error)) from error

    def _start_plain(self) -> Sandbox:
        child = self._open_process(self._python_command(self.interpreter.executable))
        return Sandbox(child, None, self._make_setup(os.getpid()))

    def _start_bubblewrap(self) -> Sandbox:
        bwrap = find_bubblewrap()
        if bwrap is None:
            raise SandboxError("bwrap is not installed")
        info_read, info_write = os.pipe()
        arguments_read, arguments_write = os.pipe()
        try:
            arguments = make_arguments(self.interpreter, self.disk_mb, info_write, self.removed)
            # A pipe, because the command line of bubblewrap can be read from inside.
            os.write(arguments_write, b"".join(f"{x}\0".encode() for x in arguments))
            os.close(arguments_write)
            arguments_write = -1
            command = [bwrap, "--args", str(arguments_read), "--"]
            child = self._open_process(
                [*command, *self._python_command(locate_inside(self.interpreter))],
                (arguments_read, info_write),
            )
        except BaseException:
            os.close(info_read)
            raise
        finally:
            for descriptor in (info_write, arguments_read, arguments_write):
                if descriptor >= 0:
                    os.close(descriptor)
        return Sandbox(child, info_read, self._make_setup(None))

    def _open_process(
        self, command: list[str], descriptors: tuple[int, ...] = ()
    ) -> subprocess.Popen[bytes]:
        inherits = "closed_descriptors" in self.removed
        for descriptor in descriptors if inherits else ():
            os.set_inheritable(descriptor, True)
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            start_new_session=True,
            close_fds=not inherits,
            pass_fds=() if inherits else descriptors,
            env=self._environment(),
        )

    def _environment(self) -> Mapping[str, str]:
        """The environment of the process, which can be read from inside: nothing."""
        return dict(os.environ) if "empty_environment" in self.removed else {}

    def _python_command(self, executable: Path) -> list[str]:
        return [str(executable), "-I", "-S", "-B", "-X", "utf8", "-c", _START]

    def _make_setup(self, parent: int | None) -> dict[str, Any]:
        folder = Path(__file__).with_name("inside")
        is_landlock = self.kind == "landlock"
        return {
            "kind": self.kind,
            "parent": parent,
            "memory_mb": self.config.memory_mb,
            "disk_mb": self.disk_mb,
            "max_chars": MAX_OUTPUT_CHARS,
            "removed": sorted(self.removed),
            "counts_tasks": self.kind == "bubblewrap" and os.getuid() != 0,
            "readable": list_readable_paths(self.interpreter) if is_landlock else [],
            "modules": {
                f"{_PACKAGE}.{name}": (folder / f"{name}.py").read_text() for name in _MODULES
            },
        }
