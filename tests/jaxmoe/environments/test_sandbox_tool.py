# SPDX-License-Identifier: Apache-2.0
"""The tool python_sandbox: one interpreter for each episode; texts for what goes wrong."""

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.data.rows import Message, Row
from jaxmoe.environments import sandbox_tool
from jaxmoe.environments.step_check import EnvironmentFault
from jaxmoe.environments.tool_environment import ToolEnvironment
from jaxmoe.environments.tool_specs import read_tools
from jaxmoe.sandbox.process import SandboxError
from tests.jaxmoe.sandbox.kinds import BrokenLauncher, end_from_outside, first_kind


@pytest.fixture(scope="module")
def tools():
    first_kind()
    return read_tools("python_sandbox", SandboxConfig(call_s=1.0, warm=1))


@pytest.fixture
def environment(tools):
    environment = ToolEnvironment(tools)
    environment.reset(Row("1+1", "2"), seed=0)
    yield environment
    environment.close()


def call_tool(environment, code):
    message = Message("assistant", code, channel="analysis", recipient="python")
    (reply,), _, is_terminated, _, info = environment.step([message])
    assert reply.name == "python" and not is_terminated
    return reply.content, {name for name, value in info["metrics"].items() if value}


def test_an_episode_keeps_its_variables_and_shares_none(tools, environment):
    second = ToolEnvironment(tools)
    second.reset(Row("1+1", "2"), seed=0)
    assert call_tool(environment, "x = 58 * 96\nprint('a')\nx") == ("a\n5568", {"tool/calls"})
    assert call_tool(environment, "x + 1")[0] == "5569"
    text, metrics = call_tool(second, "x")
    assert "NameError" in text and metrics == {"tool/calls", "tool/errors"}
    second.close()


@pytest.mark.parametrize(
    "code, text, metric",
    [
        ("while True: pass", "took more than 1 s", "tool/sandbox_timeouts"),
        ("import os; os._exit(3)", "exit status 3", "tool/sandbox_crashes"),
        (
            "import os\nfor i in range(3, 64):\n    try: os.write(i, b'x\\n')\n"
            "    except OSError: 0",
            "own pipe",
            "hack/forged_reply",
        ),
    ],
)
def test_a_dying_program_shows_the_policy_its_reason(environment, code, text, metric):
    call_tool(environment, "x = 1")
    reply, metrics = call_tool(environment, code)
    assert text in reply and "variables and files are lost" in reply and "\n" not in reply
    assert metrics == {"tool/calls", "tool/errors", metric}
    assert "NameError" in call_tool(environment, "x")[0]
    assert call_tool(environment, "6 * 7")[0] == "42"


def test_a_sandbox_killed_between_calls_ends_episodes(tools):
    session = tools[0].start(Row("q", "a")).close.__self__
    assert session.run("x = 1").text == ""
    end_from_outside(session._sandbox)
    with pytest.raises(EnvironmentFault, match="stay alive for python_sandbox.*SIGKILL") as fault:
        session.run("x")
    assert isinstance(fault.value.__cause__, SandboxError)
    session.close()


ENDS_AFTER_REPLY = """
import os
def write(*arguments):
    first(*arguments)
    os._exit(137)
first, os.write = os.write, write
"""


def test_a_program_that_ends_later_ends_no_episode(environment):
    call_tool(environment, ENDS_AFTER_REPLY)
    text, metrics = call_tool(environment, "1")
    assert "ended its interpreter" in text and "tool/sandbox_crashes" in metrics
    assert call_tool(environment, "6 * 7")[0] == "42"


def test_an_episode_without_a_call_starts_no_sandbox(tools):
    session = tools[0].start(Row("q", "a")).close.__self__
    assert session._sandbox is None
    session.close()
    assert "ended" in session.run("1").text


def test_the_tool_takes_no_options_and_replaces_python():
    first_kind()
    with pytest.raises(ConfigError, match="has no option 'k'"):
        read_tools("python_sandbox(k=3)")
    with pytest.raises(ConfigError, match="two tools of one name"):
        read_tools("python + python_sandbox")
    with pytest.raises(ConfigError, match="Did you mean python_sandbox"):
        read_tools("python_sandbx")


def test_a_sandbox_that_cannot_start_ends_episodes(monkeypatch):
    first_kind()
    monkeypatch.setattr(sandbox_tool, "choose_sandbox", lambda c: BrokenLauncher(first_kind(), c))
    environment = ToolEnvironment(read_tools("python_sandbox", SandboxConfig(disk_mb=0, warm=0)))
    environment.reset(Row("1+1", "2"), seed=0)
    with pytest.raises(EnvironmentFault, match="a sandbox must start for python_sandbox"):
        call_tool(environment, "1")
    environment.close()
