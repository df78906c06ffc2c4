# SPDX-License-Identifier: Apache-2.0
"""The forms in which rows store tests of code: how each is run, and which ones can pass nobody.

Next: jaxmoe/graders/grading.py runs them.
"""

import ast
import json
import sys
from collections.abc import Iterator
from types import UnionType

from jaxmoe.graders.suspicious_code import parse_code
from jaxmoe.sandbox.process import MAX_REQUEST_CHARS

_MAX_TEST_CHARS = MAX_REQUEST_CHARS - 1000  # the rest of a request is what runs them
_FORMS = (
    "Write assertions, check(candidate), functions test_… without arguments, or a TestCase of "
    "unittest"
)
_FIXTURES = {
    "__init__",
    "setup_method",
    "teardown_method",
    "setup_class",
    "teardown_class",
    "setup_module",
    "teardown_module",
    "setup_function",
    "teardown_function",
}
_UNPLAIN = {"object", "range", "iter", "map", "filter", "zip", "enumerate", "reversed"}
_FAILING_NAMES = ("assert", "fail", "exit", "_exit", "abort")
# The runner below takes the place of unittest's own, which ends the interpreter.
PREPARE_TESTS = "import unittest\nunittest.main = lambda *_, **__: None\n"
_RUN_TEST_CASES = """
import sys as _sys, unittest as _unittest

class _FirstFault(_unittest.TestResult):
    fault = None

    def addError(self, test, error):
        self.fault = self.fault or error[1]

    addFailure = addError

    def addSubTest(self, test, subtest, error):
        self.fault = self.fault or (error and error[1])

    def addUnexpectedSuccess(self, test):
        self.fault = self.fault or AssertionError(test)

_result = _FirstFault()
_unittest.defaultTestLoader.loadTestsFromModule(_sys.modules["__main__"]).run(_result)
if _result.fault is not None:
    raise _result.fault
"""


def add_calls(tests: str) -> str:
    """The program that runs tests: their text, and behind it the calls that their form needs.

    The calls are of `check`, of test functions and methods that nothing else calls, and of all
    cases of unittest. Plain assertions need none.
    """
    tree = parse_code(tests)
    if tree is None:
        return tests
    calls = [_RUN_TEST_CASES] if any(map(_is_test_case, tree.body)) else []
    return "\n".join([tests, *_list_calls(tree), *calls])


def find_test_fault(tests: str, entry_point: str, setup: str = "") -> str:
    """The reason why tests fail every answer, or pass every answer, with advice; "" without one.

    setup: code that runs before them.
    """
    if (size := len(json.dumps(tests))) > _MAX_TEST_CHARS:
        return (
            f"tests may have {_MAX_TEST_CHARS:,} characters, got {size:,}. Leave out some of them"
        )
    tree = parse_code(tests)
    if tree is None:
        return f"tests must be a Python program, got {tests[:40]!r}. Correct them"
    if foreign := sorted(_find_foreign_imports(tree)):
        return (
            f"tests may import the standard library alone, and call {entry_point} without an "
            f"import; they import {', '.join(foreign)}. {_FORMS}"
        )
    if fault := _find_uncalled(tree):
        return f"tests must run by themselves, and {fault}. {_FORMS}"
    arguments = {x.args.args[0].arg for x in _find_checks(tree) if x.args.args}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    called = {entry_point, "candidate", *arguments}
    if names.isdisjoint(called):
        return f"tests must call {entry_point} or candidate, and never name them. {_FORMS}"
    programs = [tree, parse_code(setup) or ast.Module([], [])]
    if refused := _find_unplain_argument(programs, called):
        return (
            f"tests must pass plain data, and {entry_point} gets {refused}. Pass numbers, texts "
            "and containers of them"
        )
    if not any(_can_fail(node) for program in programs for node in ast.walk(program)):
        return f"tests must fail some answer, and have no assertion. {_FORMS}"
    return ""


def _find_checks(tree: ast.Module) -> list[ast.FunctionDef]:
    return [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "check"]


def _list_calls(tree: ast.Module) -> list[str]:
    checks = _find_checks(tree)
    calls = [f"check({'candidate' if x.args.args else ''})" for x in checks[-1:]]
    used = _list_used_names(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and _is_test(node) and node.name not in used:
            calls.append(f"{node.name}()")
        elif isinstance(node, ast.ClassDef) and _is_test_class(node) and node.name not in used:
            methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
            calls += [f"{node.name}().{x.name}()" for x in methods if _is_test(x, n_arguments=1)]
    return calls


def _find_uncalled(tree: ast.Module) -> str:
    """The name of what pytest would run and this does not, and why; "" if there is nothing."""
    used = _list_used_names(tree)
    if not all(_can_call(x, 1) for x in _find_checks(tree)):
        return "check needs more than one argument"
    for node in tree.body:
        functions = [node, *node.body] if isinstance(node, ast.ClassDef) else [node]
        if _is_test_case(node) or getattr(node, "name", "") in used:
            continue
        for x in functions:
            if not isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if x.name in _FIXTURES and (x is node or _is_test_class(node)):
                return f"{x.name} is run by pytest alone"
            if not x.name.startswith("test") or (x is not node and not _is_test_class(node)):
                continue
            if not _is_test(x, n_arguments=int(x is not node)):
                return f"{x.name} needs arguments, or an event loop"
    return ""


def _find_unplain_argument(programs: list[ast.Module], called: set[str]) -> str:
    """An argument of a call of these names that no sandbox can be sent; "" without one.

    Those below `try` and `with` may be there to fail. Other arguments are known when they are sent.
    """
    classes = {
        node.name
        for program in programs
        for node in ast.walk(program)
        if isinstance(node, ast.ClassDef) and not node.bases and not node.keywords
    }
    for node in _walk_without(programs[0], ast.Try | ast.With):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in called:
            continue
        for argument in (*node.args, *(x.value for x in node.keywords)):
            match argument:
                case ast.Lambda():
                    return "a lambda"
                case ast.GeneratorExp():
                    return "a generator"
                case ast.Call(ast.Name(name)) if name in classes | _UNPLAIN:
                    return f"an object of {name}"
                case _:
                    pass
    return ""


def _list_used_names(tree: ast.Module) -> set[str]:
    return {x.id for x in ast.walk(tree) if isinstance(x, ast.Name) and type(x.ctx) is ast.Load}


def _is_test(node: ast.AST, n_arguments: int = 0) -> bool:
    """True for a test function that can be called without more arguments than these."""
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
        return False
    return _can_call(node, n_arguments)


def _can_call(node: ast.FunctionDef, n_arguments: int) -> bool:
    arguments = node.args
    n_required = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return n_required <= n_arguments and None not in arguments.kw_defaults


def _is_test_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and node.name.startswith("Test") and not node.bases


def _is_test_case(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    names = [getattr(base, "attr", getattr(base, "id", "")) for base in node.bases]
    return any(name.endswith("TestCase") for name in names)


def _find_foreign_imports(tree: ast.Module) -> set[str]:
    """Modules that a sandbox does not have, except those below `try`."""
    return {
        name
        for node in _walk_without(tree, ast.Try)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in _list_modules(node)
        if name not in sys.stdlib_module_names
    }


def _list_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "").partition(".")[0]]
    return [alias.name.partition(".")[0] for alias in node.names]


def _walk_without(tree: ast.AST, left_out: type | UnionType) -> Iterator[ast.AST]:
    """All nodes, as ast.walk, without what stands below these kinds."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        stack += [] if isinstance(node, left_out) else ast.iter_child_nodes(node)


def _can_fail(node: ast.AST) -> bool:
    name = getattr(node, "attr", getattr(node, "id", ""))
    return isinstance(node, ast.Assert | ast.Raise) or (
        isinstance(name, str) and name.startswith(_FAILING_NAMES)
    )
