# SPDX-License-Identifier: Apache-2.0
"""Words beside a number make it a part of something larger, or do not."""

import pytest

from jaxmoe.answers.scoring import score_text


@pytest.mark.parametrize(
    "response",
    (
        r"negative 4 | It is minus 4. | log 4 | sqrt 4 | sin 4 | the root of 4 | x 4 | f 4 | "
        r"twice 4 | 10% of 4 | 1 over 4 | 4 out of 4 | 8 divided by 4 | between 3 and 4 | "
        r"2 to 4 | less than 4 | not 4 | it isn't 4 | base 4 | 4 y | 4 e | 4 b | 4 ln | "
        r"4 or five | \pm 4 | $\ln 4$ | $4\,x$ | $x 4$ | $- 4$ | 2 ** 4 | x >= 4 | x != 4 | "
        r"x \le 4 | x^2 = 4 | The answer is 2x = 4 | \boxed{x y = 4} | \boxed{twice x = 4}"
    ).split(" | "),
)
def test_what_changes_a_number_beside_it_is_seen(response):
    assert score_text(response, "4") == 0.0


@pytest.mark.parametrize(
    "response",
    (
        r"a total of 4 | She has 4 left. | They need 4 a day | 4 I think | "
        r"It is 4, I think. | result => 4 | - **4** | - x = 4 | at least 4 | $4$ | 2^2 = 4 | "
        r"4 km/h | 4 °C"
    ).split(" | "),
)
def test_prose_beside_a_number_changes_nothing(response):
    assert score_text(response, "4") == 1.0
