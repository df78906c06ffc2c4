# SPDX-License-Identifier: Apache-2.0
"""The formula that a box is a part of: \\boxed{7}^{2} does not mark 7, and \\boxed{7} m has a unit.

Only what stands beside the box on its line is looked at. Between prose and formula it is often
not decided by marks; then signs and letters must touch the box to belong to it.
Next: jaxmoe/answers/marked_answer.py finds the box.
"""

import re

from jaxmoe.answers.exact_number import read_number
from jaxmoe.answers.number_words import FUNCTIONS, SCALES
from jaxmoe.answers.units import is_known_unit

_MAX_CHARS = 200  # of a line on each side of a box
_SPACE = r"(?:[\s~]|\\[,;:! ])*"
_NAMES = "|".join(sorted(FUNCTIONS, key=len, reverse=True)) + "|pi|pm|mp|neg|not"
_SIGN = r"[-+/÷×·*]|\\(?:cdot|times|div|over|choose|pm|mp)(?![A-Za-z])"
_TERM = r"[0-9({]|\\[A-Za-z]|[A-Za-z](?![A-Za-z])"

_MATH_END = re.compile(r"(?<!\\)\$|\\\)|\\\]|\\end\b|\\\\")
_CLOSING = re.compile(r"(?:[\s~)}\]]|\\[,;:! ]|\\right)*")
_UNIT = re.compile(
    rf"{_SPACE}(\\(?:text|textrm|mathrm|mbox)\{{[A-Za-z ]+\}}(?:\^\{{?[23]\}}?)?"
    r"|\^\{?\\circ\}?|\\?%|[A-Za-z]+(?:\^\{?[23]\}?|[²³])?(?![A-Za-z]))"
)
_POWER_AFTER = re.compile(r"\^(?!\{?\\circ)|_(?=[0-9{A-Za-z])|[²³]")
_PRODUCT_AFTER = re.compile(
    rf"[0-9]|[.,][0-9]|\((?=[0-9A-Za-z])|\\(?:{_NAMES}|frac)(?![A-Za-z])"
    r"|[A-Za-z](?![A-Za-z])"
)
_SIGN_AFTER = re.compile(rf"{_SPACE}(?:{_SIGN})\s*(?:{_TERM})")
_SCALE_AFTER = re.compile(
    rf"{_SPACE}(?:\\(?:text|textrm|mathrm|mbox)\{{)?\s*(?:{'|'.join(SCALES - {'mod', 'modulo'})})"
    r"(?![A-Za-z])",
    re.IGNORECASE,
)
_GROUP_BEFORE = re.compile(
    rf"(?:\\(?:[dtc]?frac|[dt]?binom|{_NAMES})(?:\[[^\]]*\])?|[\^_]|\}})\s*$"
)
_COLOR_BEFORE = re.compile(r"\\[a-z]*color(?:box)?\{[^{}]*\}\s*$")
_FUNCTION_BEFORE = re.compile(rf"\\(?:{_NAMES})(?:[_^](?:\{{[^{{}}]*\}}|\w))?\s*\(?$")
_CALL_BEFORE = re.compile(r"(?:[A-Za-z0-9)}]|\\right)\($")
_PRODUCT_BEFORE = re.compile(
    r"(?:[0-9)]|(?<![A-Za-z\\])[A-Za-z]|\\(?:[dtc]?frac\{[^{}]*\}|sqrt)\{[^{}]*\})$"
)
_SIGN_BEFORE = re.compile(rf"({_SIGN}|[\^_])(\s*)$")


def join_formula(before: str, marked: str, after: str) -> str:
    """The text in a box, with the unit beside it, or as a part of the formula around it."""
    before = before.rpartition("\n")[2][-_MAX_CHARS:]
    after = after[:_MAX_CHARS].partition("\n")[0]
    end = _MATH_END.search(after)
    in_math = _ends_in_math(before) or (end is not None and end[0] != "$")
    formula = after[: end.start()] if end else after
    if "\\text" in marked or "\\mbox" in marked:  # the letter of a choice, or words
        return marked
    prefix = _read_sign(before, in_math, formula)
    if prefix is None or _is_continued(formula, in_math):
        start = re.split(r"(?<!\\)\$|\\\(|\\\[|[=:&]", before)[-1].strip()
        return f"{start}({marked}){formula.strip()}".strip() + ("" if start or formula else "?")
    unit = _UNIT.match(formula)
    if prefix == "" and unit and read_number(marked) is not None and _is_unit(unit[1]):
        return f"{marked} {unit[1]}"
    return prefix + (marked if prefix == "" or read_number(marked) is not None else f"({marked})")


def _ends_in_math(before: str) -> bool:
    dollars = len(re.findall(r"(?<!\\)\$\$?", before))
    opened = max(before.rfind("\\("), before.rfind("\\["))
    return dollars % 2 == 1 or opened > max(before.rfind("\\)"), before.rfind("\\]"))


def _is_unit(text: str) -> bool:
    return not text[0].isalpha() or is_known_unit(text)


def _is_continued(after: str, in_math: bool) -> bool:
    """True if the text after a box makes it a part of a formula."""
    closed = after[_CLOSING.match(after).end() :]  # pyright: ignore[reportOptionalMemberAccess]
    if _POWER_AFTER.match(closed) or _SIGN_AFTER.match(after) or _SCALE_AFTER.match(after):
        return True
    if in_math and closed.startswith("!"):
        return True
    adjacent = closed if in_math else after
    product = _PRODUCT_AFTER.match(adjacent)
    unit = _UNIT.match(adjacent)
    return product is not None and not (unit and is_known_unit(unit[1]))


def _read_sign(before: str, in_math: bool, after: str) -> str | None:
    """The sign before a box, "" for none; None if the box is a part of what stands before it."""
    opened = _find_open_brace(before)
    if opened >= 0:
        outer, before = before[:opened], before[opened + 1 :]
        if _GROUP_BEFORE.search(outer) and not _COLOR_BEFORE.search(outer):
            return None
    adjacent = re.sub(rf"{_SPACE}$", "", before) if in_math else before
    if (
        _FUNCTION_BEFORE.search(adjacent)
        or _CALL_BEFORE.search(adjacent)
        or _PRODUCT_BEFORE.search(adjacent)
    ):
        return None
    sign = _SIGN_BEFORE.search(adjacent)
    if sign is None:
        return ""
    further = adjacent[: sign.start()].rstrip("*").rstrip()
    follows_term = re.search(r"[0-9)}]$|(?<![A-Za-z\\])[A-Za-z]$", further) is not None
    if sign[1] == "_" and not adjacent[: sign.start()][-1:].strip():
        return ""  # the mark of italics
    if sign[1] == "*":  # of bold text or a list, or a product
        is_bold = after.lstrip().startswith("*") or not adjacent[: sign.start()].rstrip("*")
        return None if follows_term and not is_bold else ""
    if sign[1] not in "-+":
        return None
    if sign[2] and not in_math and not follows_term:  # a dash, or the mark of a list
        return ""
    return None if follows_term else sign[1].replace("+", "")


def _find_open_brace(text: str) -> int:
    """The place of the last brace that is not closed; -1 for none."""
    depth = 0
    for place in range(len(text) - 1, -1, -1):
        depth += {"}": 1, "{": -1}.get(text[place], 0)
        if depth < 0:
            return place
    return -1
