# SPDX-License-Identifier: Apache-2.0
"""Digests of the user's modules that a config names, so that a resumed run has the same code.

They cover each named module, and the user's modules that it imports. Installed packages and the
standard library are left out unless they are named. No module is imported.
Next: jaxmoe/checkpoint/same_run.py compares the digests.
"""

import ast
import hashlib
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from jaxmoe.config import Config
from jaxmoe.config.function_specs import split_calls

_INSTALLED = {
    Path(path).resolve()
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
} | {Path(__file__).resolve().parents[1]}


def source_digests(cfg: Config) -> dict[str, str]:
    """Digest of each source file of the config's functions, by "source of MODULE"."""
    functions = (*vars(cfg.loss).values(), *vars(cfg.router).values())
    data = cfg.data
    texts = [data.map_rows, data.rewards, data.environment, data.tools, cfg.warmup.demonstrations]
    texts += [cfg.rollout.engine, cfg.optim.name, *functions]
    digests: dict[str, str] = {}
    waiting = list(named_modules(text for text in texts if isinstance(text, str)))
    named = set(waiting)
    while waiting:
        module = waiting.pop()
        key, file = f"source of {module}", _find_source(module)
        if key in digests or file is None or (module not in named and _is_installed(file)):
            continue
        content = file.read_bytes()
        digests[key] = hashlib.sha256(content).hexdigest()[:16]
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        waiting += _imported_modules(content, package)
    return digests


def named_modules(texts: Iterable[str]) -> Iterator[str]:
    """Yield the modules of texts such as "0.9 * module:function(option=1) + other:function"."""
    for text in texts:
        for part in split_calls(text):
            path, _, options = part.partition("(")
            path = path.rpartition("*")[2].strip()
            if ":" in path:
                yield path.partition(":")[0]
            yield from re.findall(r"['\"]([\w.]+):[A-Za-z_][\w.]*['\"]", options)


def _find_source(module: str) -> Path | None:
    """Return the file that Python would import, without running a package's code; or None."""
    top, *inside = module.split(".")
    try:
        spec = _find_module_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not inside:
        file = Path(spec.origin) if spec.has_location and spec.origin else None
        return file if file is not None and file.suffix == ".py" else None
    for root in spec.submodule_search_locations or ():
        path = Path(root, *inside)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    return None


def _find_module_spec(top: str) -> ModuleSpec | None:
    loaded = getattr(sys.modules.get(top), "__spec__", None)
    return loaded if loaded is not None else find_spec(top)


def _is_installed(file: Path) -> bool:
    return not _INSTALLED.isdisjoint(file.resolve().parents)


def _imported_modules(content: bytes, package: str) -> Iterator[str]:
    """Yield the names of modules that a source may import, at any level of nesting."""
    try:
        tree = ast.parse(content)
    # Python itself reports a file that it cannot parse, when the module is imported. The digest of
    # such a file is known all the same.
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                # Importing a.b.c also runs a and a.b.
                yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = [*(above if node.level else ()), *(node.module or "").split(".")]
            name = ".".join(part for part in base if part)
            if name:
                yield name
                # An imported name may be a module or an attribute of one. A name without a source
                # file is skipped.
                yield from (f"{name}.{alias.name}" for alias in node.names if alias.name != "*")
