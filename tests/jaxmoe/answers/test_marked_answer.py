# SPDX-License-Identifier: Apache-2.0
"""Marks of an answer: #### beside the headings of Markdown."""

import pytest

from jaxmoe.answers.scoring import score_text


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("#### Step 1\nAdd.\n#### Conclusion\nSo \\boxed{5}.", "5"),
        ("\\boxed{5}\n#### Check\nIt is right.", "5"),
        ("The answer is 5.\n#### Check\nIt is right.", "5"),
        ("##### Step\nThe answer is 5", "5"),
        ("#### Final Answer\n5", "5"),
        ("#### The answer:\n\n**5**", "5"),
        ("#### Answer: 5", "5"),
        (r"#### \boxed{5}", "5"),
        ("**#### 5**", "5"),
        ("#### 5 ####", "5"),
        ("####\n5", "5"),
        ("#### C#", "C#"),
        ("#### A*", "A*"),
        ("The answer is in Europe.\n#### Paris", "Paris"),
        # a model that goes on with another question
        ("#### 5\nQuestion: 2+2? The answer is 4", "5"),
    ],
)
def test_headings_of_markdown_hide_no_answer(response, gold):
    assert score_text(response, gold) == 1.0
    assert score_text(response, "Check") == score_text(response, "4") == 0.0
