# SPDX-License-Identifier: Apache-2.0
"""Decide if a response is correct, by exact checks that a response can neither crash nor exploit.

A response is hostile text: RL rewards the policy for finding errors in the scorer. Third-party
scorers raise errors, accept garbage, give partial credit, and some evaluate the text as Python.
This module guards against all of these. Next: jaxmoe/data/rows.py.
"""

import ast
import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from jaxmoe.answers.exact_number import Quantity, read_last_quantity, read_number, read_quantity
from jaxmoe.answers.marked_answer import (
    find_marked_answer,
    find_stated_answer,
    read_box,
    text_after_hashes,
)
from jaxmoe.answers.number_words import is_unsolved
from jaxmoe.answers.python_syntax import parse_expression
from jaxmoe.answers.units import is_same_unit

PASS = 0.99  # lower scores of third-party scorers are partial credit and count as 0
# None of these is a correct answer to any question; a scorer that accepts one is unreliable.
GARBAGE = ("zzz", "qwx vjk 7#?", "None", "0 zzz 1 [", "{}")
_MAX_MARKS = 100  # marked answers of a response that are counted
_MAX_RESPONSE_CHARS = 10_000  # characters of a response that an evaluating scorer may see
# Bounds on a formula that sympy may expand and simplify. They were determined by attacks on the
# scorers; correct answers stay well within them.
_MAX_NODES = 400
_MAX_CALLS = 8
_MAX_VARIABLES = 3
_MAX_DEGREE = 32
_MAX_NUMBER = 10**18

_FUNCTIONS = frozenset(
    ("sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log ln").split()
    + ["sqrt", "Abs"]
)
_LITERAL_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub),
    *(ast.Tuple, ast.List, ast.Dict, ast.Set),
)
_ARITHMETIC_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub, ast.Tuple),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Call),
)


def score_text(response: str, gold: str) -> float:
    """1.0 if the response is the gold answer, else 0.0.

    Gold is the text after "####", if it has that mark. Equal text always counts. An equal number
    counts too, compared exactly: the marked answer (after "####", in \\boxed{}, or after "the
    answer is") must be that number and nothing else except a unit; if nothing is marked, the
    last number of the response must be it. A stored number with a unit may be answered without it.
    """
    gold = strip_gold(gold)
    if not gold:
        return 0.0
    marked = find_marked_answer(response)
    stated = find_stated_answer(response) if marked is None else None
    if gold in (response.strip(), marked, stated):
        return 1.0
    expected = read_quantity(gold)
    if expected is None:
        return 0.0
    if marked is not None:
        return float(_is_same(read_quantity(marked), expected))
    if stated is not None and any(digit in stated for digit in "0123456789"):
        equation, _, last = stated.rpartition("=")
        return 0.0 if is_unsolved(equation) else float(_is_same(read_quantity(last), expected))
    return float(_is_same(read_last_quantity(response), expected, in_sentence=True))


def _is_same(answered: Quantity | None, expected: Quantity, *, in_sentence: bool = False) -> bool:
    return (
        answered is not None
        and answered.value == expected.value
        and is_same_unit(answered.unit, expected.unit, in_sentence=in_sentence)
    )


def strip_gold(gold: str) -> str:
    """The stored answer without the solution before it: the text after "####", if it has that."""
    return text_after_hashes(gold) if "####" in gold else gold.strip()


def answer_key(gold: str) -> Fraction | str:
    """A key that is equal for stored answers which `score_text` takes for the same answer."""
    text = strip_gold(gold)
    value = read_number(text)
    return text.casefold() if value is None else value


def marks_several_answers(response: str) -> bool:
    """True if a response marks different answers, each after "####" or in \\boxed{}.

    Only the last one is graded, so it cannot pay here; but other graders may take any.
    """
    boxes = [match.end() for match in re.finditer(r"\\boxed\{", response[:_MAX_RESPONSE_CHARS])]
    texts = [read_box(response, start) for start in boxes[:_MAX_MARKS]]
    texts += [text.strip().partition("\n")[0].strip() for text in response.split("####")[1:]]
    return len({answer_key(text) for text in texts[: 2 * _MAX_MARKS] if text}) > 1


def score_checked(
    response: str,
    gold: str | None,
    check: Callable[[str], float],
    *,
    runs_code: bool,
    runs_sympy: bool,
) -> float:
    """1.0 if a third-party `check` accepts the response, else 0.0; never raises.

    check: scores one answer to this row; partial credit counts as 0.
    runs_code, runs_sympy: the result of `scorer_risks` for the scorer.

    If the check accepts garbage for this row, it is ignored, and only text equal to gold counts.
    """
    answer = response.strip()
    is_equal = gold is not None and answer == gold.strip()
    if not answer or is_equal:
        return float(is_equal)
    if runs_code and not is_safe_to_evaluate(answer, runs_sympy=runs_sympy):
        return 0.0
    if not _is_accepted(check, answer):
        return 0.0
    # Garbage is tried only after an accepted response, because most responses are wrong.
    return float(not any(_is_accepted(check, text) for text in GARBAGE))


def scorer_risks(scorer: Any) -> dict[str, bool]:
    """{"runs_code", "runs_sympy"}: True if the scorer's module may evaluate a response that way."""
    try:
        source = inspect.getsource(inspect.getmodule(type(scorer)) or type(scorer))
    except (OSError, TypeError):  # no source to read: trust nothing
        return {"runs_code": True, "runs_sympy": True}
    runs_sympy = bool(re.search(r"^\s*(?:import|from) sympy", source, re.MULTILINE))
    return {
        "runs_code": runs_sympy or bool(re.search(r"\b(?:eval|exec)\(", source)),
        "runs_sympy": runs_sympy,
    }


def is_safe_to_evaluate(text: str, *, runs_sympy: bool) -> bool:
    """True if evaluating a text cannot call unknown functions and must end in bounded time.

    Literals pass, and arithmetic of bounded size. Text that is not valid Python passes only
    without sympy, which rewrites a text before it evaluates it.
    """
    if len(text) > _MAX_RESPONSE_CHARS:
        return False
    try:
        tree = parse_expression(text)
        return _is_literal(tree) and not runs_sympy or _is_arithmetic(tree, runs_sympy)
    except (SyntaxError, ValueError):
        return not runs_sympy
    except (MemoryError, RecursionError):
        return False


def _is_literal(tree: ast.AST) -> bool:
    """True for numbers, strings and bare names, in lists, tuples, sets and dicts."""
    return all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))


def _is_arithmetic(tree: ast.AST, runs_sympy: bool) -> bool:
    """True for a number, a formula of bounded size, or a tuple that no operator multiplies."""
    nodes = list(ast.walk(tree))
    if len(nodes) > _MAX_NODES or not all(isinstance(node, _ARITHMETIC_NODES) for node in nodes):
        return False
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    variables = names - _FUNCTIONS
    active = bool(calls) or any(isinstance(node, ast.BinOp) for node in nodes)
    if active and any(isinstance(node, ast.Tuple) for node in nodes):
        return False  # (0,) * 10**9 would fill the memory
    if calls and not (runs_sympy and variables and len(calls) <= _MAX_CALLS):
        return False  # exp(exp(9)) as an exact number has more digits than memory holds
    return (
        len(variables) <= _MAX_VARIABLES
        # Names with a leading underscore lead to Python's internals.
        and not any(name.startswith("_") for name in names)
        and not any(isinstance(n, ast.Constant) and not _is_number(n.value) for n in nodes)
        and all(isinstance(c.func, ast.Name) and c.func.id in _FUNCTIONS for c in calls)
        and not any(call.keywords for call in calls)
        and _bound_degree(tree) <= _MAX_DEGREE
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _MAX_NUMBER


def _bound_degree(node: ast.AST) -> float:
    """Upper bound on the number of factors of a formula whose powers are multiplied out."""
    if isinstance(node, ast.BinOp):
        left_degree, right_degree = _bound_degree(node.left), _bound_degree(node.right)
        if isinstance(node.op, ast.Pow):
            return left_degree * max(1.0, abs(_bound_exponent(node.right)))
        return (
            left_degree + right_degree
            if isinstance(node.op, ast.Mult | ast.Div)
            else max(left_degree, right_degree)
        )
    return max((_bound_degree(child) for child in ast.iter_child_nodes(node)), default=1.0)


def _bound_exponent(node: ast.AST) -> float:
    """Upper bound of an exponent that consists of plain numbers; infinite for any other."""
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) <= _MAX_DEGREE:
            return float(value)
        case ast.UnaryOp(operand=operand):
            return abs(_bound_exponent(operand))
        case ast.BinOp(left=left_node, op=ast.Div(), right=right_node):
            divisor = abs(_bound_exponent(right_node))
            return (
                math.inf if math.isinf(divisor) else _bound_exponent(left_node) / max(divisor, 1e-3)
            )
        case ast.BinOp(left=left_node, op=ast.Add() | ast.Sub(), right=right_node):
            return abs(_bound_exponent(left_node)) + abs(_bound_exponent(right_node))
        case _:
            return math.inf


def _is_accepted(check: Callable[[str], float], answer: str) -> bool:
    try:
        return float(check(answer)) >= PASS
    except Exception:  # a scorer that fails on a response has not accepted it
        return False
