# SPDX-License-Identifier: Apache-2.0
"""Units of stored answers: another one is wrong, another spelling is not."""

import pytest

from jaxmoe.answers.scoring import score_text


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        ("5 kg", "5 cm", 0.0),
        ("It is 5 m.", "5 cm", 0.0),
        ("5 cm^2", "5 cm", 0.0),
        ("5 apples", "5 pears", 0.0),
        ("£5", "$5", 0.0),
        ("5 cents", "$5", 0.0),
        ("5 S", "5 s", 0.0),
        ("5 ms", "5 m", 0.0),
        ("5 km/h", "5 km", 0.0),
        ("5%", "5 cm", 0.0),
        (r"\boxed{5 m}", "5 cm", 0.0),
        (r"\boxed{5} m", "5 cm", 0.0),
        ("5 cm", "5 cm^2", 0.0),
        ("5 inches", "5 in", 1.0),
        ("5 degrees", r"5^\circ", 1.0),
        ("It costs $5 a day.", "$5", 1.0),
        (r"\boxed{5\text{ cm}^2}", r"5\mbox{ cm}^2", 1.0),
        ("5 percent", r"5\%", 1.0),
        ("5 dollars a day", "$5", 1.0),
        ("5 hours", "5 hour", 1.0),
        (r"\boxed{5} cm", "5 cm", 1.0),
    ],
)
def test_a_unit_is_valid_in_any_spelling(response, gold, score):
    assert score_text(response, gold) == score
