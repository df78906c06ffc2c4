# SPDX-License-Identifier: Apache-2.0
"""Words and signs beside a number that make it a part of something larger.

"minus 4", "ln 4", "half of 4", "4 x" and "4 million" are not 4. A doubtful case counts as such: a
right answer that is not paid teaches a clearer form, a wrong one that is paid teaches the error.
Next: jaxmoe/data/exact_number.py reads the number itself.
"""

import re

from jaxmoe.data.units import SHORT_UNITS

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
_OPERATOR = re.compile(r"[-+*/^÷x]|\\(?:div|over)")
_CHANGES_NEXT = FUNCTIONS | frozenset(
    "minus plus negative times over not or nor modulo mod base twice thrice double triple root than "
    "power half".split()
)
# Pairs of words before a number: "half of 4" and "divided by 4" are not 4, "a total of 4" is.
_CHANGED_BY_OF = SCALES | FUNCTIONS | frozenset(
    "square cube logarithm sine cosine tangent percent multiple factor power % inverse reciprocal "
    "negative opposite".split()
)  # fmt: skip
_CHANGED_BY_BY = frozenset("divided multiplied divide multiply divisible".split())
_OPERATIONS = (FUNCTIONS - set("max min gcd lcm det floor ceil".split())) | frozenset(
    "minus negative twice thrice".split()
)
_MULTIPLES = frozenset("half double triple square cube root".split())
_CHANGING_COMMANDS = frozenset("\\" + name for name in (*FUNCTIONS, "pm", "mp", "not", "lnot"))


def changes_next(words: list[str]) -> bool:
    """True if the last of these words make the number after them a part of something larger."""
    further, before = ["", "", *words][-2:]
    if _OPERATOR.fullmatch(before):
        # A lone "-" is a sign, a dash or the mark of a list; which one cannot be decided.
        return before in "/^÷-" or before[0] == "\\" or bool(re.search(r"[0-9)}]", further))
    if re.search(r"([0-9]%?|[\^_√±∓]|\\sqrt)$", before) or before in _CHANGING_COMMANDS:
        return True
    word, previous = (text.strip("*(\"'").lower() for text in (before, further))
    is_letter = re.fullmatch(r"[^\W\d]", word) is not None and word not in ("a", "i")
    return (
        is_letter
        or word in _CHANGES_NEXT
        or word.endswith("n't")
        or (word == "of" and previous in _CHANGED_BY_OF)
        or (word == "by" and previous in _CHANGED_BY_BY)
        # "3 to 4", "3 and 4": two numbers, of which none is stated.
        or (word in ("to", "and") and bool(re.search("[0-9]$", previous)))
    )


def changes_previous(words: list[str]) -> bool:
    """True if the first of these words change the number before them."""
    following, further = [*words, "", ""][:2]
    word = following.rstrip(".,;:!?*").lower()
    if word == "and":
        return further.lower() in ("a", "one", "two", "three", "half")
    if word in ("or", "to"):
        return further.rstrip(".,;:!?*").lower() in NUMBER_WORDS
    bare = following.rstrip(".,;:!?*)")
    is_letter = re.fullmatch(r"[^\W\d]", bare) is not None and bare not in SHORT_UNITS | {"a", "I"}
    return (
        is_letter
        or word in SCALES | FUNCTIONS
        or bool(re.fullmatch(r"[+*/^÷!]|\\(div|over|pi|sqrt).*", following))
    )


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
