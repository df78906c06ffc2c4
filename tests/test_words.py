# SPDX-License-Identifier: Apache-2.0
"""Names and docstrings of the product are words that somebody of the field understands at once."""

import pytest

from tests.words import PRODUCT, ROOT, count_words

# exceptions, each with its reason
NARRATION = {
    "jaxmoe/config/__init__.py to": "`observe.to` is what users type",
}
DUPLICATES = {
    "main": "the entry point of a command",
}


@pytest.fixture(scope="module")
def words():
    return count_words([ROOT / folder for folder in PRODUCT])


def test_no_name_is_a_word_of_narration(words):
    names = {f"{line.partition(':')[0]} {line.split()[-1]}" for line in words.narration}
    assert names == NARRATION.keys(), "name what the thing is: see python tests/words.py"


def test_a_public_function_name_is_of_one_module(words):
    assert words.duplicates.keys() == DUPLICATES.keys(), words.duplicates


def test_docstrings_begin_with_noun_phrases_or_verbs(words):
    assert not words.openings


def test_most_function_names_say_verb_and_object(words):
    assert len(words.one_word) <= 0.2 * words.functions


@pytest.mark.parametrize(
    "code, found",
    [
        ("def kept_BT(): pass", "narration"),
        ("for told in range(3): pass", "narration"),
        ("def pack(rows):\n    'Whether rows fit.'", "openings"),
        ("def pack(rows): pass", "one_word"),
    ],
)
def test_each_of_them_would_be_seen(tmp_path, code, found):
    (tmp_path / "module.py").write_text(code)
    assert getattr(count_words([tmp_path]), found)
    (tmp_path / "module.py").write_text("def pack_rows(rows_BT):\n    'Rows of equal length.'")
    words = count_words([tmp_path])
    assert not (words.narration or words.openings or words.one_word)
