# SPDX-License-Identifier: Apache-2.0
"""The Python interpreter that runs in a sandbox, and the files of the system that it reads.

Installed packages are not among them: a package may hold the answers of a data set, or the
trainer's own code. Next: jaxmoe/sandbox/bubblewrap.py shows these files to a program.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

_LIBRARY_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Interpreter:
    """An installed Python: its prefix, and the executable below it."""

    prefix: Path
    executable: Path
    version: str  # such as "3.11"

    @property
    def standard_library(self) -> Path:
        return self.prefix / "lib" / f"python{self.version}"


def find_interpreter() -> Interpreter | None:
    """The interpreter that this process runs, without its virtual environment.

    If this user may not read it, as when root dropped its privileges, the system's; or None.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [(Path(sys.base_prefix), version)]
    for prefix in ("/usr", "/usr/local"):
        libraries = sorted(Path(prefix, "lib").glob("python3.*/os.py"), reverse=True)
        candidates += [(Path(prefix), path.parent.name[len("python") :]) for path in libraries]
    for prefix, name in candidates:
        real = Path(os.path.realpath(prefix))
        interpreter = Interpreter(real, real / "bin" / f"python{name}", name)
        library = interpreter.standard_library / "os.py"
        if os.access(interpreter.executable, os.X_OK) and os.access(library, os.R_OK):
            return interpreter
    return None


def list_library_paths() -> tuple[Path, ...]:
    """The folders and files of the system's shared libraries, without links and packages."""
    paths: list[Path] = []
    for name in _LIBRARY_FOLDERS:
        folder = Path(name)
        if folder.is_symlink() or not folder.is_dir():
            continue
        multiarch = sorted(folder.glob("*-linux-gnu*"))
        # Only Debian has folders by architecture; elsewhere the libraries lie in the folder.
        paths += [*multiarch, *folder.glob("ld-*")] if multiarch else [folder]
    return tuple(paths)


def list_package_folders() -> list[Path]:
    """Folders of installed packages below the system's library folders; none on Debian."""
    names = [f"python3*/{name}" for name in PACKAGE_FOLDERS]
    return sorted(x for path in list_library_paths() for name in names for x in path.glob(name))


def list_library_links() -> tuple[tuple[str, str], ...]:
    """The links among the system's library folders, as (link, its target)."""
    return tuple((name, os.readlink(name)) for name in _LIBRARY_FOLDERS if os.path.islink(name))


def list_readable_paths(interpreter: Interpreter) -> list[str]:
    """All that a program may read, for a sandbox that cannot hide a part of a folder."""
    library = interpreter.standard_library
    files = [path for path in library.iterdir() if path.name not in PACKAGE_FOLDERS]
    files += interpreter.prefix.glob("lib/libpython*")
    folders = [
        path
        for folder in list_library_paths()
        if folder not in library.parents
        for path in _list_without_python(folder)
    ]
    devices = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
    return [*map(str, files), *map(str, folders), *devices, "/usr/share/zoneinfo"]


def _list_without_python(folder: Path) -> list[Path]:
    """A folder without interpreters, or the entries that belong to none."""
    if not any(folder.glob("python3*")):
        return [folder]
    return [path for path in folder.iterdir() if not path.name.startswith("python3")]
