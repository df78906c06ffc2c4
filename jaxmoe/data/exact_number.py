# SPDX-License-Identifier: Apache-2.0
"""The exact value of a number as people write it, and nothing for a text that says more.

A larger expression must not count as one of its parts: "1/2/3" is not 3, and "10^5" is not 5. So
a text is a number only as a whole. Next: jaxmoe/data/scoring.py compares the values.
"""

import re
from fractions import Fraction

_MOST_DIGITS = 4000  # of a number, and of a power of ten: this bounds time and memory
_WINDOW = 1000  # characters on each side of the last digit of an unmarked text that are read

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
_SIGNED = re.compile(r"([-+]?) ?[$€£¥]? ?([-+]?)(.*?) ?[%$€£¥]?", re.DOTALL)
_NAMED = re.compile(r"(?:[A-Za-z][\w{} ]*)?= ?(.*)", re.DOTALL)

_AS_PLAIN = {
    "\N{MINUS SIGN}": "-", "×": "*", "·": "*", "\\times": "*", "\\cdot": "*", "\\dfrac": "\\frac",
    "\\tfrac": "\\frac", "\\%": "%", "{,}": ",", "\\!": "", "\\left": "", "\\right": "",
    "^\\circ": " °", "^{\\circ}": " °", "\\degree": " °",
}  # fmt: skip
_SPACES = re.compile(r"\\[,;: ]|~|\\quad\b|\s+")
_TEXT = re.compile(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_WRAPPERS = (("**", "**"), ("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("`", "`"),
             ("{", "}"), ("\\text{", "}"), ("\\mathbf{", "}"), ("\\textbf{", "}"))  # fmt: skip

_UNIT = re.compile(r"([^\W\d_]|[°'µ-])+(/[^\W\d_]+)?(\^\{?[23]\}?|[²³])?")
_SHORT_UNITS = frozenset("m g s h l L W V A N J K F C °".split())  # x and n are variables
# words behind a number that make it another one, or one of several
_SCALES = frozenset(
    (
        "hundred hundreds thousand thousands million millions billion billions trillion trillions "
        "dozen dozens gross mille mil milliard milliarden tausend millionen lakh lakhs crore "
        "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths "
        "seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths "
        "thousandth thousandths millionth millionths squared cubed factorial pi root times plus "
        "minus over divided multiplied mod modulo k bn tn"
    ).split()
)
_OTHERS = _SCALES | frozenset(
    (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy "
        "eighty ninety sqrt log ln exp sin cos tan power and or to nor but either not remainder "
        "less more than"
    ).split()
)
_MOST_WORDS = 6  # of a unit: "miles per hour and car" has no business there
_OPERATOR = re.compile(r"[-+*/^÷x]|\\(?:div|over)")


def read_number(text: str, *, units: bool = False) -> Fraction | None:
    """The exact value of a text that is one number and nothing else; None for any other text.

    It reads "1,234.50", "1 000", "-$3", "12%", "5e6", "2 \\times 10^{3}", "10^5", "3/4",
    "\\frac{3}{4}" and "2 1/2", also in bold, between dollar signs, or with a dot at the end.

    units: whether words may follow after a space, as in "18 dollars a day", and a name may
        precede, as in "x = 18". Words that make it another number ("5 million", "5 or six")
        may not.
    """
    if len(text) > 2 * _MOST_DIGITS:
        return None
    text = _unwrapped(_plain(text))
    if units:
        named = _NAMED.fullmatch(text)
        text = _without_unit(_unwrapped(named[1]) if named else text)
    signed = _SIGNED.fullmatch(text)
    if signed is None or (signed[1] and signed[2]):
        return None
    value = _unsigned(signed[3])
    return -value if value is not None and "-" in (signed[1], signed[2]) else value


def last_number(text: str) -> Fraction | None:
    """The value of the last number of a text; None where that is a part of something larger.

    The last word that has a digit must be a number: nothing that continues a number may touch
    it, and neither an operator nor another number may stand next to it. What follows an equals
    sign stands alone: the last number of "2 + 3 = 5" is 5.
    """
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    if not end:
        return None
    start = max(text.rfind("\n", 0, end) + 1, end - _WINDOW)
    cut = start > 0 and not text[start - 1].isspace()  # the first word may have begun earlier
    line = text[start:end] + text[end : end + _WINDOW].partition("\n")[0]
    words = _words(("x" if cut else "") + _plain(line))
    last = max(i for i, word in enumerate(words) if re.search("[0-9]", word))
    first, groups = last, re.fullmatch(r"[0-9]{3}(\.[0-9]+)?\W*", words[last])
    while groups and first and re.fullmatch("[0-9]{1,3}", words[first - 1]):
        first -= 1
    if first == last and last and re.fullmatch(r"[0-9]+/[0-9]+\W*", words[last]):
        first -= words[last - 1].isdecimal()
    before = ["", "", *words[:first]][-2:]
    behind = [*words[last + 1 :], "", ""][:2]
    if _is_joined(*before) or _is_continued(*behind):
        return None
    return read_number(_without_punctuation(" ".join(words[first : last + 1])))


def _plain(text: str) -> str:
    """One way to write what LaTeX and Unicode have several ways for."""
    for fancy, plain in _AS_PLAIN.items():
        text = text.replace(fancy, plain)
    return _SPACES.sub(" ", text.replace("\\$", "$")).strip()


def _unwrapped(text: str) -> str:
    """Remove bold, dollar signs and braces around the text, and one dot at its end."""
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    for left, right in _WRAPPERS:
        inner = text[len(left) : -len(right)]
        wrapped = len(text) > len(left + right) and text.startswith(left) and text.endswith(right)
        if wrapped and left not in inner and right not in _without_braces(inner):
            return _unwrapped(inner.strip())
    return text


def _without_braces(text: str) -> str:
    """Remove pairs of braces and their content: a brace that is left has its partner outside."""
    return re.sub(r"\{[^{}]*\}", "", text)


def _without_unit(text: str) -> str:
    """The text before the words that follow its number; all of it where these may not follow."""
    plain = _TEXT.sub(r" \1", text)
    if any(not re.search("[A-Za-z]", words[1]) for words in _TEXT.finditer(text)):
        return text
    number, *rest = re.split(r" +(?=[^\W\d_]|°)", plain, maxsplit=1)
    words = [word for word in re.split(r"[ ,.;:]+", " ".join(rest)) if word]
    fine = len(words) <= _MOST_WORDS and all(map(_is_unit, words)) and words[-1:] != ["a"]
    return number.strip() if fine else text


def _is_unit(word: str) -> bool:
    bare = re.match(r"[^\d^²³]*", word)
    short = bare is None or (len(bare[0]) == 1 and bare[0] not in _SHORT_UNITS | {"a"})
    is_number = bool(set(word.lower().split("-")) & _OTHERS)
    return not is_number and not short and _UNIT.fullmatch(word) is not None


def _unsigned(text: str) -> Fraction | None:
    if found := _SCALED.fullmatch(text):
        return _value(found[1], found[2] or found[3] or found[4] or "0")
    if found := _POWER_OF_TEN.fullmatch(text):
        return _value("1", found[1] or found[2])
    if found := _SLASH.fullmatch(text):
        return _quotient(found[1], found[2])
    if found := _FRAC.fullmatch(text):
        return _quotient(found[1] or found[2], found[3] or found[4])
    if found := _MIXED.fullmatch(text):
        number, part = _value(found[1] or found[3], "0"), _unsigned(found[2] or found[4])
        if number is not None and part is not None and 0 < part < 1:
            return number + part
    return None


def _quotient(above: str, below: str) -> Fraction | None:
    top, bottom = _value(above, "0"), _value(below, "0")
    return top / bottom if top is not None and bottom else None


def _value(digits: str, exponent: str) -> Fraction | None:
    digits = re.sub("[, ]", "", digits)
    if len(digits) > _MOST_DIGITS or len(exponent) > 6 or abs(int(exponent)) > _MOST_DIGITS:
        return None
    return Fraction(digits.removesuffix(".")) * Fraction(10) ** int(exponent)


def _words(line: str) -> list[str]:
    """The words of a line; a sign of equality, a quotation mark or a bracket is one of its own.

    Not a bracket that belongs to a function or to a larger expression, as in "sqrt(3)".
    """
    line = re.sub(r"(<<|>>|[=≈\[\]\"“”|]|(?<![^\s=\"*])\(|\)(?![^\s.,;:!?\"*]))", r" \1 ", line)
    return re.sub(r"(?<=[A-Za-z]:)(?=\S)", " ", line.replace("\\boxed{", " ")).split()


def _is_joined(further: str, before: str) -> bool:
    """True where the words before a number make it a part of a larger expression."""
    if _OPERATOR.fullmatch(before):
        return before in "/^÷" or bool(re.search(r"[0-9)}]", further))
    return bool(re.search(r"([0-9]%?|[\^_√]|\\sqrt)$", before))


def _is_continued(behind: str, further: str) -> bool:
    """True where the words after a number make it another number."""
    word = behind.rstrip(".,;:!?*").lower()
    if word == "and":
        return further.lower() in ("a", "one", "two", "three", "half")
    return word in _SCALES or bool(re.fullmatch(r"[+*/^÷!]|\\(div|over|pi|sqrt).*", behind))


def _without_punctuation(word: str) -> str:
    """Remove the punctuation that a sentence puts around a number."""
    word = word.strip("'\"").rstrip(",;:?").removesuffix("!").rstrip(")")
    if word.count("**") == 1:
        word = word.removeprefix("**").removesuffix("**").rstrip(",;:")
    return word
