# SPDX-License-Identifier: Apache-2.0
"""Tools that a row declares, and what exports make of stored calls."""

import json
from dataclasses import replace

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.cells import read_row
from jaxmoe.data.chat_template import ChatTemplate
from jaxmoe.data.rows import Message, Row, ToolDescription
from jaxmoe.data.templates import Template
from jaxmoe.data.tokenizer import ByteTokenizer

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
WEATHER = ToolDescription("weather", "The weather.", PARAMETERS)
TOKENIZER = ByteTokenizer()


def read(**columns):
    return read_row("a:1", {"answer": "1", **columns}, answers=True)


@pytest.mark.parametrize(
    "tools",
    [
        TOOLS,
        [FUNCTION],
        json.dumps(TOOLS),
        [FUNCTION | {"parameters": json.dumps(PARAMETERS)}],
        [{"function": FUNCTION | {"parameters": PARAMETERS | {"title": None}}, "x": None}],
    ],
)
def test_every_form_of_the_column_is_read(tools):
    assert read(prompt="q", tools=tools).tools == (WEATHER,)


def test_tools_of_the_first_turn_are_read():
    chat = [{"role": "system", "content": "s", "tools": TOOLS}, {"role": "user", "content": "q"}]
    assert read(prompt=chat).tools == (WEATHER,) and read(prompt="q").tools == ()
    with pytest.raises(ConfigError, match="a:1 must declare its tools once"):
        read(prompt=chat, tools=TOOLS)


@pytest.mark.parametrize(
    "tools",
    [
        "{",
        "a text",
        {"name": "f"},
        [{"function": {"name": 3}}],
        [5],
        [{"name": "two words"}],
        [FUNCTION, FUNCTION],
    ],
)
def test_what_is_no_list_of_tools_is_refused(tools):
    with pytest.raises(ConfigError, match=r"a:1: (the )?column tools"):
        read(prompt="q", tools=tools)


def test_harmony_declares_tools_of_row_and_run():
    template = Template(
        "harmony", tools=(replace(WEATHER, description="Ours."), ToolDescription("add", "Add.", {}))
    )
    look_tool = {"name": "look", "description": "Look.", "parameters": {}}
    text, _ = template.render(read(prompt="q", tools=[*TOOLS, look_tool]), TOKENIZER)
    assert "Ours." in text and "The weather." not in text and "type look = () => any" in text
    assert text.count("type weather") == text.count("type add") == 1


def test_a_chat_template_gets_the_tools():
    chat = ChatTemplate("{{ tools | tojson }}{{ messages[0].content }}", {})
    text, _ = Template("chat", chat=chat).render(read(prompt="q", tools=TOOLS), TOKENIZER)
    assert json.loads(text[:-1]) == TOOLS


@pytest.mark.parametrize("text", ["Q: {question}", "auto"])
def test_a_format_string_refuses_tools(text):
    with pytest.raises(ConfigError, match=r"must be harmony or chat .* a:1"):
        Template(text).render(read(prompt="q", tools=TOOLS), TOKENIZER)


def call(arguments, name="weather"):
    turn = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
    }
    return [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Rome"}', json.dumps('{"city": "Rome"}'), {"city": "Rome", "unit": None}],
)
def test_stored_arguments_become_one_object(arguments):
    assert json.loads(read(prompt=call(arguments)).earlier[1].content) == {"city": "Rome"}


@pytest.mark.parametrize("arguments", ["city=Rome", "[1]", '"x"', "{"])
def test_arguments_that_are_no_object_are_refused(arguments):
    with pytest.raises(ConfigError, match=r"a:1: prompt\[1\] must have tool_calls whose arguments"):
        read(prompt=call(arguments))


def test_code_for_python_stays_as_it_is():
    assert read(prompt=call("print(1)", "python")).earlier[1].content == "print(1)"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_stored_thoughts_become_analysis(key):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", key: "hm"},
        {"role": "user", "content": "c"},
    ]
    thought, answer = read(prompt=chat).earlier[1:]
    assert thought == Message("assistant", "hm", channel="analysis") and answer.content == "b"


def test_served_prompts_hold_no_earlier_analysis():
    turns = (
        Message("user", "a"),
        Message("assistant", "thought 1", channel="analysis"),
        Message("assistant", "b"),
        Message("user", "c"),
        Message("assistant", "thought 2", channel="analysis"),
        Message("assistant", "{}", channel="commentary", recipient="functions.f"),
        Message("tool", "4", name="functions.f", channel="commentary", recipient="assistant"),
    )
    row = Row("d", "1", earlier=turns)
    served, _ = Template("harmony").render(row, TOKENIZER)
    with_analysis, _ = Template("harmony", keep_analysis=True).render(row, TOKENIZER)
    # a call that no final message has followed still needs its analysis
    assert "thought 1" not in served and "thought 2" in served
    assert "thought 1" in with_analysis and "thought 2" in with_analysis
