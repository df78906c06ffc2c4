# SPDX-License-Identifier: Apache-2.0
"""Rows as people have them: plain, TRL's, verl's; what is none is named by file and line."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import read_row
from jaxmoe.data.rows import Message
from jaxmoe.data.sources import open_source

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT[-1:],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
    "answer": "long ago I thought 5",
}


def _write_file(tmp_path, *rows, name="a.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_chats_have_system_earlier_and_last_turns():
    row = read_row("a:1", {"prompt": CHAT, "answer": 4}, answers=True)
    assert row.question == "2+2=" and row.system == "Be brief."
    assert row.earlier == (Message("user", "1+1="), Message("assistant", "2"))
    assert read_row("a:1", {"prompt": "q", "answer": "4", "system": "s"}, answers=True).system == (
        "s"
    )


def test_files_preserve_every_column_of_verl_and_trl(tmp_path):
    trl = {"prompt": "q", "solution": "$4$", "level": 3}
    source = open_source(_write_file(tmp_path, VERL, trl))
    assert [source[i].answer for i in range(2)] == ["4", "$4$"]
    assert [source[i].columns for i in range(2)] == [VERL, trl]
    assert source[1].location.endswith("a.jsonl:2")


@pytest.mark.parametrize(
    ("answer", "text", "correct", "incorrect"),
    [
        (7, "7", "It is 7", "8"),
        (-0.5, "-0.5", "-1/2", "0.5"),
        (1e-7, "0.0000001", "1e-7", "1"),
        (["four", 4], "four", "4.0", "five"),
        (4.0, "4.0", "4", "5"),
    ],
)
def test_numbers_and_lists_are_answers(tmp_path, answer, text, correct, incorrect):
    source = open_source(_write_file(tmp_path, {"question": "q", "answer": answer}))
    assert source[0].answer == text and source.score(text, 0) == 1.0
    assert source.score(incorrect, 0) == 0.0
    assert source.score(correct, 0) == 1.0


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "1"}\r\n')
    assert open_source(str(path))[0].question == "q"


def test_an_answer_is_needed_where_nothing_else_scores(tmp_path):
    path = _write_file(tmp_path, {"prompt": "q"}, {"prompt": "p", "answer": {"x": 1}})
    with pytest.raises(ConfigError, match=r"a\.jsonl:1 must have a column answer, ground_truth"):
        open_source(path)
    source = open_source(path, answers=False)
    assert source[0].answer is source[1].answer is None
    assert source[1].columns["answer"] == {"x": 1}


@pytest.mark.parametrize("write", [json.dumps, str], ids=["json", "python"])
def test_a_chat_stored_as_text_is_a_chat(write):
    """Else it would be trained on as a question full of brackets."""
    for name in ("prompt", "question", "messages"):
        row = read_row("a:1", {name: write(CHAT), "answer": "4"}, answers=True)
        assert (row.question, row.system, len(row.earlier)) == ("2+2=", "Be brief.", 2)
        assert row.columns == {name: CHAT, "answer": "4"}, "functions are shown the chat"


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "user", "content": "2+2="',
        "[{'role': 'user'} {'role': 'x'}]",
        '{"role": "user", "content": "2+2="}',
        '[{"role": "user", "content": "a"}] what?',
    ],
)
def test_text_that_resembles_a_chat_is_refused(text):
    with pytest.raises(ConfigError, match=r"a:1: prompt looks like a chat stored as text"):
        read_row("a:1", {"prompt": text, "answer": "4"}, answers=True)


def test_a_question_about_json_stays_a_text():
    for text in ("Sort [3, 1]", '{"a": 1} has which key?', "[{'x': 1}]"):
        assert read_row("a:1", {"prompt": text, "answer": "4"}, answers=True).question == text


def test_openais_content_parts_and_message_columns_are_read():
    parts = [{"type": "text", "text": "2+2"}, {"type": "text", "text": "=", "image_url": None}]
    chat = [*CHAT[:-1], {"role": "user", "content": parts}]
    row = read_row("a:1", {"messages": chat, "answer": "4"}, answers=True)
    assert row.question == "2+2\n=" and row.columns["messages"] is chat
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    with pytest.raises(ConfigError, match=r"messages\[0\] \(the last\) must have a role .user"):
        read_row("a:1", {"messages": image, "answer": "4"}, answers=True)


def test_verls_columns_stored_as_json_are_read(tmp_path):
    stored = {**VERL, **{k: json.dumps(VERL[k]) for k in ("prompt", "reward_model", "extra_info")}}
    row = open_source(_write_file(tmp_path, stored))[0]
    assert (row.question, row.answer, row.columns) == ("2+2=", "4", VERL)
    with pytest.raises(ConfigError, match="reward_model looks like an object stored as text"):
        read_row("a:1", {"prompt": "q", "reward_model": "{ground_truth"}, answers=True)


def test_boolean_answers_are_read_in_python_and_json(tmp_path):
    source = open_source(_write_file(tmp_path, {"question": "q", "answer": False}))
    assert source[0].answer == "False"
    assert [source.score(t, 0) for t in ("False", "false", "True", "0")] == [1.0, 1.0, 0.0, 0.0]


_CELL = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "ground_truth", "x"]), inner, max_size=3
        )
        | st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "assistant"]), "content": inner}
        )
    ),
    max_leaves=6,
)
_NAMES = ["prompt", "messages", "question", "answer", "solution", "system", "reward_model", "other"]


@given(st.dictionaries(st.sampled_from(_NAMES), _CELL) | _CELL, st.booleans())
def test_any_row_is_read_completely_or_refused(record, answers):
    try:
        row = read_row("file:3", record, answers=answers)
    except ConfigError as error:
        assert str(error).startswith("file:3") and "\n" not in str(error)
        return
    assert row.question.strip() and row.columns is record
    assert row.answer is not None or not answers
    assert all(
        m.role == "tool" or m.role in ("user", "assistant") and m.content for m in row.earlier
    )


@pytest.mark.parametrize(
    ("stored", "answers"),
    [
        ('["34"]', ("34", '["34"]')),
        ('["34", "35"]', ('["34", "35"]',)),  # perhaps a list is the answer
        ("[34]", ("[34]",)),
        ('["34"', ('["34"',)),
        ("True", ("True", "true")),
        ("false", ("false", "False")),
        (True, ("True", "true")),
    ],
)
def test_answers_that_a_table_stores_as_text(stored, answers):
    row = read_row("a:1", {"prompt": "q", "answer": stored}, answers=True)
    assert (row.answer, *row.other_answers) == answers
