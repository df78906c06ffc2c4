# SPDX-License-Identifier: Apache-2.0
"""The exact value of a number as people write it; None for a text that is more than one number.

A larger expression must not count as one of its parts: "1/2/3" is not 3, and "10^5" is not 5. So
the complete text must be a number. Next: jaxmoe/answers/scoring.py compares the values.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from jaxmoe.answers.number_words import NUMBER_WORDS, changes_next, changes_previous, is_plain_name
from jaxmoe.answers.units import SHORT_UNITS, spell_unit

_MAX_DIGITS = 4000  # of a number, and largest power of ten: bounds time and memory
_WINDOW_CHARS = 1000  # read on each side of the last digit of a text without a marked answer

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10\^(?:\{([-+]?[0-9]+)\}|([-+]?[0-9]+))"
_SCALED = re.compile(rf"({_DECIMAL})(?:[eE]([-+]?[0-9]+)| ?[x*] ?{_POWER})?")
_POWER_OF_TEN = re.compile(_POWER)
_SLASH = re.compile(rf"({_DECIMAL}) ?/ ?({_DECIMAL})")
_FRAC = re.compile(
    rf"\\frac ?(?:\{{ ?(-?{_DECIMAL}) ?\}}|([0-9])) ?(?:\{{ ?({_DECIMAL}) ?\}}|([0-9]))"
)
_MIXED = re.compile(r"([0-9]+) ?(\\frac.*)|([0-9]+) ([0-9]+/[0-9]+)")
_SIGNED = re.compile(r"([-+]?) ?([$€£¥]?) ?([-+]?)(.*?) ?([%$€£¥]?)", re.DOTALL)
_NAMED = re.compile(r"([A-Za-z][\w{} ]*)?= ?(.*)", re.DOTALL)

_PLAIN_FORMS = {
    "\N{MINUS SIGN}": "-",
    "×": "*",
    "·": "*",
    "\\times": "*",
    "\\cdot": "*",
    "\\dfrac": "\\frac",
    "\\tfrac": "\\frac",
    "\\%": "%",
    "{,}": ",",
    "\\!": "",
    "\\left": "",
    "\\right": "",
    "^\\circ": " °",
    "^{\\circ}": " °",
    "\\degree": " °",
}
_SPACES = re.compile(r"\\[,;: ]|~|\\quad\b|\s+")
_TEXT = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_WRAPPERS = (
    ("**", "**"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("$$", "$$"),
    ("$", "$"),
    ("`", "`"),
    ("{", "}"),
    ("\\text{", "}"),
    ("\\mathbf{", "}"),
    ("\\textbf{", "}"),
)

_UNIT = re.compile(r"([^\W\d_]|[°'µ-])+(/[^\W\d_]+)?(\^\{?[23]\}?|[²³])?")
_MAX_UNIT_WORDS = 6  # longer texts after a number are sentences, not units


class Quantity(NamedTuple):
    """A number and the words of its unit (`jaxmoe.answers.units.spell_unit`), empty without one."""

    value: Fraction
    unit: str


def read_number(text: str, *, units: bool = False) -> Fraction | None:
    """The exact value of a text that is one number and nothing else; None for any other text.

    It reads "1,234.50", "1 000", "-$3", "12%", "5e6", "2 \\times 10^{3}", "10^5", "3/4",
    "\\frac{3}{4}" and "2 1/2", also in bold, between dollar signs, or with a dot at the end.

    units: True to accept what `read_quantity` accepts.
    """
    quantity = _parse_quantity(text, words=units)
    return None if quantity is None else quantity.value


def read_quantity(text: str) -> Quantity | None:
    """The number that a text is, with its unit; None for any other text.

    A unit may follow, as in "18 dollars a day", and a name may stand before it, as in "x = 18".
    Words that change the number ("5 million", "5 or six", "ln x = 5") are never accepted.
    """
    return _parse_quantity(text, words=True)


def _parse_quantity(text: str, *, words: bool) -> Quantity | None:
    if len(text) > 2 * _MAX_DIGITS:
        return None
    text, unit = _strip_wrappers(_normalize_notation(text)), ""
    if words:
        named = _NAMED.fullmatch(text)
        if named and not is_plain_name(named[1] or ""):
            return None
        text, unit = _split_unit(_strip_wrappers(named[2]) if named else text)
    signed = _SIGNED.fullmatch(text)
    if signed is None or (signed[1] and signed[3]):
        return None
    value = _parse_unsigned(signed[4])
    if value is None:
        return None
    sign = spell_unit(signed[2] or signed[5])
    is_negative = "-" in (signed[1], signed[3])
    return Quantity(-value if is_negative else value, sign or spell_unit(unit))


def read_last_quantity(text: str) -> Quantity | None:
    """The last number of a text; None if it belongs to a larger expression.

    The last word with a digit must be a complete number, and nothing that changes it may stand
    next to it. An equals sign separates: the last number of "2 + 3 = 5" is 5. The unit is all
    that follows up to the end of the clause, be it a unit or not.
    """
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    if not end:
        return None
    start = max(text.rfind("\n", 0, end) + 1, end - _WINDOW_CHARS)
    # The window may cut through its first word; a letter in front keeps its rest from reading as
    # a number.
    is_cut = start > 0 and not text[start - 1].isspace()
    line = text[start:end] + text[end : end + _WINDOW_CHARS].partition("\n")[0]
    words = _split_words(("x" if is_cut else "") + _normalize_notation(line))
    end_word = max(i for i, word in enumerate(words) if re.search("[0-9]", word))
    start_word, groups = end_word, re.fullmatch(r"[0-9]{3}(\.[0-9]+)?\W*", words[end_word])
    while groups and start_word and re.fullmatch("[0-9]{1,3}", words[start_word - 1]):
        start_word -= 1
    if start_word == end_word and end_word and re.fullmatch(r"[0-9]+/[0-9]+\W*", words[end_word]):
        start_word -= words[end_word - 1].isdecimal()
    is_clause_end = words[end_word].rstrip("*\"')$").endswith((".", ";", ":", "?"))
    following = [] if is_clause_end else words[end_word + 1 :]
    # "- **4**" is a list's line; a sign would stand in front of the 4.
    is_listed = words[start_word].startswith("**") and words[:start_word][-1:] == ["-"]
    if (not is_listed and changes_next(words[:start_word])) or changes_previous(following):
        return None
    number = _parse_quantity(
        _strip_punctuation(" ".join(words[start_word : end_word + 1])), words=False
    )
    return number and Quantity(number.value, number.unit or _read_clause(following))


def _read_clause(words: list[str]) -> str:
    """The first words, up to a punctuation mark, as the words of a unit."""
    text = _TEXT.sub(r"\1", " ".join(words[:_MAX_UNIT_WORDS]))
    return spell_unit(re.split(r"[.,;:!?()\[\]$=\"|]|\\(?=[)\]])", text, maxsplit=1)[0])


def _normalize_notation(text: str) -> str:
    """Replace LaTeX and Unicode variants of signs, spaces and fractions by one plain form."""
    for notation, plain in _PLAIN_FORMS.items():
        text = text.replace(notation, plain)
    return _SPACES.sub(" ", text.replace("\\$", "$")).strip()


def _strip_wrappers(text: str) -> str:
    """Remove bold, dollar signs and braces around the text, and one dot at its end."""
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    for opening, closing in _WRAPPERS:
        inner = text[len(opening) : -len(closing)]
        wrapped = (
            len(text) > len(opening + closing)
            and text.startswith(opening)
            and text.endswith(closing)
        )
        if wrapped and opening not in inner and closing not in _drop_braced(inner):
            return _strip_wrappers(inner.strip())
    return text


def _drop_braced(text: str) -> str:
    """Remove pairs of braces with their content; only unpaired braces remain."""
    return re.sub(r"\{[^{}]*\}", "", text)


def _split_unit(text: str) -> tuple[str, str]:
    """The number and the unit after it; the whole text if what follows is not a unit."""
    plain = _TEXT.sub(r" \1", text)
    if any(not re.search("[A-Za-z]", words[1]) for words in _TEXT.finditer(text)):
        return text, ""
    number, *unit = re.split(r" +(?=[^\W\d_]|°)", plain, maxsplit=1)
    words = [word for word in re.split(r"[ ,.;:]+", " ".join(unit)) if word]
    is_unit = len(words) <= _MAX_UNIT_WORDS and all(map(_is_unit, words)) and words[-1:] != ["a"]
    return (number.strip(), " ".join(words)) if is_unit else (text, "")


def _is_unit(word: str) -> bool:
    bare = re.match(r"[^\d^²³]*", word)
    short = bare is None or (len(bare[0]) == 1 and bare[0] not in SHORT_UNITS | {"a"})
    is_number = bool(set(word.lower().split("-")) & NUMBER_WORDS)
    return not is_number and not short and _UNIT.fullmatch(word) is not None


def _parse_unsigned(text: str) -> Fraction | None:
    if match := _SCALED.fullmatch(text):
        return _parse_decimal(match[1], match[2] or match[3] or match[4] or "0")
    if match := _POWER_OF_TEN.fullmatch(text):
        return _parse_decimal("1", match[1] or match[2])
    if match := _SLASH.fullmatch(text):
        return _divide(match[1], match[2])
    if match := _FRAC.fullmatch(text):
        return _divide(match[1] or match[2], match[3] or match[4])
    if match := _MIXED.fullmatch(text):
        number, part = (
            _parse_decimal(match[1] or match[3], "0"),
            _parse_unsigned(match[2] or match[4]),
        )
        if number is not None and part is not None and 0 < part < 1:
            return number + part
    return None


def _divide(above: str, below: str) -> Fraction | None:
    top, bottom = _parse_decimal(above, "0"), _parse_decimal(below, "0")
    return top / bottom if top is not None and bottom else None


def _parse_decimal(digits: str, exponent: str) -> Fraction | None:
    digits = re.sub("[, ]", "", digits)
    # The length of the exponent is tested first, since int() of a long text takes long.
    if len(digits) > _MAX_DIGITS or len(exponent) > 6 or abs(int(exponent)) > _MAX_DIGITS:
        return None
    return Fraction(digits.removesuffix(".")) * Fraction(10) ** int(exponent)


def _split_words(line: str) -> list[str]:
    """Split a line into words; an equals sign, a quotation mark or a bracket is its own word.

    A bracket of a function call or a larger expression, as in "sqrt(3)", is not split off.
    """
    line = re.sub(r"(<<|>>|[=≈\[\]\"“”|]|(?<![^\s=\"*])\(|\)(?![^\s.,;:!?\"*]))", r" \1 ", line)
    return re.sub(r"(?<=[A-Za-z]:)(?=\S)", " ", line.replace("\\boxed{", " ")).split()


def _strip_punctuation(word: str) -> str:
    """Remove the punctuation that surrounds a number in a sentence."""
    word = word.strip("'\"").rstrip(",;:?").removesuffix("!").rstrip(")")
    if word.count("**") == 1:
        word = word.removeprefix("**").removesuffix("**").rstrip(",;:")
    return word
