# SPDX-License-Identifier: Apache-2.0
"""Tests of code in each form are run; a row whose tests decide nothing is refused by its line."""

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Row
from jaxmoe.graders.code_scorer import check_tests
from jaxmoe.graders.code_tests import find_test_fault
from jaxmoe.graders.grading import GradeStatus, grade_code
from tests.jaxmoe.code_cheats import HONEST, PROMPT

FORMS = {
    "check without a parameter": "def check():\n    assert f(2) == 4",
    "much output": "print('x' * 30_000)\nassert f(2) == 4",
    "output sent elsewhere": "import io, sys\nsys.stdout = io.StringIO()\nassert f(2) == 4",
    "unittest": """
import unittest
class TestF(unittest.TestCase):
    @unittest.skip("later")
    def test_later(self): self.fail()
    @unittest.expectedFailure
    def test_open(self): self.assertEqual(f(2), 5)
    def test_parts(self):
        with self.subTest(x=2): self.assertEqual(f(2), 4)
if __name__ == "__main__":
    unittest.main()
""",
    "unittest, run without a look at its result": """
from unittest import TestCase, TestLoader, TextTestRunner
class Cases(TestCase):
    def setUp(self): self.expected = 4
    def test_f(self): self.assertEqual(f(2), self.expected)
TextTestRunner().run(TestLoader().loadTestsFromTestCase(Cases))
""",
    "functions of pytest": "def test_a():\n    assert f(2) == 4\ndef test_b(n=5):\n    "
    "assert f(n) == 10",
    "a class of pytest": "class TestF:\n    def test_a(self):\n        assert f(2) == 4",
    "functions that are called": "def test(x, y):\n    assert f(x) == y\ntest(2, 4)",
    "all of a map": "assert all(map(lambda c: f(c[0]) == c[1], [(2, 4), (5, 10)]))",
    "a zip": "for got, want in zip(map(f, [2, 5]), [4, 10]):\n    assert got == want",
}
WRONG = {
    "wrong": "def f(x): return 3",
    "ends a loop": "def f(x): raise StopIteration",
    "ends a loop by a class of that name": "class StopIteration(Exception): pass\n"
    "def f(x): raise StopIteration",
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_pays_right_code_alone(pool, name):
    def grade(code):
        return grade_code(pool, code, "f", FORMS[name], setup=PROMPT, timeout_s=20.0).status

    assert find_test_fault(FORMS[name], "f", PROMPT) == ""
    assert grade(HONEST) is GradeStatus.PASSED
    wrong = "ends a loop" if "(map(" in FORMS[name] else "wrong"
    assert grade(WRONG[wrong]) in (GradeStatus.FAILED, GradeStatus.RAISED)


def test_a_class_named_stopiteration_ends_no_loop(pool):
    code = WRONG["ends a loop by a class of that name"]
    grade = grade_code(pool, code, "f", FORMS["all of a map"], timeout_s=20.0)
    assert grade.status is GradeStatus.RAISED


FAULTS = {
    "def test_a(given):\n    assert f(2) == given": "test_a needs arguments",
    "async def test_a():\n    assert f(2) == 4": "test_a needs arguments, or an event loop",
    "def setup_function():\n    pass\ndef test_a():\n    assert f(2)": "setup_function is run by",
    "class TestF:\n def setup_method(self): 0\n def test_a(self): assert f(2)": "setup_method is",
    "def check(f, g):\n    assert f(2) == g(2)": "check needs more than one argument",
    "import pytest\ndef test_a():\n    assert f(2)": "they import pytest",
    "from solution import f\nassert f(2) == 4": "call f without an import; they import solution",
    "def test_a():\n    import numpy.testing\n    assert f(2)": "they import numpy",
    "def check(g):\n    assert g(lambda x: x) == 3": "pass plain data, and f gets a lambda",
    "class T:\n    pass\nassert candidate(1, x=T()) == 3": "and f gets an object of T",
    "assert f(x for x in 'ab') == 3": "and f gets a generator",
    "assert f(range(3)) == 3": "and f gets an object of range",
    "assert 1 == 1": "must call f or candidate",
    "print(f(2) == 4)": "have no assertion",
    "1 +": "must be a Python program",
    "assert f(2) == 4\n#" + "x" * 1_000_000: "may have 999,000 characters",
}


@pytest.mark.parametrize("tests", FAULTS, ids=FAULTS.values())
def test_tests_that_decide_nothing_are_refused_by_line(tests):
    columns = {"test": tests, "entry_point": "f"}
    row = Row("Double x.", "", columns=columns, location="rows.jsonl:7")
    with pytest.raises(ConfigError) as caught:
        check_tests([row])
    assert FAULTS[tests] in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("rows.jsonl:7: score_code's tests ")


def test_tests_that_may_decide_are_accepted():
    optional = "try:\n    import numpy\nexcept ImportError:\n    numpy = None\nassert f(2) == 4"
    assert find_test_fault(optional, "f") == ""
    assert find_test_fault("def check(g):\n    assert g(2) == 4", "f") == ""
    refused = "try:\n    f(lambda: 0)\nexcept ValueError:\n    pass\nassert f(2) == 4"
    assert find_test_fault(refused, "f") == ""
    number = "class T(int):\n    pass\nassert f(T(2), sorted([2], key=lambda x: x)) == 4"
    assert find_test_fault(number, "f") == ""
    helper = "def expect(x, y):\n    assert x == y\n"
    assert find_test_fault("expect(f(2), 4)", "f", setup=helper) == ""
