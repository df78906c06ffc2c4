# SPDX-License-Identifier: Apache-2.0
"""Units beside a number, in one form: a stored "5 cm" is not answered by "5 m".

Only spelling is equal here ("feet" and "ft", "$" and "dollars"); nothing is converted.
Next: jaxmoe/answers/exact_number.py reads numbers with their units.
"""

import re

# Letters alone that are units; x and n are variables.
SHORT_UNITS = frozenset("m g s h l L W V A N J K F C °".split())
CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}
_SPELLINGS = CURRENCIES | {
    "%": "percent",
    "usd": "dollar",
    "eur": "euro",
    "gbp": "pound",
    "degree": "°",
    "feet": "foot",
    "ft": "foot",
    "in": "inch",
    "yd": "yard",
    "mi": "mile",
    "meter": "m",
    "metre": "m",
    "centimeter": "cm",
    "centimetre": "cm",
    "millimeter": "mm",
    "millimetre": "mm",
    "kilometer": "km",
    "kilometre": "km",
    "gram": "g",
    "kilogram": "kg",
    "liter": "l",
    "litre": "l",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
}
_RATES = frozenset("per a an each squared cubed square cubic".split())


_KNOWN = (
    SHORT_UNITS
    | set(_SPELLINGS)
    | set(_SPELLINGS.values())
    | {
        "kg",
        "mg",
        "ml",
        "cent",
        "day",
        "week",
        "month",
        "year",
        "pound",
        "ounce",
        "mph",
        "km/h",
    }
)


def is_known_unit(text: str) -> bool:
    """True for a word that is a unit wherever it stands beside a number."""
    return spell_unit(text).partition("^")[0] in _KNOWN


def spell_unit(text: str) -> str:
    """The words of a unit in one spelling; an empty text stays empty."""
    text = re.sub(r"[{}]", "", text.replace("²", "^2").replace("³", "^3"))
    return " ".join(_spell_word(word) for word in re.split(r"[ ,.;:!?*]+", text) if word)


def _spell_word(word: str) -> str:
    if len(word) < 3 or word.isupper():  # "s" and "S" are different units
        return _SPELLINGS.get(word, word)
    word = word.lower()
    if word.endswith(("ches", "shes", "xes", "sses")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss") and len(word) > 3:
        word = word[:-1]
    return _SPELLINGS.get(word, word)


def is_same_unit(answered: str, expected: str, *, in_sentence: bool = False) -> bool:
    """True if a unit is the stored one, or one of both is left out.

    in_sentence: the words may go on after the unit, as in "5 cm long", but not to a rate.
    """
    if not answered or not expected or answered == expected:
        return True
    if expected in CURRENCIES.values():  # "$18" may be "18 dollars a day"
        return answered.split()[0] == expected
    following = answered.removeprefix(expected + " ")
    return in_sentence and following != answered and following.split()[0] not in _RATES
