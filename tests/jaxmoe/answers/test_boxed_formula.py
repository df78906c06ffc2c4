# SPDX-License-Identifier: Apache-2.0
"""A box inside a formula marks the formula, in prose the text in it."""

import pytest

from jaxmoe.answers.scoring import score_text


@pytest.mark.parametrize(
    "response",
    (
        r"\boxed{4}^2 | $\boxed{4}_{8}$ | \boxed{4}x | \boxed{4}0 | \boxed{4}.5 | "
        r"\boxed{4}/2 | \boxed{4} \cdot 2 | \boxed{4} + 1 | $\boxed{4} x$ | 4\boxed{4} | "
        r"x\boxed{4} | \sqrt{\boxed{4}} | $\ln\boxed{4}$ | f(\boxed{4}) | x^{\boxed{4}} | "
        r"$3 - \boxed{4}$ | \frac{1}{\boxed{4}} | $\log_2 \boxed{4}$ | $\pm\boxed{4}$ | "
        r"2*\boxed{4} | $(\boxed{4})^2$ | \boxed{4}\text{ million} | \boxed{4},000"
    ).split(" | "),
)
def test_a_box_in_a_formula_is_no_number(response):
    assert score_text(response, "4") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        *(
            r"- $\boxed{4}$ | **\boxed{4}** | *\boxed{4}* | _\boxed{4}_ | so\boxed{4}. | "
            r"\textcolor{red}{\boxed{4}} | {\Large \boxed{4}} | "
            r"$5 + 2 - 3 = \boxed{4} \text{ cm}$ | \[ \therefore \boxed{4} \] | "
            r"\boxed{4} because 2 + 2 = 4 | (\boxed{4}) | \$\boxed{4} | \boxed{4} apples | "
            r"\boxed{4} - as asked | $\boxed{4}$, where $x$ is 1 | $\boxed{4}^\circ$ | "
            r"\boxed{4} cm | \boxed{4}\% | Step 3 \boxed{4}"
        ).split(" | "),
        "\\begin{align}\n&= \\boxed{4}\\\\\n",
    ],
)
def test_prose_beside_a_box_changes_nothing(response):
    assert score_text(response, "4") == 1.0


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        (r"-\boxed{4}", "-4", 1.0),
        (r"$x = -\boxed{4}$", "-4", 1.0),
        (r"-\boxed{-4}", "4", 0.0),
        (r"$- \boxed{4}$", "-4", 1.0),
        (r"+\boxed{4}", "4", 1.0),
        (r"3 - \boxed{4}", "-4", 0.0),
        (r"\boxed{\boxed{4}}^2", "4", 0.0),
        (r"\boxed{4}^2 = \boxed{16}", "16", 1.0),
    ],
)
def test_a_sign_before_a_box_belongs_to_it(response, gold, score):
    assert score_text(response, gold) == score
