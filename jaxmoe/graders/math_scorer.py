# SPDX-License-Identifier: Apache-2.0
"""Score answers to mathematics: `data.rewards=jaxmoe.graders.math_scorer:score_math`.

Numbers are compared exactly, without a library. Other answers (expressions, sets, intervals,
matrices) are compared by math-verify, which parses LaTeX and computes with sympy. An answer is
hostile text: some take for ever, so the functions run in a process that is killed after
`call_limit_s`; and what could be much work is refused before sympy sees it.
Next: jaxmoe/answers/scoring.py finds the marked answer; jaxmoe/rewards/reward_process.py runs this.
"""

import importlib
import logging
import re
from math import comb
from typing import Any

from jaxmoe.answers.exact_number import read_number
from jaxmoe.answers.marked_answer import find_marked_answer, find_stated_answer
from jaxmoe.answers.number_words import SCALES
from jaxmoe.answers.scoring import score_text, strip_gold
from jaxmoe.answers.units import is_same_unit, spell_unit

try:
    # By name, so that type checks do not need the optional package.
    math_verify = importlib.import_module("math_verify")
except ImportError as error:
    raise ImportError(
        "it needs math-verify (pip install 'jaxmoe[math]', or pip install math-verify)"
    ) from error

_MAX_CHARS = 300  # of an answer; a longer one may have twice the characters of the stored one
_MAX_EXPONENT = 100
_MAX_TERMS = 600  # of a power that is multiplied out
_MAX_DIGITS = 15  # of a number in an expression
_MAX_OPERATORS = 60
# Commands that cost sympy little. Others, such as \int, \sum and \binom, state a problem and not
# its answer; they are accepted if the stored answer has them too.
_COMMANDS = frozenset(
    (
        "frac dfrac tfrac cfrac sqrt pi infty cup cap left right text textbf textit mathrm mathbf "
        "mbox cdot times pm mp circ degree in notin mathbb emptyset varnothing quad qquad begin "
        "end le leq ge geq lt gt ne neq theta alpha beta gamma delta lambda mu phi omega sigma "
        "sin cos tan cot sec csc log ln exp arcsin arccos arctan e i displaystyle ldots"
    ).split()
)
_LATEX = (math_verify.LatexExtractionConfig(),)
_TEXT_ANSWER = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?")
_WORD = re.compile(r"[Yy]es|[Nn]o|[^\W\d_]{4,}(?:[ '-][^\W\d_]{2,})*")  # AB may be A times B
_UNIT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\{([^{}]*)\}((?:\^\{?[0-9]\}?)?)$")
_BASED_NUMBER = re.compile(r"(?<![A-Za-z])[0-9][0-9A-Z]*_\{?(?:[0-9]|\\text)|\)_")
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")
_PRECISION = 50  # digits; fewer pay a decimal for the root that it is near to
_NAME = re.compile(r"[A-Za-z](?:_\{?\w+\}?|\([a-z]\))? ?= ?(?!=)")

# It warns once that its own time limits are off: they use an alarm, and make a late answer wrong.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class MathScorer:
    """A reward function of verl's convention; see `__call__`."""

    call_limit_s = 10.0  # a call that takes longer is killed, and counted as late

    def __call__(self, solution_str: str, ground_truth: Any) -> dict[str, float]:
        """{"score": 1.0 if the response is the stored answer, else 0.0, and parts to count}.

        The answer is the one marked by "####", the last \\boxed{}, or "the answer is". Without a
        mark only a number can be right: the last one of the response. A list of stored answers
        means that each of them is correct. `refused` is 1 for an answer that could be too much work
        to compare, `unreadable` for one that math-verify cannot read; both are wrong.
        """
        golds = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
        results = [_compare(solution_str, strip_gold(str(gold))) for gold in golds] or [{}]
        return max(results, key=lambda parts: parts.get("score", 0.0))


score_math = MathScorer()


def _compare(response: str, gold: str) -> dict[str, float]:
    boxed = find_marked_answer(gold)
    gold = gold if boxed is None else boxed
    parts = {"score": score_text(response, gold), "refused": 0.0, "unreadable": 0.0}
    # An expression for a number, such as 58 \cdot 96, is the question again.
    if parts["score"] or not gold or read_number(gold, units=True) is not None:
        return parts
    answer = find_marked_answer(response)
    answer = find_stated_answer(response) if answer is None else answer
    if not answer:
        return parts
    gold, answer = _normalize(gold), _normalize(answer)
    if _is_same_text(answer, gold):
        return parts | {"score": 1.0}
    # math-verify drops a base, so 12_{5} and 12_{6} would be equal.
    is_based = _BASED_NUMBER.search(gold) or _BASED_NUMBER.search(answer)
    if is_based or _TEXT_ANSWER.fullmatch(gold) or not _has_same_form(gold, answer):
        return parts
    if not _is_small(answer, gold):
        return parts | {"refused": 1.0}
    try:
        expected, parsed = (_parse(text) for text in (gold, answer))
        if not parsed:
            return parts | {"unreadable": 1.0}
        is_equal = math_verify.verify(
            expected,
            parsed,
            strict=True,
            numeric_precision=_PRECISION,
            timeout_seconds=None,
            raise_on_error=True,
        )
    except Exception:  # whatever a hostile text causes in ANTLR or sympy
        return parts | {"unreadable": 1.0}
    return parts | {"score": float(is_equal)}


def _parse(text: str) -> list[Any]:
    # A decimal is a fraction. As a float it would equal every number that rounds to it.
    text = _DECIMAL.sub(
        lambda match: rf"(\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}})", text
    )
    return math_verify.parse(
        f"${text}$", extraction_config=_LATEX, parsing_timeout=None, raise_on_error=True
    )


def _normalize(text: str) -> str:
    """The text without dollar signs, a dot at its end, and commands that only change its look."""
    text = text.strip().removesuffix(".").strip()
    while len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    for command in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\displaystyle"):
        text = re.sub(re.escape(command) + r"(?![A-Za-z])", "", text)
    return text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _is_same_text(answer: str, gold: str) -> bool:
    """True for equal texts, whose spaces do not count. In words the case of letters does not."""
    answered, expected = (_plain_text(text) for text in (answer, gold))
    if "\\text" in gold or "\\mbox" in gold:
        choices = [_CHOICE.fullmatch(text) for text in (answered, expected)]
        if choices[0] and choices[1]:  # C for (C), as a letter of a choice
            return choices[0][1].casefold() == choices[1][1].casefold()
    elif not _WORD.fullmatch(gold):  # x and X are different variables
        return answered == expected
    return answered.casefold() == expected.casefold()


def _plain_text(text: str) -> str:
    text = re.sub(r"_\{(\w)\}", r"_\1", _TEXT_ANSWER.sub(r"\1", text))
    return re.sub(r"[\s\\]+", "", text)


def _has_same_form(gold: str, answer: str) -> bool:
    """False for an answer that states more, or differs in brackets, in the unit or in case.

    math-verify takes (1, 2) for an open interval and for a set without an order, and x = x for an
    equation like any other. Brackets without a comma only group, as in (x+1)^2.
    """
    if _find_tuples(gold) != _find_tuples(answer):
        return False
    named = _NAME.match(answer)
    answered, expected = (_read_unit(text) for text in (answer, gold))
    if not is_same_unit(answered, expected) or set(answered.split()) & SCALES:
        return False
    bare = answer[named.end() :] if named and "=" not in gold else answer
    if any(letter.swapcase() in _letters(gold) for letter in _letters(bare) - _letters(gold)):
        return False  # math-verify takes X for x
    return bare.count("=") == gold.count("=") and "$" not in answer


def _read_unit(text: str) -> str:
    unit = _UNIT.search(text)
    return spell_unit(unit[1].strip() + unit[2]) if unit else ""


def _letters(text: str) -> set[str]:
    return set(re.sub(r"\\[A-Za-z]+|[^A-Za-z]", "", text))


def _find_tuples(text: str) -> list[tuple[str, str, int]]:
    """The opening, the closing and the commas of each bracket that holds a comma, sorted."""
    stack, tuples = [("", 0)], []
    for char in re.sub(r"\\[{}]", "", text):
        opening, commas = stack[-1]
        if char in "([":
            stack.append((char, 0))
        elif char == ",":
            stack[-1] = opening, commas + 1
        elif char in ")]" and opening:
            stack.pop()
            tuples += [(opening, char, commas)] if commas else []
    return sorted(tuples)


def _is_small(answer: str, gold: str) -> bool:
    """True if comparing an answer is little work."""
    commands = set(re.findall(r"\\([A-Za-z]+)", answer))
    allowed = _COMMANDS | set(re.findall(r"\\([A-Za-z]+)", gold))
    return (
        len(answer) <= max(_MAX_CHARS, 2 * len(gold))
        and answer.isascii()
        and commands <= allowed
        and ("!" in gold or "!" not in answer)
        and _has_small_powers(answer, gold)
        and len(re.findall(r"[-+*/^]|\\cdot|\\times|\\frac|\\sqrt", answer)) <= _MAX_OPERATORS
        and all(
            len(digits) <= _MAX_DIGITS or digits in gold for digits in re.findall(r"[0-9]+", answer)
        )
    )


def _has_small_powers(answer: str, gold: str) -> bool:
    """True if no exponent is a power itself, or large without being in the stored answer."""
    product = 1  # of the exponents of groups, since a group may hold a power
    for group, exponent in re.findall(r"([)}\]]?) *(?:\^|\*\*) *(\{[^{}]*\}|\\?\w+|.?)", answer):
        if exponent in ("{\\circ}", "\\circ"):
            continue
        numbers = [int(digits[:9]) for digits in re.findall(r"[0-9]+", exponent)]
        is_large = any(n > _MAX_EXPONENT and str(n) not in gold for n in numbers)
        # An exponent with braces of its own is cut off after the first one.
        if is_large or re.search(r"^[{(\[]$|[\^!]|\*\*", exponent):
            return False
        product *= max([1, *numbers]) if group else 1
    variables = len(_letters(answer))
    return product <= _MAX_EXPONENT and comb(product + variables, variables) <= _MAX_TERMS
