# SPDX-License-Identifier: Apache-2.0
"""A changed question or answer is in the columns that it was read from, in their form."""

from dataclasses import replace

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import read_row
from jaxmoe.data.column_names import name_columns
from jaxmoe.data.row_changes import write_changes
from jaxmoe.data.rows import Row

CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2=", "name": "Ann"},
]


def change(record, names=(), **changes):
    """The columns of the record's row after these changes, and those before them."""
    names = dict(names)
    row = read_row("a:1", name_columns("a:1", record, names), answers=False)
    before = dict(row.columns)
    changed = write_changes(row, replace(row, **changes), names)
    assert row.columns == before, "the row itself must not change"
    again = read_row("a:1", changed.columns, answers=False)
    assert again.question == changed.question
    assert {again.answer, *again.other_answers} == {changed.answer, *changed.other_answers}
    return changed.columns, before


@pytest.mark.parametrize("name", ["prompt", "question", "messages"])
def test_a_texts_column_has_the_new_question(name):
    columns, before = change({name: "2+2=", "answer": "4", "note": "2+2="}, question="3+3=")
    assert columns == before | {name: "3+3="}


def test_a_chat_has_it_in_its_last_turn():
    columns, before = change({"prompt": CHAT, "answer": "4"}, question="3+3=")
    assert columns["prompt"] == [*CHAT[:3], CHAT[3] | {"content": "3+3="}]
    parts = [{"type": "text", "text": "2+2"}, {"type": "text", "text": "="}]
    chat = [*CHAT[:3], {"role": "user", "content": parts}]
    columns, before = change({"messages": chat, "answer": "4"}, question="3+3=")
    assert columns["messages"][-1]["content"] == [{"type": "text", "text": "3+3="}]


@pytest.mark.parametrize(
    ("stored", "answer", "others", "written"),
    [
        ("4", "8", (), "8"),
        (4, "8", (), 8),
        (4, "8.5", (), 8.5),
        (4, "eight", (), "eight"),
        (0.5, "1.0", (), 1.0),
        (True, "False", ("false",), False),
        (True, "false", ("False",), False),
        ('["4"]', "8", ('["8"]',), '["8"]'),
        (["4", "four"], "8", ("eight",), ["8", "eight"]),
        ([4, "four"], "8", ("eight",), [8, "eight"]),
        (["4"], "8", (), ["8"]),
        ("4", "8", ("eight",), ["8", "eight"]),
        ("4", None, (), None),
        (None, "8", (), "8"),
    ],
)
def test_the_answers_column_keeps_its_type(stored, answer, others, written):
    record = {"question": "q", "answer": stored}
    columns, before = change(record, answer=answer, other_answers=others)
    assert columns == before | {"answer": written}
    assert type(columns["answer"]) is type(written)


def test_verls_answer_is_written_into_its_object():
    model = {"style": "rule", "ground_truth": 4}
    columns, before = change({"prompt": CHAT, "answer": "x", "reward_model": model}, answer="8")
    assert columns == before | {"reward_model": {"style": "rule", "ground_truth": 8}}


def test_the_files_name_of_a_column_counts_too():
    names = {"question": "problem", "answer": "final"}
    record = {"problem": "2+2=", "final": 4, "prompt": "no"}
    columns, _ = change(record, names, question="3+3=", answer="6")
    assert columns == {"problem": "3+3=", "final": 6, "question": "3+3=", "answer": 6}


def test_what_the_map_wrote_itself_stays():
    row = read_row("a:1", {"question": "2+2=", "answer": "4"}, answers=True)
    columns = {"question": "Add 2 and 2.", "answer": "four"}
    changed = replace(row, question="3+3=", answer="6", columns=columns)
    assert write_changes(row, changed, {}) is changed
    assert write_changes(row, row, {}) is row


def test_columns_that_hold_something_else_stay():
    """Of a source whose columns are not its fields, and of tests in place of an answer."""
    row = Row("Solve 2+2=", "4", columns={"question": "2+2=", "answer": "5"})
    changed = replace(row, question="Solve 3+3=", answer="6")
    assert write_changes(row, changed, {}).columns == row.columns
    row = read_row("a:1", {"question": "q", "answer": {"tests": [1]}}, answers=False)
    assert write_changes(row, replace(row, answer="6"), {}).columns == row.columns


@pytest.mark.parametrize(
    ("stored", "answer", "written", "others"),
    [
        (True, "False", False, ("false",)),
        ([True], "False", [False], ("false",)),
        ("true", "false", "false", ("False",)),
        (True, "maybe", "maybe", ()),
        (True, None, None, ()),
        ('["4"]', "8", '["8"]', ('["8"]',)),
    ],
)
def test_spellings_of_an_answer_change_with_it(stored, answer, written, others):
    row = read_row("a:1", {"question": "q", "answer": stored}, answers=True)
    assert row.other_answers
    changed = write_changes(row, replace(row, answer=answer), {})
    assert changed.columns["answer"] == written and changed.other_answers == others


def test_other_answers_of_an_old_answer_are_refused():
    row = read_row("a:1", {"question": "q", "answer": ["4", "four"]}, answers=True)
    with pytest.raises(ConfigError, match=r"a:1 .*'8' beside 'four'.*other_answers=") as caught:
        write_changes(row, replace(row, answer="8"), {})
    assert "\n" not in str(caught.value) and str(caught.value).startswith("data.map_rows")
