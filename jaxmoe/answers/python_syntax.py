# SPDX-License-Identifier: Apache-2.0
"""Parse Python in threads that run at the same time.

`ast.parse` of Python 3.11 counts the depth of its recursion for all threads together. If another
thread parses meanwhile, which a garbage collection in its midst allows, it raises SystemError.
"""

import ast
import threading

_LOCK = threading.Lock()
_TRIES = 10  # other packages parse too, without the lock


def parse_program(text: str) -> ast.Module:
    """Return the tree of a program. Raises what `ast.parse` raises for a text that is none."""
    tree = _parse(text, "exec")
    assert isinstance(tree, ast.Module)
    return tree


def parse_expression(text: str) -> ast.Expression:
    """Return the tree of an expression. Raises what `ast.parse` raises for a text that is none."""
    tree = _parse(text, "eval")
    assert isinstance(tree, ast.Expression)
    return tree


def _parse(text: str, mode: str) -> ast.AST:
    for _ in range(_TRIES - 1):
        try:
            with _LOCK:
                return compile(text, "<unknown>", mode, ast.PyCF_ONLY_AST)
        except SystemError:
            pass
    with _LOCK:
        return compile(text, "<unknown>", mode, ast.PyCF_ONLY_AST)
