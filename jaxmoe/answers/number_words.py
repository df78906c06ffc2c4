# SPDX-License-Identifier: Apache-2.0
"""Words and signs beside a number that make it a part of something larger.

"minus 4", "ln 4", "half of 4", "4 x" and "4 million" are not 4. A doubtful case counts as such: a
right answer that is not paid teaches a clearer form, a wrong one that is paid teaches the error.
Next: jaxmoe/answers/exact_number.py reads the number itself.
"""

import re

from jaxmoe.answers.units import SHORT_UNITS

# Words after a number that change its value: "5 million", "2 thirds".
SCALES = frozenset(
    (
        "hundred hundreds thousand thousands million millions billion billions trillion trillions "
        "dozen dozens gross mille mil milliard milliarden tausend millionen lakh lakhs crore "
        "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths "
        "seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths "
        "thousandth thousandths millionth millionths squared cubed factorial pi root times plus "
        "minus over divided multiplied mod modulo k bn tn"
    ).split()
)
FUNCTIONS = frozenset(
    (
        "abs arccos arcsin arctan ceil cos cosh cot csc det exp floor gcd lcm lg ln log max min "
        "neg sec sgn sin sinh sqrt tan tanh"
    ).split()
)
NUMBER_WORDS = (
    SCALES
    | FUNCTIONS
    | frozenset(
        (
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
            "fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy "
            "eighty ninety power and or to nor but either not remainder less more than"
        ).split()
    )
)
_OPERATOR = re.compile(r"[-+/^÷x]|\*\*?|\\(?:div|over)")
_ENDS_IN_OPERATOR = re.compile(r"([0-9]%?|[\^_√±∓≠≤≥<]|(?<![=-])>|!=|[<>]=|\\sqrt)$")
# Letters that may be units ("5m = 500 cm") are no unknowns here.
_UNSOLVED = re.compile(r"(?<!\\)(?:[0-9)}][a-fi-kn-rt-z]|(?<![A-Za-z])[A-Za-z](?:\^\S+|[²³]))$")
_CHANGES_NEXT = FUNCTIONS | frozenset(
    "minus plus negative times over not or nor modulo mod base twice thrice double triple root "
    "than power half".split()
)
# Pairs of words before a number: "half of 4" and "divided by 4" are not 4, "a total of 4" is.
_CHANGED_BY_OF = (
    SCALES
    | FUNCTIONS
    | frozenset(
        "square cube logarithm sine cosine tangent percent multiple factor power out inverse "
        "reciprocal negative opposite".split()
    )
)
_CHANGED_BY_BY = frozenset("divided multiplied divide multiply divisible".split())
_OPERATIONS = (FUNCTIONS - set("max min gcd lcm det floor ceil".split())) | frozenset(
    "minus negative twice thrice".split()
)
_MULTIPLES = frozenset("half double triple square cube root".split())
_CHANGING_COMMANDS = frozenset(
    "\\" + name for name in (*FUNCTIONS, *"pm mp not ne neq le leq lt ge geq gt cdot times".split())
)


def changes_next(words: list[str]) -> bool:
    """True if the last of these words make the number after them a part of something larger."""
    further, before = (word.strip("$") for word in ["", "", *words][-2:])
    if before == "=":
        return further[-1:] in ("<", ">", "!") or is_unsolved(further)
    if (further, before) == ("=", ">"):  # an arrow
        return False
    if _OPERATOR.fullmatch(before):
        # A lone "-" is a sign, a dash or the mark of a list; which one cannot be decided.
        return before in "/^÷-x" or before[0] == "\\" or bool(re.search(r"[0-9)}]$", further))
    if _ENDS_IN_OPERATOR.search(before) or before in _CHANGING_COMMANDS:
        return True
    word, previous = (text.strip("*(\"'").lower() for text in (before, further))
    ends_in_number = re.search("[0-9%]$", previous) is not None
    return (
        _is_variable(word)
        or word in _CHANGES_NEXT
        or word.endswith("n't")
        or (word == "of" and (previous in _CHANGED_BY_OF or ends_in_number))
        or (word == "by" and previous in _CHANGED_BY_BY)
        # "3 to 4", "3 and 4": two numbers, of which none is stated.
        or (word in ("to", "and") and ends_in_number)
    )


def changes_previous(words: list[str]) -> bool:
    """True if the first of these words change the number before them."""
    bare, further = (word.rstrip(".,;:?*$)") for word in [*words, "", ""][:2])
    following, further = bare.lower(), further.lower()
    if following == "and":
        return further in ("a", "one", "two", "three", "half")
    if following in ("or", "to"):
        return further in NUMBER_WORDS
    return (
        (_is_variable(bare) and bare not in SHORT_UNITS)
        or following in SCALES | FUNCTIONS
        or re.fullmatch(r"[+*/^÷!]|\\(div|over|pi|sqrt).*", following) is not None
    )


def _is_variable(word: str) -> bool:
    return re.fullmatch(r"[^\W\d]", word) is not None and word not in ("a", "A", "I")


def is_unsolved(text: str) -> bool:
    """True if the end of a text, before an equals sign, is more than a variable: "2x", "x^2"."""
    return _UNSOLVED.search(text.rstrip(" $")) is not None


def is_plain_name(name: str) -> bool:
    """True if the text before an equals sign names a value: "total cost", and not "ln x"."""
    words = name.lower().replace("{", " ").replace("}", " ").split()
    first, last = [*words[:1], ""][0], words[-1] if words else ""
    if re.fullmatch(r"(log|ln|lg|sin|cos|tan|sqrt)_?\d+\w*", first):
        return False
    if len(words) < 2:
        return True
    is_product = len(first) == 1 and first != "a"
    is_multiple = first in _MULTIPLES and len(last) == 1
    return not (is_product or is_multiple or first in _OPERATIONS)
