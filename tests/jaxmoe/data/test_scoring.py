# SPDX-License-Identifier: Apache-2.0
"""A response is paid for being right, and for nothing else."""

import ast
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.data.scoring import harmless, number, score_checked, score_text

PLAIN = {"evaluates": False, "symbolic": False}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.50", Fraction(2469, 2)),
        (" $18 ", Fraction(18)),
        ("-$3", Fraction(-3)),
        ("−5", Fraction(-5)),
        ("3/4", Fraction(3, 4)),
        ("12.", Fraction(12)),
        (".5", Fraction(1, 2)),
        ("1/0", None),
        ("12 apples", None),
        ("1e9", None),
        ("", None),
        ("9" * 10_000, None),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        ("So it is 72.", "48/2 = <<24>>24\n#### 72", 1.0),
        ("#### 1,072\nmore 5", "#### 1072", 1.0),
        ("72 or maybe 73", "72", 0.0),
        ("It is 73.\n#### 72", "72", 1.0),
        (r"so \boxed{x = 7200}, not 3", "7,200", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0.0),
        (r"\boxed{72", "72", 1.0),
        ("3-5", "-5", 0.0),
        ("= -5", "-5", 1.0),
        ("172", "72", 0.0),
        ("0.72", "72", 0.0),
        ("  Paris\n", "Paris", 1.0),
        ("Paris or London", "Paris", 0.0),
        ("", "72", 0.0),
        ("zzz", "", 0.0),
        ("72" * 50, "72", 0.0),
    ],
)
def test_the_final_answer_is_compared_with_the_gold(response, gold, score):
    assert score_text(response, gold) == score


@given(response=st.text(), gold=st.text())
def test_scoring_text_never_raises(response, gold):
    assert score_text(response, gold) in (0.0, 1.0)


def test_a_check_that_raises_pays_nothing():
    def check(text):
        raise RuntimeError(text)

    assert score_checked("5", "7", check, **PLAIN) == 0.0


def test_partial_credit_is_no_credit():
    assert score_checked("7 7", "7", lambda text: 0.98, **PLAIN) == 0.0
    assert score_checked("7.0", "7", lambda text: float(text == "7.0"), **PLAIN) == 1.0


def test_a_check_that_pays_garbage_falls_back_to_equal_text():
    def halting(text):
        return float(text != "True")

    assert score_checked("no idea", "False", halting, **PLAIN) == 0.0
    assert score_checked(" False\n", "False", halting, **PLAIN) == 1.0
    assert score_checked("no idea", None, halting, **PLAIN) == 0.0


def test_the_response_is_stripped():
    assert score_checked("\n 8 ", "7", lambda text: float(text == "8"), **PLAIN) == 1.0


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('x', 'w')",
        "().__class__",
        "[0] * 10**9",
        "'a' * 10**9",
        "9**9**9",
        "9**((9**9**9)/(9**9**9))",
        "((((9**64)**64)**64)**64)",
        "[x for x in (1,)]",
        "lambda: 1",
        "f'{1}'",
        "9**(9/0.000001)",
        "(" * 3000 + ")" * 3000 + " ",
        "exp(exp(exp(9)))",
        "-" * 2000 + "9",
        "(x+1)**4000 + C",
        "(x+y+z+w)**30",
        "*".join(["(x+1)"] * 300),
        "1" * 20_000,
    ],
)
def test_code_never_reaches_an_evaluating_scorer(text, symbolic):
    ran = []
    kind = {"evaluates": True, "symbolic": symbolic}
    score = score_checked(text, "7", lambda answer: ran.append(answer) or 0.0, **kind)
    assert score == 0.0
    runs = not symbolic and text.startswith("--")  # a literal: nothing to run or to simplify
    assert not ran or runs or _is_not_python(text)


def _is_not_python(text):
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError):
        return True
    return False


@pytest.mark.parametrize("text", ["sin('x')", "9999999!", "print`1`", "'24'"])
def test_text_that_sympy_would_rewrite_is_no_answer(text):
    assert not harmless(text, symbolic=True)


@pytest.mark.parametrize(
    "text",
    ["94*4 - 61 - 6", "10*(8 - 5) - 6", "-4*(-2*x - 8)**(3/2)/3 + C", "-34*x**8/15 - 5*x/4 + C"]
    + ["(4.051, -5.487)", "2240*x**3 + exp(2*x)", "13", "x**0"],
)
def test_honest_expressions_pass(text):
    assert harmless(text, symbolic=True)


@pytest.mark.parametrize("text", ['[["a", "b"], ["c"]]', '{"a": true}', "_ _ Q\nQ _ _", "1 2 3"])
def test_honest_literals_and_boards_pass(text):
    assert harmless(text, symbolic=False)
