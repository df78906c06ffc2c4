# SPDX-License-Identifier: Apache-2.0
"""Names and docstrings are words that somebody of the field understands at once."""

import pytest

from tests.words import MAX_TEST_WORDS, PRODUCT, ROOT, count_words

# exceptions, each with its reason
NARRATION = {"jaxmoe/config/__init__.py to": "`observe.to` is what users type"}
DUPLICATES = {"main": "the entry point of a command"}
NARRATING_HELPERS = {
    "do_GET": "what http.server calls",
    "do_POST": "what http.server calls",
    "look": "a tool that a policy calls by this name",
}


@pytest.fixture(scope="module")
def words():
    return count_words([ROOT / folder for folder in PRODUCT])


@pytest.fixture(scope="module")
def tests_words():
    return count_words([ROOT / "tests"])


def test_no_name_is_a_word_of_narration(words):
    names = {f"{line.partition(':')[0]} {line.split()[-1]}" for line in words.narration}
    assert names == NARRATION.keys(), "name what the thing is: see python tests/words.py"


def test_a_public_function_name_is_of_one_module(words):
    assert words.duplicates.keys() == DUPLICATES.keys(), words.duplicates


def test_docstrings_begin_with_noun_phrases_or_verbs(words):
    assert not words.openings


def test_most_function_names_say_verb_and_object(words):
    assert len(words.one_word) <= 0.2 * words.functions


def test_a_tests_name_has_at_most_eight_words(tests_words):
    assert not tests_words.long_tests, f"say what must hold in {MAX_TEST_WORDS} words"


def test_helpers_of_tests_are_named_without_narration(tests_words):
    names = {line.split()[-1] for line in tests_words.narrating}
    assert names == NARRATING_HELPERS.keys(), tests_words.narrating


@pytest.mark.parametrize(
    "code, kind",
    [
        ("def kept_BT(): pass", "narration"),
        ("for told in range(3): pass", "narration"),
        ("def pack(rows):\n    'Whether rows fit.'", "openings"),
        ("def pack(rows): pass", "one_word"),
        ("def given(): pass", "narrating"),
        ("def test_a_name_that_goes_on_and_on_tires_readers(): pass", "long_tests"),
    ],
)
def test_each_fault_of_a_name_is_counted(tmp_path, code, kind):
    (tmp_path / "module.py").write_text(code)
    assert getattr(count_words([tmp_path]), kind)
    (tmp_path / "module.py").write_text("def pack_rows(rows_BT):\n    'Rows of equal length.'")
    words = count_words([tmp_path])
    assert not (words.narration or words.openings or words.one_word or words.long_tests)
