# SPDX-License-Identifier: Apache-2.0
"""Names that the code of a kernel may not use, found in its syntax before anything runs.

These rules say what the task is: plain Python without libraries. They are not what makes a
measurement honest; that is kernel_timing.py, which trusts nothing inside.
"""

import ast
import builtins
from collections.abc import Iterator

# The builtins of a kernel: none gives an attribute by its name, a module, a file or a frame.
BUILTIN_NAMES = tuple(
    (
        "abs all any bin bool bytearray bytes callable chr dict divmod enumerate filter float "
        "format frozenset hash hex int isinstance iter len list map max memoryview min next oct "
        "ord pow print range repr reversed round set slice sorted str sum tuple zip "
        "ArithmeticError AssertionError Exception IndexError KeyError LookupError "
        "NotImplementedError OverflowError RuntimeError StopIteration TypeError ValueError "
        "ZeroDivisionError"
    ).split()
)
# Underscored names that a kernel may use: methods of numbers and lists, which `map` takes, and the
# name of the module, since answers often end in `if __name__ == "__main__":`.
_METHOD_NAMES = frozenset(
    "__add__ __radd__ __sub__ __mul__ __rmul__ __neg__ __getitem__ __len__ __iter__ "
    "__next__".split()
)
_MODULE_NAME = "__name__"
_IMPORT_NAMES = frozenset("__import__ __loader__ __spec__ importlib import_module".split())
_TIMER_MODULES = frozenset("time timeit datetime _time sched cProfile profile".split())
_TIMER_NAMES = frozenset(
    "perf_counter perf_counter_ns process_time process_time_ns monotonic monotonic_ns thread_time "
    "thread_time_ns time_ns clock_gettime timeit default_timer".split()
)
_FILE_MODULES = frozenset("os io pathlib shutil tempfile fileinput posix".split())
_FILE_NAMES = frozenset("open read_text write_text read_bytes write_bytes".split())
# Attributes of frames, code, tracebacks and generators, which have no underscore before them.
_FRAME_PREFIXES = ("f_", "tb_", "gi_", "cr_", "ag_", "co_", "func_")
_REACHING_NAMES = frozenset(("mro", "format_map"))

# The kinds of what is refused, and the metrics that count them.
REFUSALS = {
    "imports_refused": "hack/imports_refused",
    "timers_touched": "hack/timers_touched",
    "files_touched": "hack/files_touched",
    "hidden_names": "hack/hidden_names",
}


def find_refusals(tree: ast.Module) -> dict[str, str]:
    """The first name of each kind that a kernel's code may not hold. Empty if it may run.

    The kinds are REFUSALS; code may have several. An `import time` counts as an import and as a
    timer. `hidden_names` are names with two underscores first, attributes of frames, classes, and
    builtins that are not in BUILTIN_NAMES.
    """
    bound = {name for node in ast.walk(tree) for name in _list_bound(node)}
    refusals: dict[str, str] = {}
    for node in ast.walk(tree):
        for kind, name in _list_refusals(node, bound):
            refusals.setdefault(kind, name)
    return refusals


def _list_refusals(node: ast.AST, bound: set[str]) -> Iterator[tuple[str, str]]:
    """(kind, name) of each refusal of one node."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        from_module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names = [*from_module, *(alias.name for alias in node.names)]
        yield "imports_refused", names[0]
        tops = {name.partition(".")[0] for name in names}
        if tops & (_TIMER_MODULES | _TIMER_NAMES):
            yield "timers_touched", names[0]
        if tops & (_FILE_MODULES | _FILE_NAMES):
            yield "files_touched", names[0]
    elif isinstance(node, ast.ClassDef):
        yield "hidden_names", f"class {node.name}"
    elif isinstance(node, ast.Name):
        yield from _judge_name(node.id, is_attribute=False, is_bound=node.id in bound)
    elif isinstance(node, ast.Attribute):
        yield from _judge_name(node.attr, is_attribute=True, is_bound=False)
    elif isinstance(node, ast.MatchClass):
        for name in node.kwd_attrs:
            yield from _judge_name(name, is_attribute=True, is_bound=False)
    else:
        for name in _list_bound(node):
            yield from _judge_name(name, is_attribute=False, is_bound=True)


def _judge_name(name: str, *, is_attribute: bool, is_bound: bool) -> Iterator[tuple[str, str]]:
    if name in _IMPORT_NAMES:
        yield "imports_refused", name
    if name in _TIMER_NAMES and not is_bound:
        yield "timers_touched", name
    if name in _FILE_NAMES and not is_bound:
        yield "files_touched", name
    is_dunder = name.startswith("__")
    if is_attribute:
        allowed = _METHOD_NAMES
        is_hidden = name.startswith(_FRAME_PREFIXES) or name in _REACHING_NAMES
    else:
        allowed = frozenset((_MODULE_NAME,))
        is_hidden = not is_bound and hasattr(builtins, name) and name not in BUILTIN_NAMES
    if name not in allowed and (is_dunder or is_hidden):
        yield "hidden_names", name


def _list_bound(node: ast.AST) -> Iterator[str]:
    """Names that a node binds, in whatever scope. The namespace decides about the others."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(node, ast.Global | ast.Nonlocal):
        yield from node.names
