# SPDX-License-Identifier: Apache-2.0
"""The built-in `python` tool: a calculator that accepts Python's arithmetic and nothing else.

It needs no sandbox: the text is never executed. A syntax tree of numbers, operators and four
functions is evaluated, and the size of every result is known before it is computed.
"""

import ast
import math
import operator
import re
from collections.abc import Callable

from jaxmoe.answers.python_syntax import parse_program

Number = int | float
MAX_CHARS = 2000  # of a text
MAX_OPERATORS = 200  # and parentheses: bounds the depth of the tree, so that any stack has room
MAX_BITS = 4096  # of an integer: 1,233 digits, fewer than Python refuses to print
_MAX_ROUND_DIGITS = 300

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS = {"abs": abs, "max": max, "min": min, "round": round}
# The parser warns of texts such as "1if x", and a warning may be an error. So the text is split
# first: a number ends where no letter follows.
_TOKEN = re.compile(
    r"(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?(?![\w.])"
    rf"|(?:print|{'|'.join(_FUNCTIONS)})\b|[-+*/%(),;]|[ \t\r\n]+|\#[^\n]*",
    re.ASCII,
)
_OPERATORS = frozenset("-+*/%(")
_ACCEPTED = f"numbers, + - * / // % **, print and {', '.join(_FUNCTIONS)}"


class ArithmeticRefused(ValueError):
    """The text is not arithmetic, or its result would be too large; the message is one line."""


def evaluate_arithmetic(text: str) -> str:
    """Return what the lines of a text print: `print(expr, …)`, or an expression as its last line.

    Results are at most MAX_BITS wide; nothing takes longer than a few milliseconds.

    Raises: ArithmeticRefused for any text that it does not evaluate, and nothing else.
    """
    try:
        statements = _parse_statements(text)
        lines = [_evaluate_statement(node, node is statements[-1]) for node in statements]
    except ArithmeticRefused:
        raise
    except ZeroDivisionError:
        raise ArithmeticRefused("division by zero") from None
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ArithmeticRefused(f"cannot evaluate this: {error}") from None
    return "\n".join(line for line in lines if line is not None)


def _parse_statements(text: str) -> list[ast.stmt]:
    if len(text) > MAX_CHARS:
        raise ArithmeticRefused(f"at most {MAX_CHARS:,} characters, got {len(text):,}")
    position = n_operators = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ArithmeticRefused(
                f"only {_ACCEPTED} are available, got {text[position : position + 20]!r}"
            )
        position = match.end()
        n_operators += match[0] in _OPERATORS
    if n_operators > MAX_OPERATORS:
        raise ArithmeticRefused(f"at most {MAX_OPERATORS} operators and parentheses are accepted")
    try:
        statements = parse_program(text.strip()).body
    except SyntaxError as error:
        raise ArithmeticRefused(f"invalid syntax: {error.msg}") from None
    if not statements:
        raise ArithmeticRefused("there is nothing to evaluate")
    return statements


def _evaluate_statement(node: ast.stmt, is_last: bool) -> str | None:
    """The line that a statement prints; None if it prints none."""
    match node:
        case ast.Expr(ast.Call(ast.Name("print"), arguments, [])):
            return " ".join(str(_evaluate(argument)) for argument in arguments)
        case ast.Expr(expression):
            value = _evaluate(expression)
            return str(value) if is_last else None
    raise ArithmeticRefused(f"only {_ACCEPTED} are available")


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(int() | float() as value):
            return _check_size(value)
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_evaluate(operand))
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            x, y = _evaluate(left), _evaluate(right)
            _check_operands(op, x, y)
            return _check_size(_BINARY[type(op)](x, y))
        case ast.Call(ast.Name("round"), [value, digits], []):
            n_digits = _evaluate(digits)
            if not isinstance(n_digits, int) or abs(n_digits) > _MAX_ROUND_DIGITS:
                raise ArithmeticRefused(f"round takes at most {_MAX_ROUND_DIGITS} digits")
            return _check_size(round(_evaluate(value), n_digits))
        case ast.Call(ast.Name(name), [_, *_] as arguments, []) if name in _FUNCTIONS:
            values = [_evaluate(argument) for argument in arguments]
            if len(values) == 1 and name in ("max", "min"):
                return values[0]
            return _check_size(_FUNCTIONS[name](*values))
    raise ArithmeticRefused(f"only {_ACCEPTED} are available")


def _check_operands(op: ast.operator, x: Number, y: Number) -> None:
    """Refuse an operation whose result would be wider than MAX_BITS, before it is computed."""
    if not (isinstance(x, int) and isinstance(y, int)):
        return
    if isinstance(op, ast.Mult) and x.bit_length() + y.bit_length() > MAX_BITS + 1:
        raise ArithmeticRefused("the result is too large")
    if (
        isinstance(op, ast.Pow)
        and y > 0
        and abs(x) > 1
        and (abs(x).bit_length() - 1) * y > MAX_BITS
    ):
        raise ArithmeticRefused("the result is too large")


def _check_size(value: object) -> Number:
    """Return the value if it is a finite real number that can be printed."""
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ArithmeticRefused(
        "the result is not a real number"
        if isinstance(value, complex)
        else "the result is too large"
    )
