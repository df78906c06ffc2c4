# SPDX-License-Identifier: Apache-2.0
"""Is this response right? Exact checks that a policy cannot crash, bribe or run code in.

A response is hostile text: the policy is paid to find the scorer's holes. Third-party scorers
raise, pay garbage, pay by halves, and some evaluate the text as Python; each hole is closed
here once. Next: jaxmoe/data/rows.py.
"""

import ast
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

from jaxmoe.data.exact_number import last_number, read_number

PASS = 0.99  # third-party scorers pay partial credit below this: it counts as 0
# No right answer to anything; a scorer that pays for one of these cannot tell right from wrong.
GARBAGE = ("zzz", "qwx vjk 7#?", "None", "0 zzz 1 [", "{}")
_LONGEST = 10_000  # characters of a response that an evaluating scorer may see
# Bounds on a formula that sympy may expand and simplify; found by attack, honest ones fit.
_MOST_NODES = 400
_MOST_CALLS = 8
_MOST_VARIABLES = 3
_LARGEST_DEGREE = 32
_LARGEST_NUMBER = 10**18

# "the answer is …", "Answer: …", in bold or not
_SAID = re.compile(
    r"\banswer[*_]*\s*(?:[:=]|is\b(?:\s+(?:therefore|thus|then|simply|just|indeed|equal to)\b)?"
    r"\s*:?)[\s*_]*",
    re.IGNORECASE,
)
_CALCULATED = re.compile(r"<<[^<>]*>>")  # a note of GSM8K's calculator
_SENTENCE_END = re.compile(r"\n|[.;?!](?=[\s*]|$)|,(?=\s+(?!and\b|or\b)[^\W\d])|\s\(")
_FUNCTIONS = frozenset(
    ("sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log ln").split()
    + ["sqrt", "Abs"]
)
_LITERALS = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub),
    *(ast.Tuple, ast.List, ast.Dict, ast.Set),
)
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub, ast.Tuple),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Call),
)


def score_text(response: str, gold: str) -> float:
    """1.0 where the response is the gold answer, else 0.0.

    Gold is the text after "####" where there is one. Equal text always counts. An equal number
    counts too, compared exactly: the marked answer (after "####", in \\boxed{}, behind "the
    answer is") must be that number as a whole, apart from a unit; where nothing is marked, the
    last number of the response must be it.
    """
    gold = _after_hashes(gold) if "####" in gold else gold.strip()
    if not gold:
        return 0.0
    marked = _marked(response)
    said = _said(response) if marked is None else None
    if gold in (response.strip(), marked, said):
        return 1.0
    value = read_number(gold)
    if value is None:
        return 0.0
    if marked is not None:
        return float(read_number(marked, units=True) == value)
    if said is not None and any(digit in said for digit in "0123456789"):
        _, _, last = said.rpartition("=")
        return float(read_number(last, units=True) == value)
    return float(last_number(response) == value)


def score_checked(
    response: str,
    gold: str | None,
    check: Callable[[str], float],
    *,
    evaluates: bool,
    symbolic: bool,
) -> float:
    """1.0 where a third-party `check` accepts the response, else 0.0; never raises.

    check: scores one answer to this very row; partial credit is no credit.
    evaluates, symbolic: as told by `evaluation` of the check's module.

    A check that accepts garbage for this row decides nothing: equal text does.
    """
    answer = response.strip()
    exact = gold is not None and answer == gold.strip()
    if not answer or exact:
        return float(exact)
    if evaluates and not harmless(answer, symbolic=symbolic):
        return 0.0
    if not _accepts(check, answer):
        return 0.0
    return float(not any(_accepts(check, text) for text in GARBAGE))


def evaluation(scorer: Any) -> dict[str, bool]:
    """Whether the module of a scorer's class may run a response as Python, or as sympy."""
    try:
        source = inspect.getsource(inspect.getmodule(type(scorer)) or type(scorer))
    except (OSError, TypeError):  # no source to read: trust nothing
        return {"evaluates": True, "symbolic": True}
    symbolic = bool(re.search(r"^\s*(?:import|from) sympy", source, re.MULTILINE))
    return {
        "evaluates": symbolic or bool(re.search(r"\b(?:eval|exec)\(", source)),
        "symbolic": symbolic,
    }


def harmless(text: str, *, symbolic: bool) -> bool:
    """Whether evaluating a text can neither call anything unknown nor take for ever.

    Plain literals pass, and arithmetic of bounded size. Text that is no Python passes only
    where nothing rewrites it before evaluation, as sympy does.
    """
    if len(text) > _LONGEST:
        return False
    try:
        tree = ast.parse(text, mode="eval")
        return _is_literal(tree) and not symbolic or _is_arithmetic(tree, symbolic)
    except (SyntaxError, ValueError):
        return not symbolic
    except (MemoryError, RecursionError):
        return False


def _is_literal(tree: ast.AST) -> bool:
    """Numbers, texts and bare names, in lists, tuples, sets and dicts."""
    return all(isinstance(node, _LITERALS) for node in ast.walk(tree))


def _is_arithmetic(tree: ast.AST, symbolic: bool) -> bool:
    """A number, a formula, or a tuple of plain numbers (only where nothing multiplies it)."""
    nodes = list(ast.walk(tree))
    if len(nodes) > _MOST_NODES or not all(isinstance(node, _NODES) for node in nodes):
        return False
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    variables = names - _FUNCTIONS
    active = bool(calls) or any(isinstance(node, ast.BinOp) for node in nodes)
    if active and any(isinstance(node, ast.Tuple) for node in nodes):
        return False  # (0,) * 10**9
    if calls and not (symbolic and variables and len(calls) <= _MOST_CALLS):
        return False  # exp(exp(9)) as a number has more digits than memory
    return (
        len(variables) <= _MOST_VARIABLES
        and not any(name.startswith("_") for name in names)
        and not any(isinstance(n, ast.Constant) and not _is_number(n.value) for n in nodes)
        and all(isinstance(c.func, ast.Name) and c.func.id in _FUNCTIONS for c in calls)
        and not any(call.keywords for call in calls)
        and _degree(tree) <= _LARGEST_DEGREE
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _LARGEST_NUMBER


def _degree(node: ast.AST) -> float:
    """An upper bound on the factors a formula has once its powers are multiplied out."""
    if isinstance(node, ast.BinOp):
        left, right = _degree(node.left), _degree(node.right)
        if isinstance(node.op, ast.Pow):
            return left * max(1.0, abs(_constant(node.right)))
        return left + right if isinstance(node.op, ast.Mult | ast.Div) else max(left, right)
    return max((_degree(child) for child in ast.iter_child_nodes(node)), default=1.0)


def _constant(node: ast.AST) -> float:
    """The value of an exponent made of plain numbers; infinite for any other exponent."""
    match node:
        case ast.Constant(value=int() | float() as value) if abs(value) <= _LARGEST_DEGREE:
            return float(value)
        case ast.UnaryOp(operand=inner):
            return abs(_constant(inner))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            below = abs(_constant(right))
            return math.inf if math.isinf(below) else _constant(left) / max(below, 1e-3)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return abs(_constant(left)) + abs(_constant(right))
        case _:
            return math.inf


def _accepts(check: Callable[[str], float], answer: str) -> bool:
    try:
        return float(check(answer)) >= PASS
    except Exception:  # a scorer that chokes on a response has not accepted it
        return False


def _after_hashes(text: str) -> str:
    return text.rpartition("####")[2].strip().partition("\n")[0].strip()


def _marked(response: str) -> str | None:
    """The answer a response marks as such: after the last "####", else in the last \\boxed{}."""
    if "####" in response:
        return _after_hashes(response)
    start = response.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(response)):
        depth += {"{": 1, "}": -1}.get(response[end], 0)
        if depth == 0:
            return response[start:end].strip()
    return None  # a box that never closes marks nothing


def _said(response: str) -> str | None:
    """The text after the last "the answer is", to the end of its sentence."""
    ends = [found.end() for found in _SAID.finditer(response)]
    if not ends:
        return None
    rest = _CALCULATED.sub("", response[ends[-1] : ends[-1] + _LONGEST])
    return _SENTENCE_END.split(rest, maxsplit=1)[0].strip().removesuffix("**").strip()
