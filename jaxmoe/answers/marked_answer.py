# SPDX-License-Identifier: Apache-2.0
"""The answer that a response marks: after "####", in \\boxed{}, or after "the answer is".

A box that is a part of a larger formula, such as \\boxed{7}^{2}, marks that formula and not 7.
"####" is also a heading of Markdown, so a line of words with text below it marks nothing if a box
or a sentence does.
Next: jaxmoe/answers/scoring.py compares it with the stored answer.
"""

import re

from jaxmoe.answers.boxed_formula import join_formula
from jaxmoe.answers.exact_number import read_quantity

_BOX = "\\boxed{"
_MAX_SENTENCE_CHARS = 10_000  # of a stated answer
# "the answer is …", "Answer: …", in bold or not
_ANSWER_PHRASE = re.compile(
    r"\banswer[*_]*\s*(?:[:=]|is\b(?:\s+(?:therefore|thus|then|simply|just|indeed|equal to)\b)?"
    r"\s*:?)[\s*_]*",
    re.IGNORECASE,
)
_HASHES = re.compile(r"(?<!#)####(?!#)")
_CLOSING_HASHES = re.compile(r"(?<=\s)#+\s*\Z")  # a heading may end with its marks too
_HEADING = re.compile(r"(?:the\s+)?(?:final\s+)?(?:answer|result|solution)\W*", re.IGNORECASE)
_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")  # a note of GSM8K's calculator
_SENTENCE_END = re.compile(r"\n|[.;?!](?=[\s*]|$)|,(?=\s+(?!and\b|or\b)[^\W\d])|\s\(")


def text_after_hashes(text: str) -> str:
    return text.rpartition("####")[2].strip().partition("\n")[0].strip()


def find_marked_answer(response: str) -> str | None:
    """The marked answer: after the last "####", else in the last \\boxed{}; None if unmarked, or if
    "the answer is" marks it."""
    response = _CLOSING_HASHES.sub("", response)
    ends = [match.end() for match in _HASHES.finditer(response)]
    if not ends:
        return _find_boxed_answer(response)
    after = response[ends[-1] :].lstrip()
    line, _, below = after.partition("\n")
    text, below = line.strip(), below.strip()
    if text.count("**") % 2:  # bold that began before the mark
        text = text.removesuffix("**").rstrip()
    if read_quantity(text) is not None:
        return text
    # Words at the end are an answer; words with text below them may be a heading.
    for marks in (after, response) if below else (after,):
        if _BOX in marks:
            return _find_boxed_answer(response)
        if _ANSWER_PHRASE.search(marks):
            return None
    if below and _HEADING.fullmatch(text):
        return below.partition("\n")[0].strip()
    return text


def _find_boxed_answer(response: str) -> str | None:
    """The last \\boxed{}, with the formula that it is a part of; None without one."""
    marked, position, bounds = None, 0, (0, 0)
    while (start := response.find(_BOX, position)) >= 0:
        end = _find_box_end(response, start + len(_BOX))
        if end is None:  # an unclosed box marks nothing, and a closed one inside it does
            return read_box(response, response.rfind(_BOX) + len(_BOX))
        marked, position = response[start + len(_BOX) : end].strip(), end + 1
        bounds = start, position
    if marked is None:
        return None
    # A box around another one and nothing else marks the same answer.
    if marked.startswith(_BOX) and marked.endswith("}") and marked.count(_BOX) == 1:
        marked = _find_boxed_answer(marked) or ""
    return join_formula(response[: bounds[0]], marked, response[bounds[1] :])


def read_box(response: str, start: int) -> str | None:
    """The text from `start` to the brace that closes the box; None for an unclosed one."""
    end = _find_box_end(response, start)
    return None if end is None else response[start:end].strip()


def _find_box_end(response: str, start: int) -> int | None:
    depth = 1
    for end in range(start, len(response)):
        depth += {"{": 1, "}": -1}.get(response[end], 0)
        if depth == 0:
            return end
    return None


def find_stated_answer(response: str) -> str | None:
    """The text after the last "the answer is", to the end of its sentence; None without it."""
    ends = [match.end() for match in _ANSWER_PHRASE.finditer(response)]
    if not ends:
        return None
    sentence = _CALCULATOR_NOTE.sub("", response[ends[-1] : ends[-1] + _MAX_SENTENCE_CHARS])
    return _SENTENCE_END.split(sentence, maxsplit=1)[0].strip().removesuffix("**").strip()
