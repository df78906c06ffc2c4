# SPDX-License-Identifier: Apache-2.0
"""Checkers of if-verifiable: offline, silent, the same every time, and never raised by a text."""

import hashlib
import importlib.util
import math
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import ConfigError
from jaxmoe.graders.instructions import checkers
from jaxmoe.graders.instructions.checkers import (
    UNAVAILABLE,
    Instruction,
    check_instruction,
    checker_classes,
    follows_instruction,
)
from tests.jaxmoe.graders.instructions.package import needs_package

HOSTILE = [
    "",
    " ",
    "\n",
    "\0",
    "\ud800",
    ".",
    ",",
    '"',
    "'",
    "?!",
    "[" * 2000,
    "<" * 2000,
    "{" * 2000,
    '"' * 2001,
    "\n" * 900,
    "a" * 999,
    "* \n" * 500,
    "9" * 5000,
    "١٢٣",
    "🎉" * 50,
    "\u202e",
    "a,b\n\0,c",
    '"a\nb',
    "x" * 140_000,
    "İ",
    "\x1c",
    "\u2028",
    "Zimbabwe\n" * 60,
    "a. " * 60,
    "ProductID,Category,Brand,Price,Stock\n",
    "StudentID\tSubject\tGrade\tSemester\tScore\n\t\t\t\t",
    "Question 1. a\nA. b",
    "<i>",
    "${7*7}",
    "verdict: 1",
    "a\r\nb",
    "-- ",
    "\\",
    "(?P<x",
    "%s {0}",
]
PROMPT = {"prompt_to_repeat": "Say this again, please."}
GIVEN = {
    "combination:repeat_prompt": PROMPT,
    "repeat:repeat_change": PROMPT,
    "repeat:repeat_span": PROMPT | {"n_start": 1, "n_end": 3},
    "ratio:overlap": {"reference_text": "a text to compare with", "percentage": 50},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": 2,
        "nth_paragraph": 1,
        "first_word": "so",
    },
}


def complete(name):
    """An instruction with arguments that the package would draw."""
    if name in GIVEN:
        return Instruction(name, GIVEN[name])
    state = random.getstate()
    random.seed(1)
    checker = checker_classes()[name](name)
    checker.build_description()
    random.setstate(state)
    return Instruction(name, checker.get_instruction_args() or {})


@pytest.fixture(scope="module")
def instructions():
    return [complete(name) for name in checker_classes()]


@needs_package
def test_all_but_those_that_download_are_available(instructions):
    assert len(instructions) == 76 and not checker_classes().keys() & {*UNAVAILABLE}
    for instruction in instructions:
        check_instruction(instruction)


@needs_package
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_hostile_text_raises(text, instructions):
    results = [follows_instruction(text, x) for x in instructions]
    assert set(results) <= {True, False, None}
    if not text.strip():
        assert set(results) == {False}, "an empty answer follows nothing"


@needs_package
@given(st.text(max_size=60) | st.text("\"'[]{}()<>*,.-\n\t 1aA", max_size=60))
def test_no_text_raises(text):
    for name in checker_classes():
        # Detecting a language takes a hundred times as long as all others.
        if name not in checkers._DETECT_LANGUAGE:
            assert follows_instruction(text, complete(name)) in (True, False, None)


@needs_package
def test_a_text_without_a_language_is_in_none():
    """The package pays for it: a policy would answer in digits."""
    for language in ("en", "de"):
        asked = Instruction("language:response_language", {"language": language})
        assert follows_instruction("12345 ...", asked) is False
    german = "Das ist ein ganz normaler Satz, den jeder sofort versteht."
    assert follows_instruction(german, Instruction(asked.id, {"language": "de"})) is True


@needs_package
def test_a_checker_that_cannot_read_an_answer_says_none():
    assert follows_instruction("[" * 20_000, complete("detectable_format:json_format")) is None


SAME = """
import hashlib, sys
from jaxmoe.graders.instructions.checkers import Instruction, follows_instruction
asked = [Instruction("language:response_language", {"language": x}) for x in ("fr", "de", "it")]
asked.append(Instruction("keywords:forbidden_words", {"forbidden_words": ["hallo", "b", "a"]}))
# The package alone detects other languages in this text from one call to the next.
once = [follows_instruction("Hallo du da", x) for x in asked]
for _ in range(99):
    assert [follows_instruction("Hallo du da", x) for x in asked] == once
print(hashlib.sha256(repr(once).encode()).hexdigest(), sum(once))
"""
# A process that ends when it opens a socket. The checkers must neither need one nor print.
OFFLINE = """
import os, sys
sys.addaudithook(lambda event, args: os._exit(7) if event.startswith("socket.") else None)
"""


@needs_package
def test_an_answer_gets_the_same_result_100_times_in_3_processes_without_a_network():
    printed = set()
    for seed in ("0", "1", "random"):
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", OFFLINE + SAME],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            check=True,
        )
        assert run.stderr == ""
        printed.add(run.stdout)
    assert len(printed) == 1


UNCHANGED = """
import random, sys
from jaxmoe.graders.instructions.checkers import Instruction, follows_instruction
before = random.getstate()
keywords = {"keywords": ["word"]}
assert follows_instruction("a word", Instruction("keywords:existence", keywords))
assert random.getstate() == before
assert not [name for name in sys.modules if name.split(".")[0] in ("if_verifiable", "nltk")]
"""


@needs_package
def test_the_import_leaves_other_modules_and_the_random_state_as_they_were():
    # In a process of its own, because the type checks of the tests draw random numbers.
    run = subprocess.run(
        [sys.executable, "-c", UNCHANGED],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr


@needs_package
@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("punctuation:no_coma", {}, "no checker 'punctuation:no_coma'. Did you mean punc"),
        ("zzz", {}, "no checker 'zzz'. Known: "),
        ("format:title_case", {}, "format:title_case is not available; it needs data that nltk"),
        ("keywords:existence", {}, r"all of its kwargs \(keywords\), got {}.*something random"),
        ("keywords:existence", {"keywords": None}, "all of its kwargs"),
        (
            "length_constraints:number_words",
            {"num_words": math.nan, "relation": "at least"},
            "all of its kwargs",
        ),
        ("keywords:existence", {"keyword": "a"}, "must accept its kwargs.*Its kwargs: keywords"),
        ("keywords:existence", {"keywords": ["c++", "("]}, "must be able to check an answer"),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 2, "relation": "exactly"},
            "must accept its kwargs",
        ),
        ("repeat:repeat_span", PROMPT | {"n_start": 0, "n_end": 2}, "all of its kwargs"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(name, kwargs, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_instruction(Instruction(name, kwargs))
    assert "\n" not in str(caught.value)


@needs_package
def test_whole_numbers_of_arrow_tables_are_integers():
    asked = Instruction(
        "length_constraints:number_words",
        {"num_words": 2.0, "relation": "at least", "num_bullets": math.nan},
    )
    check_instruction(asked)
    assert follows_instruction("two words", asked) and not follows_instruction("one", asked)


def test_without_the_package_the_command_to_type_is_named(monkeypatch):
    checkers.checker_classes.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed. Type: pip install --no-deps if-verif"):
        checker_classes()


def test_hostile_texts_are_different():
    assert len({hashlib.sha256(repr(t).encode()).digest() for t in HOSTILE}) == len(HOSTILE)
