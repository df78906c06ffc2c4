# SPDX-License-Identifier: Apache-2.0
"""Stored chats with tool calls: in OpenAI's format, in harmony's, and as prompts."""

import json

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import read_row
from jaxmoe.data.chat_template import ChatTemplate
from jaxmoe.data.rows import Message
from jaxmoe.data.sources import open_source
from jaxmoe.data.templates import Template
from jaxmoe.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
USER, LAST = {"role": "user", "content": "69*69="}, {"role": "user", "content": "And 2+2=?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "mul", "arguments": '{"a": 69}'}}
OPENAI = [
    USER,
    {"role": "assistant", "content": "I multiply.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "4761"},
    {"role": "assistant", "content": "It is 4761.", "tool_calls": None},
    LAST,
]
HARMONY = [
    USER,
    {"role": "assistant", "content": "I multiply.", "channel": "commentary"},
    {
        "role": "assistant",
        "content": '{"a": 69}',
        "channel": "commentary",
        "recipient": "functions.mul",
        "content_type": "<|constrain|>json",
    },
    {"role": "tool", "name": "functions.mul", "content": "4761"},
    {"role": "assistant", "content": "It is 4761.", "channel": "final"},
    LAST,
]


def read_chat(chat):
    return read_row("a:1", {"messages": chat, "answer": "4"}, answers=True)


def test_both_formats_are_the_same_messages():
    row = read_chat(OPENAI)
    assert row.earlier == (
        Message("user", "69*69="),
        Message("assistant", "I multiply.", channel="commentary"),
        Message(
            "assistant",
            '{"a": 69}',
            channel="commentary",
            recipient="functions.mul",
            content_type="json",
        ),
        Message("tool", "4761", name="functions.mul"),
        Message("assistant", "It is 4761."),
    )
    assert row.question == "And 2+2=?" and row.columns["messages"] is OPENAI
    template = Template("harmony")
    text, tokens = template.render(row, BYTES)
    assert (text, tokens) == template.render(read_chat(HARMONY), BYTES)
    assert (
        "<|start|>assistant<|channel|>commentary to=functions.mul <|constrain|>json<|message|>"
        '{"a": 69}<|call|><|start|>functions.mul<|channel|>commentary to=assistant<|message|>4761'
        "<|end|><|start|>assistant<|channel|>final<|message|>It is 4761.<|end|>"
    ) in text


def test_calls_without_content_and_object_arguments_are_read():
    calls = [
        {**CALL, "id": str(i), "function": {"name": "mul", "arguments": {"é": i}}} for i in range(2)
    ]
    tool = {"role": "tool", "tool_call_id": "1", "content": ""}
    chat = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, tool, LAST]
    _, first, second, reply = read_chat(chat).earlier
    assert [m.content for m in (first, second)] == ['{"é": 0}', '{"é": 1}']
    assert reply == Message("tool", "", name="functions.mul")


def test_python_is_called_by_its_own_name():
    call = {
        "role": "assistant",
        "content": "1+1",
        "channel": "analysis",
        "recipient": "python",
        "content_type": "code",
    }
    row = read_chat([USER, call, {"role": "tool", "name": "python", "content": "2"}, LAST])
    text, _ = Template("harmony").render(row, BYTES)
    assert "to=python<|channel|>analysis <|constrain|>code<|message|>1+1<|call|>" in text
    assert "<|start|>python to=assistant<|channel|>analysis<|message|>2<|end|>" in text


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
            r"messages\[1\] must have tool_calls with names and arguments, got",
        ),
        ({"role": "assistant", "content": "", "tool_calls": {"name": "f"}}, "must have tool_calls"),
        ({"role": "assistant", "content": "a", "function_call": {"name": "f"}}, "no tool calls"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "no tool calls"),
        ({"role": "tool", "content": "4"}, "must have the name of the tool, or the tool_call_id"),
        ({"role": "tool", "content": None, "name": "f"}, "a content that is a non-empty text"),
        ({"role": "assistant", "content": "a", "channel": "secret"}, "must have the channel"),
        ({"role": "assistant", "content": "a", "recipient": 3}, "must have a text as recipient"),
        ({"role": "assistant", "content": ""}, "a content that is a non-empty text"),
    ],
)
def test_an_unwritable_turn_is_refused_in_one_line(turn, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_chat([USER, turn, LAST])
    assert str(caught.value).startswith("a:1: messages[1]") and "\n" not in str(caught.value)


def test_a_chat_cannot_end_with_a_tools_turn():
    with pytest.raises(ConfigError, match=r"messages\[2\] \(the last\) must have a role \(user\)"):
        read_chat(OPENAI[:3])


@pytest.mark.parametrize("text", ["auto", "chat", "{question}"])
def test_other_templates_refuse_tool_calls(text):
    chat = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(ConfigError, match=r"must be .*harmony for a chat .* such as a:1"):
        Template(text, chat=chat).render(read_chat(OPENAI), BYTES)


def test_rows_with_different_recipients_are_different(tmp_path):
    renamed = json.loads(json.dumps(HARMONY).replace("functions.mul", "functions.add"))
    rows = [read_chat(chat) for chat in (HARMONY, renamed)]
    assert rows[0].identity != rows[1].identity
    sources = []
    for i, chat in enumerate((HARMONY, renamed)):
        path = tmp_path / f"{i}.jsonl"
        path.write_text(json.dumps({"messages": chat, "answer": "4"}))
        sources.append(open_source(str(path)))
    assert sources[0].digest != sources[1].digest
    assert Message("user", "q").identity == ("user", "q")
