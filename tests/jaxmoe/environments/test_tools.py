# SPDX-License-Identifier: Apache-2.0
"""Tools as a config names them, one call of each, and the environment that answers calls."""

import sys
import time
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.render import message_pieces
from jaxmoe.data.rows import Message, Row, ToolDescription
from jaxmoe.environments.step_check import EnvironmentFault, check_step
from jaxmoe.environments.tool_environment import ToolEnvironment
from jaxmoe.environments.tool_specs import make_python_tool, read_tools, tool_from_function
from jaxmoe.environments.tools import MAX_RESULT_CHARS, Tool, ToolResult, call_tool
from tests.jaxmoe.environments.user_tools import (
    fail,
    make_unit_tool,
    mix,
    multiply,
    paint,
    rename_function,
    search_pages,
    wait_and_add,
)

ROW = Row("6 * 7 =", "42", system="Be short.")


@pytest.fixture(autouse=True)
def module(monkeypatch):
    module = types.ModuleType("tools_of_a_user")
    for item in (multiply, wait_and_add, paint, fail, make_unit_tool):
        setattr(module, item.__name__, item)
    module.NUMBER, module.Plain, module.TOOL = 3, type("Plain", (), {}), make_unit_tool("ft")
    monkeypatch.setitem(sys.modules, module.__name__, module)


def make_call(content, recipient="functions.multiply", channel="commentary"):
    return [
        Message("assistant", "hm", channel="analysis"),
        Message("assistant", content, channel=channel, recipient=recipient, content_type="json"),
    ]


def run_step(environment, messages):
    return check_step(environment.step(messages))


def test_a_config_names_tools_with_options():
    tools = read_tools(
        "python + tools_of_a_user:multiply(b=10) + tools_of_a_user:make_unit_tool(unit='in')"
    )
    assert [tool.address for tool in tools] == ["python", "functions.multiply", "functions.unit"]
    assert call_tool(tools[1], '{"a": 4}').text == "40"
    assert call_tool(tools[2], "").text == "in"
    assert "there is no argument 'b'" in call_tool(tools[1], '{"a": 4, "b": 1}').text
    assert read_tools("") == () and read_tools("tools_of_a_user:TOOL")[0].call() == "ft"


@pytest.mark.parametrize(
    "text, message",
    [
        ("pyhton", "there is no tool 'pyhton'. Did you mean python?"),
        ("search", "Known: python, python_sandbox. A tool of your own is module:function."),
        ("python + python", "two tools of one name"),
        ("python(x=1)", "no option 'x'"),
        ("tools_of_a_user:multiply(c=1)", "no option 'c'. Known: a, b"),
        ("tools_of_a_user:multiplyy", "can be imported"),
        ("nowhere:f", "can be imported"),
        ("tools_of_a_user:NUMBER", "got int"),
        ("tools_of_a_user:Plain", "got a class"),
        ("os:system", "must be a function written in Python"),
        ("tools_of_a_user:", "must be"),
        ("tools_of_a_user:TOOL(a=1)", "takes no options"),
    ],
)
def test_a_mistake_in_data_tools_is_one_line(text, message):
    with pytest.raises(ConfigError) as error:
        read_tools(text)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("data.tools")


def test_calls_are_answered_on_their_channel_in_harmony():
    environment = ToolEnvironment([tool_from_function(multiply), make_python_tool()])
    assert [tool.name for tool in environment.tools] == ["multiply", "python"]
    messages, _ = environment.reset(ROW, seed=0)
    assert messages == [Message("system", "Be short."), Message("user", "6 * 7 =")]
    result = run_step(environment, make_call('{"a": 6, "b": 7}'))
    assert result.messages == (
        Message("tool", "42", "functions.multiply", "commentary", "assistant"),
    )
    assert not result.terminated and result.reward == 0 and result.rewards == {}
    assert result.metrics == {"tool/calls": 1, "tool/errors": 0, "tool/unknown": 0}
    result = run_step(environment, make_call("print(6 * 7)", "python", "analysis"))
    assert result.messages == (Message("tool", "42", "python", "analysis", "assistant"),)


def test_calls_on_the_final_channel_are_answered():
    environment = ToolEnvironment([tool_from_function(multiply)])
    environment.reset(ROW, seed=0)
    (message,) = run_step(environment, make_call('{"a": 6}', channel="final")).messages
    assert (message.content, message.channel) == ("12", "commentary")


def test_a_turn_without_a_call_ends_the_episode():
    environment = ToolEnvironment([tool_from_function(multiply)])
    environment.reset(ROW, seed=0)
    result = run_step(environment, [Message("assistant", "42", channel="final")])
    assert result.terminated and not result.messages
    assert check_step(environment.step([])).terminated


def test_async_tools_and_enums_are_called_as_written():
    assert (
        call_tool(tool_from_function(wait_and_add), '{"a": 1}').text == '{"sum": 2, "word": "für"}'
    )
    assert call_tool(tool_from_function(paint), '{"colour": "red"}').text == "RED 1.0"
    assert "one of" in call_tool(tool_from_function(paint), '{"colour": "blue"}').text
    arguments = '{"colours": ["red", null], "by_name": {"x": "red"}}'
    assert call_tool(tool_from_function(mix), arguments).text == "RED None RED"


@pytest.mark.parametrize(
    "content, text",
    [
        ("", "'a' is missing"),
        ("{", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ('{"a": NaN}', "NaN is not a JSON value"),
        ('{"a": 1e999}', "of type integer"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "JSON object"),
        ('{"a": "1"}', "of type integer"),
        ('{"aa": 1}', "Did you mean a?"),
        ("null", "JSON object"),
        ('{"a": 1}\ud800', "JSON object"),
        ('{"a": 1, "self": 2}', "no argument 'self'"),
    ],
)
def test_bad_arguments_become_an_error_text(content, text):
    environment = ToolEnvironment([tool_from_function(multiply)])
    environment.reset(ROW, seed=0)
    result = run_step(environment, make_call(content))
    (message,) = result.messages
    assert message.content.startswith("Error: ") and text in message.content
    assert len(message.content) < 700
    assert result.metrics == {"tool/calls": 1, "tool/errors": 1, "tool/unknown": 0}


@pytest.mark.parametrize(
    "kind, text, is_error",
    [
        ("raise", "Error: OSError: disk\nfull", True),
        ("exit", "Error: SystemExit: 3", True),
        ("cancel", "Error: CancelledError", True),
        ("bytes", "Error: the tool returned bytes", True),
        ("cycle", "Error: ValueError", True),
        ("object", "Error: KeyError", True),
        ("nan", "nan", False),
        ("none", "None", False),
        ("surrogate", "a?", False),
        ("hello", "hello", False),
        ("pair", '["a", 1.0]', False),
        ("long", "xxx", False),
    ],
)
def test_any_tools_result_becomes_a_short_text(kind, text, is_error):
    start = time.perf_counter()
    result = call_tool(tool_from_function(fail), f'{{"kind": "{kind}"}}')
    assert result.text.startswith(text) and result.is_error is is_error
    assert len(result.text) <= MAX_RESULT_CHARS + 100 and time.perf_counter() - start < 1
    assert ("9,800,000 characters were cut" in result.text) is (kind == "long")
    result.text.encode()


def test_an_unknown_tool_is_an_error_and_counted():
    environment = ToolEnvironment([tool_from_function(multiply), make_python_tool()])
    environment.reset(ROW, seed=0)
    result = run_step(environment, make_call("{}", "functions.multiplyy"))
    assert "Did you mean functions.multiply?" in result.messages[0].content
    assert result.metrics == {"tool/calls": 1, "tool/errors": 1, "tool/unknown": 1}
    result = run_step(environment, make_call("{}", "browser"))
    assert "Tools: functions.multiply, python." in result.messages[0].content


@pytest.mark.parametrize(
    "recipient", ["user", "system", "assistant", "a<|end|>b", "ü b", "x" * 999]
)
def test_no_reply_has_another_roles_name(recipient):
    environment = ToolEnvironment([])
    environment.reset(ROW, seed=0)
    (message,) = run_step(environment, make_call("{}", recipient)).messages
    assert message.name.startswith("functions.") and len(message.name) <= 64


def test_a_function_named_python_takes_code():
    def python(code: str) -> str:
        """Run code.

        Args:
            code: The code.
        """
        return f"ran {code}"

    environment = ToolEnvironment([tool_from_function(python)])
    environment.reset(ROW, seed=0)
    (message,) = run_step(environment, make_call('print("x")', "python", "final")).messages
    assert message == Message("tool", 'ran print("x")', "python", "analysis", "assistant")
    with pytest.raises(ConfigError, match="calls of python are code; it takes code, k"):
        tool_from_function(rename_function(search_pages, "python"))


@given(
    st.text(max_size=40),
    st.text(min_size=1, max_size=10),
    st.sampled_from(["", "final", "analysis"]) | st.text(max_size=5),
)
def test_no_policys_turn_makes_a_tool_environment_raise(content, name, channel):
    environment = ToolEnvironment([tool_from_function(multiply), make_python_tool()])
    environment.reset(ROW, seed=0)
    for recipient in ("functions.multiply", "python", name, "functions." + name):
        call = Message("assistant", content, channel=channel, recipient=recipient)
        result = run_step(environment, [call])
        (message,) = result.messages
        assert result.metrics["tool/calls"] == 1 and message.recipient == "assistant"
        message_pieces(result.messages)
        assert message.name == "python" or message.name.startswith("functions.")
    environment.close()


class Inner:
    """An environment with a tool of its own, which wants three turns."""

    tools = (ToolDescription("look", "Look around.", {"type": "object", "properties": {}}),)

    def __init__(self):
        self.turns = []

    def reset(self, row, *, seed):
        return [Message("user", f"{row.question} {seed}")], {}

    def step(self, messages):
        self.turns.append(messages[-1].content)
        return [Message("user", "more")], 0.5, len(self.turns) == 2, False, {}

    def close(self):
        return {"end": 2.0}


def test_other_turns_are_the_inner_environments():
    inner = Inner()
    environment = ToolEnvironment([tool_from_function(multiply)], inner)
    assert [tool.name for tool in environment.tools] == ["multiply", "look"]
    assert environment.reset(ROW, seed=5)[0] == [Message("user", "6 * 7 = 5")]
    assert run_step(environment, make_call('{"a": 1}')).messages[0].content == "2"
    result = run_step(environment, make_call("north", "functions.look"))
    assert result.messages[0].content == "more" and result.reward == 0.5
    assert run_step(environment, [Message("assistant", "42", channel="final")]).terminated
    assert inner.turns == ["north", "42"] and environment.close() == {"end": 2.0}


def test_calls_of_one_turn_are_answered_in_order():
    environment = ToolEnvironment([tool_from_function(multiply), make_python_tool()])
    environment.reset(ROW, seed=0)
    calls = [*make_call('{"a": 6, "b": 7}'), *make_call("print(3)", "python", "analysis")]
    result = run_step(environment, calls)
    assert [(m.name, m.content) for m in result.messages] == [
        ("functions.multiply", "42"),
        ("python", "3"),
    ]
    assert result.metrics["tool/calls"] == 2 and result.metrics["tool/errors"] == 0
    result = run_step(environment, [*make_call("{", "functions.multiply"), calls[-1]])
    assert result.messages[0].content.startswith("Error") and result.messages[1].content == "3"
    assert result.metrics["tool/calls"] == 2 and result.metrics["tool/errors"] == 1


def test_a_call_before_the_answer_is_counted():
    environment = ToolEnvironment([tool_from_function(multiply)])
    environment.reset(ROW, seed=0)
    turn = [*make_call('{"a": 6, "b": 7}'), Message("assistant", "42", channel="final")]
    result = run_step(environment, turn)
    assert result.terminated and result.metrics["tool/calls"] == 1


def test_an_earlier_inner_call_of_tools_is_counted():
    inner = Inner()
    environment = ToolEnvironment([tool_from_function(multiply)], inner)
    environment.reset(ROW, seed=5)
    turn = [*make_call("north", "functions.look"), *make_call("south", "functions.look")]
    result = run_step(environment, turn)
    assert inner.turns == ["south"] and result.metrics["tool/errors"] == 1
    assert [m.content[:5] for m in result.messages] == ["Error", "more"] and result.reward == 0.5


def test_a_tool_ends_the_episode_by_a_fault():
    def crash() -> str:
        """Crash."""
        raise EnvironmentFault("the machine is gone")

    environment = ToolEnvironment([tool_from_function(crash)])
    environment.reset(ROW, seed=0)
    with pytest.raises(EnvironmentFault, match="the machine is gone"):
        environment.step(make_call("{}", "functions.crash"))


def test_two_tools_of_one_name_are_refused():
    def look() -> str:
        """Look."""
        return ""

    environment = ToolEnvironment([tool_from_function(look)], Inner())
    with pytest.raises(ConfigError, match="has a tool look too"):
        environment.reset(ROW, seed=0)


def test_stateful_tools_are_started_and_closed_per_episode():
    log = []

    def start(row):
        state = [row.question]

        def call():
            state.append("x")
            return ToolResult(str(len(state)), 0.25, {"tool/hits": 1.0})

        return Tool(description, call, close=lambda: log.append("closed") or {"tool/count": 1.0})

    description = ToolDescription("count", "Count.", {"type": "object", "properties": {}})
    tool = Tool(description, print, start=start)
    for _ in range(2):
        environment = ToolEnvironment([tool])
        environment.reset(ROW, seed=0)
        first, second = (run_step(environment, make_call("{}", "functions.count")) for _ in "ab")
        assert (first.messages[0].content, second.messages[0].content) == ("2", "3")
        assert second.reward == 0.25 and second.rewards == {"tool/count": 0.25}
        assert second.metrics["tool/hits"] == 1
        assert environment.close() == {"tool/count": 1.0}
    assert log == ["closed"] * 2
    assert environment.close() == {} and log == ["closed"] * 2


def test_rewards_of_close_with_one_name_add_up():
    description = ToolDescription("a", "", {})
    tool = Tool(description, print, close=lambda: {"end": 0.5})
    environment = ToolEnvironment([tool], Inner())
    environment.reset(ROW, seed=0)
    assert environment.close() == {"end": 2.5}


def test_every_tool_closes_although_another_fails_to():
    log = []

    def raise_error():
        raise OSError("gone")

    description = ToolDescription("a", "", {})
    environment = ToolEnvironment(
        [
            Tool(description, print, close=raise_error),
            Tool(description, print, recipient="b", close=lambda: log.append("closed")),
        ]
    )
    environment.reset(ROW, seed=0)
    with pytest.raises(OSError, match="gone"):
        environment.close()
    assert log == ["closed"]
