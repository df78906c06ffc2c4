# SPDX-License-Identifier: Apache-2.0
"""Tests that did not run to their end have passed nothing."""

import pytest

from jaxmoe.graders.grading import GradeStatus, grade_code
from tests.jaxmoe.code_cheats import HONEST


@pytest.mark.parametrize("end", ["done = \\", "assert candidate(3) == 6, \\"])
def test_tests_that_swallow_the_proof_pay_nothing(pool, end):
    """The last line of these tests takes in the line that would show that they ended."""
    plain = "assert candidate(2) == 4\n"
    assert grade_code(pool, HONEST, "f", plain, timeout_s=20.0).status is GradeStatus.PASSED
    assert grade_code(pool, HONEST, "f", plain + end, timeout_s=20.0).status is GradeStatus.BAD_TEST
