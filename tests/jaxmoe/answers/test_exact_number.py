# SPDX-License-Identifier: Apache-2.0
"""A text is a number as a whole, exactly, or no number."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.answers.exact_number import read_last_quantity, read_number


def read_last_number(text):
    quantity = read_last_quantity(text)
    return None if quantity is None else quantity.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.50", Fraction(2469, 2)),
        (" $18 ", Fraction(18)),
        ("-$3", Fraction(-3)),
        ("$-3", Fraction(-3)),
        ("−5", Fraction(-5)),
        ("3/4", Fraction(3, 4)),
        ("12.", Fraction(12)),
        ("12..", None),
        (".5", Fraction(1, 2)),
        ("1/0", None),
        ("--1", None),
        ("12 apples", None),
        ("1e9", Fraction(10**9)),
        ("1e-7", Fraction(1, 10**7)),
        ("2E+3", Fraction(2000)),
        ("10^5", Fraction(10**5)),
        ("1 000 000", Fraction(10**6)),
        ("1,000 000", None),
        ("12,34", None),
        ("", None),
        ("9" * 10_000, None),
        ("1e999999999", None),
        ("10^{999999999}", None),
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert read_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18 dollars a day", 18),
        ("x = 18", 18),
        ("18 square feet.", 18),
        ("5 m", 5),
        ("5 a", None),
        ("5 n", None),
        ("18 words and words and words and words", None),
        ("5 twenty-thirds", None),
        ("18dollars", None),
        ("5 m^2", 5),
        ("5 m^4", None),
    ],
)
def test_a_unit_may_follow_where_units_are_allowed(text, value):
    assert read_number(text, units=True) == value
    assert read_number(text) is None


@given(st.fractions(max_denominator=10**9))
def test_every_fraction_reads_as_itself(value):
    top, bottom = value.as_integer_ratio()
    assert read_number(f"{top}/{bottom}") == value
    assert read_number(rf"\dfrac{{{top}}}{{{bottom}}}") == value
    assert read_last_number(f"It is {top}/{bottom}.") == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6), st.integers(-300, 300))
def test_decimals_keep_every_digit(value, exponent):
    assert read_number(format(value, "f")) == Fraction(value)
    assert read_number(f"{value:f}e{exponent}") == Fraction(value) * Fraction(10) ** exponent


@given(st.text())
def test_any_text_can_be_read(text):
    for value in (read_number(text), read_number(text, units=True), read_last_number(text)):
        assert value is None or isinstance(value, Fraction)


def test_a_number_cut_by_the_window_is_none():
    assert read_last_number("1" + "0" * 2000) is None
    assert read_last_number("so " * 3000 + "17") == 17
