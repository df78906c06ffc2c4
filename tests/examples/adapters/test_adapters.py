# SPDX-License-Identifier: Apache-2.0
"""Environments and tools of other projects by one line of a config, through the adapters.

The classes of user_environments.py have the shape of the interfaces that those projects document:
TRL 1.16 environment_factory, SkyRL-gym 0.4 BaseTextEnv, Gymnasium 1.4 Env, Tunix 0.1.7 BaseEnv,
verl 0.9.1 BaseTool, OpenEnv 0.10's synchronous client. tests/parity/test_parity_environments.py has
the packages themselves.
"""

import json
import math
import sys
import types

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Message, Row
from jaxmoe.environments.environment import check_rows
from jaxmoe.environments.environment_specs import read_environment
from jaxmoe.environments.step_check import EnvironmentFault, check_step
from jaxmoe.environments.tool_specs import read_tools
from tests.examples.adapters.user_environments import (
    SCHEMA,
    Counter,
    GymGuess,
    Silent,
    SkyGuess,
    ToolOfVerl,
    TunixGuess,
    TunixText,
    Undocumented,
)
from tests.jaxmoe.environments.checked_episode import ROW, make_turn, run_episode

MODULE = "environments_of_other_projects"
ADAPTERS = {
    "Sky": "skyrl_environment:SkyRLEnvironment",
    "Gym": "gymnasium_environment:GymnasiumEnvironment",
    "Tun": "tunix_environment:TunixEnvironment",
}


@pytest.fixture(autouse=True)
def module(monkeypatch):
    module = types.ModuleType(MODULE)
    for item in (Counter, Silent, Undocumented, SkyGuess, GymGuess, TunixGuess, TunixText):
        setattr(module, item.__name__, item)
    module.BOTH, module.ToolOfVerl = {"count": Counter, "silent": Silent}, ToolOfVerl
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def name(env, options=""):
    adapter = ADAPTERS.get(env[:3], "trl_environment:TrlEnvironment")
    return f"{adapter}(env='{MODULE}:{env}', {options})"


def make(env, options="", **more):
    return read_environment(name(env, options), **more)()


def test_trl_environments_offer_methods_and_a_final_reward():
    environment = make("Counter", "start=1")
    call = {"channel": "commentary", "recipient": "functions.add"}
    messages, results, rewards = run_episode(
        environment,
        make_turn('{"amount": 2}', **call),
        make_turn("", recipient="functions.double"),
        make_turn('{"amount": "x"}', **call),
        make_turn("6", channel="final"),
    )
    assert messages == (Message("user", "6 * 7 = (level 2)"),)
    assert [tool.name for tool in environment.tools] == ["add", "double"]
    assert [r.messages[0].content for r in results[:2]] == ["3", "6"]
    assert results[2].metrics["tool/errors"] == 1 and results[3].terminated
    assert rewards == {"Counter": 1.5}
    assert ROW.columns["level"] == 2


def test_a_trl_reset_gets_columns_without_changing_rows():
    environment = make("Silent")
    closed = Silent.closed
    _, (result,), rewards = run_episode(environment, make_turn("", recipient="functions.peek"))
    assert json.loads(result.messages[0].content) == {**ROW.columns, "prompt": ROW.question}
    assert rewards == {} and Silent.closed == closed + 1
    assert [tool.name for tool in environment.tools] == ["peek"]


def test_a_missing_trl_column_is_refused_before_work():
    rows = [ROW, Row("?", "", columns={"question": "?"}, location="a.jsonl:2")]
    with pytest.raises(ConfigError, match="^a.jsonl:2: there is no column level, which reset of"):
        check_rows(read_environment(name("Counter")), rows)
    check_rows(read_environment(name("Counter")), rows[:1])
    check_rows(read_environment(name("Silent"), tools=read_tools("python")), rows)


def test_rows_choose_among_several_trl_environments():
    row = Row("q", "", columns={"environment": "count", "level": 1, "question": "q"})
    environment = make("BOTH")
    messages, _, _ = run_episode(environment, row=row)
    assert messages[0].content == "q (level 1)" and len(environment.tools) == 2
    with pytest.raises(ConfigError, match="environment must be one of count, silent, got 'x'"):
        environment.reset(Row("q", "", columns={"environment": "x"}), seed=0)


def test_a_skyrl_environment_gets_the_rows_answer():
    environment = make("SkyGuess", "max_turns=2")
    messages, results, _ = run_episode(
        environment, make_turn("41"), make_turn("42", channel="final")
    )
    assert [m.content for m in messages] == ["6 * 7 =", "guess"]
    assert results[0].messages == (Message("user", "not 41"),)
    assert [(r.reward, r.terminated) for r in results] == [(0.0, False), (1.0, True)]
    assert sum(r.metrics["env/steps"] for r in results) == 2  # the metrics of steps are added up


def test_the_rows_own_reward_spec_goes_first():
    row = Row("q", "1", columns={"question": "q", "reward_spec": {"ground_truth": "7"}})
    _, (result,), _ = run_episode(make("SkyGuess"), make_turn("7"), row=row)
    assert result.reward == 1


def test_a_gymnasium_environment_asks_by_its_observation():
    row = Row("6 * 7 =", "42", system="Be short.")
    messages, results, _ = run_episode(make("GymGuess"), make_turn("41"), make_turn("42"), row=row)
    assert messages == (Message("system", "Be short."), Message("user", "Guess 3."))
    assert results[0].messages == (Message("user", "Again."),)
    assert results[1].terminated and results[1].reward == 1
    assert len({result.state_key for result in results}) == 2  # what GiGPO compares
    assert run_episode(make("GymGuess", "silent=True"))[0] == (Message("user", "6 * 7 ="),)


def test_a_tunix_environment_gets_texts_and_calls():
    environment = make("TunixGuess", "bonus=0.5")
    messages, results, rewards = run_episode(
        environment,
        make_turn('{"x": 1}', channel="commentary", recipient="functions.look"),
        make_turn("{x", recipient="functions.look"),
        make_turn("42"),
    )
    assert messages == (Message("user", "6 * 7 = ?"),)
    assert [tool.name for tool in environment.tools] == ["look"]
    expected = Message("tool", "look {'x': 1}", "functions.look", "commentary", "assistant")
    assert results[0].messages == (expected,)
    assert results[1].messages[0].content.startswith("Error: the arguments must be a JSON object")
    assert results[2].reward == 1.5 and results[2].terminated and rewards == {"final": 0.125}
    messages, results, _ = run_episode(make("TunixText", "max_steps=3"), make_turn("hi"))
    assert messages[0].content == "Say hi." and results[0].messages[0].content == "again"


def test_a_verl_tool_has_an_instance_per_episode():
    (tool,) = read_tools(
        f"verl_tools:wrap_tool(tool='{MODULE}:ToolOfVerl', config={{'a': 1}}, tool_schema={SCHEMA})"
    )
    assert tool.address == "functions.note"
    assert tool.description.parameters["required"] == ["word"]
    row = Row(
        "q",
        "",
        columns={"extra_info": {"tools_kwargs": {"note": {"create_kwargs": {"secret": "s"}}}}},
    )
    call = make_turn('{"word": "x"}', channel="commentary", recipient="functions.note")
    for number in range(2):
        environment = read_environment("", tools=(tool,))()
        _, results, rewards = run_episode(environment, call, call, row=row)
        assert results[1].messages[0].content == f"id{number} ['s', 'x', 'x'] {{'a': 1}}"
        assert results[1].rewards == {"tool/note": -0.25} and results[1].metrics["hits"] == 1
        assert rewards == {"tool/note": 3.0}
    assert ToolOfVerl.released == ["id0", "id1"]
    assert results[0].reward == -0.25
    _, (result,), rewards = run_episode(read_environment("", tools=(tool,))(), make_turn("done"))
    assert result.terminated and rewards == {}  # no call, no instance


def test_tools_of_configs_and_environments_are_joined():
    environment = make("Counter", tools=read_tools("python"))
    _, results, _ = run_episode(
        environment,
        make_turn("2 + 2", recipient="python"),
        make_turn('{"amount": 2}', recipient="functions.add"),
        make_turn("6"),
    )
    assert [tool.name for tool in environment.tools] == ["python", "add", "double"]
    assert [r.messages[0].content for r in results[:2]] == ["4", "2"] and results[2].terminated


class Server:
    """OpenEnv's synchronous client, with a server inside."""

    def __init__(self, base_url):
        self.base_url = base_url

    def sync(self):
        return self

    def connect(self):
        return self

    def reset(self, *, seed=None, level=None):
        observation = {"text": f"ready {seed} {level}"}
        return types.SimpleNamespace(observation=observation, reward=None, done=False)

    def step(self, action):
        observation = {"echo": action["message"], "n": 1}
        return types.SimpleNamespace(observation=observation, reward=0.5, done=False)

    def close(self):
        self.closed = True


def test_an_openenv_server_is_named_by_its_url(monkeypatch):
    core = types.ModuleType("openenv.core")
    core.GenericEnvClient = Server
    monkeypatch.setitem(sys.modules, "openenv", types.ModuleType("openenv"))
    monkeypatch.setitem(sys.modules, "openenv.core", core)
    call = "openenv_environment:OpenEnvEnvironment(url='http://127.0.0.1:8000'"
    environment = read_environment(f"{call}, field='message', columns=['level'])")()
    messages, (result,), _ = run_episode(environment, make_turn("hi"))
    assert messages == (Message("user", "6 * 7 =\n\nready 3 2"),)
    assert result.messages[0].content == '{"echo": "hi", "n": 1}' and result.reward == 0.5
    environment = read_environment(f"{call}, observation_field='text')")()
    environment.reset(ROW, seed=0)
    with pytest.raises(EnvironmentFault, match="no text text, it has echo, n"):
        environment.step(make_turn("hi"))
    with pytest.raises(ConfigError, match="needs the column color, a row has question, answer"):
        check_rows(read_environment(f"{call}, columns=['color'])"), [ROW])


@pytest.mark.parametrize(
    "text, package",
    [
        ("skyrl_environment:SkyRLEnvironment(env='gsm8k')", "pip install skyrl-gym"),
        ("openenv_environment:OpenEnvEnvironment(url='http://h:8000')", "pip install openenv"),
    ],
)
def test_a_package_that_is_not_installed_is_named(monkeypatch, text, package):
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ConfigError, match=package):
        check_rows(read_environment(text), [ROW])


@pytest.mark.parametrize("form", [SkyGuess, GymGuess, TunixText])
@pytest.mark.parametrize(
    "value",
    [
        None,
        (),
        ("x",) * 7,
        "text",
        b"bytes",
        math.nan,
        {"observations": b"x", "reward": math.nan, "done": "no"},
        ("x", math.nan, False, {}),
        ("x", math.nan, False, False, {}),
        (b"x", 0.0, False, {}),
        (b"x", 0.0, False, False, {}),
        ([3], "1", 1, {}),
        ("x" * 10_000_000, 0.0, False, False, {}),
        ("x" * 10_000_000, 0.0, False, {}),
    ],
)
def test_bad_results_of_any_form_are_faults(monkeypatch, form, value):
    environment = make(form.__name__)
    environment.reset(ROW, seed=0)
    monkeypatch.setattr(form, "step", lambda self, action: value)
    with pytest.raises(EnvironmentFault):
        check_step(environment.step(make_turn("x")))
    environment.close()


@pytest.mark.parametrize(
    "text, message",
    [
        (name("Undocumented"), "the method act must have a docstring"),
        (name("Counter", "begin=1"), "no option 'begin'. Known: start"),
        (name("BOTH", "a=1"), "takes no options"),
        ("openenv_environment:OpenEnvEnvironment(url='127.0.0.1:8000')", "must have the URL"),
        ("openenv_environment:OpenEnvEnvironment(url='http://h:99999')", "must have the URL"),
        ("openenv_environment:OpenEnvEnvironment(url='http://a b')", "must have the URL"),
    ],
)
def test_a_mistake_is_one_line_before_the_run(text, message):
    with pytest.raises(ConfigError) as error:
        check_rows(read_environment(text), [ROW])
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("data.environment")
