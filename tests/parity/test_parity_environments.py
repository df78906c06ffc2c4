# SPDX-License-Identifier: Apache-2.0
"""Environments and tools of the other projects' own packages, each by one line of a config.

A package that is absent skips its tests: none of them is a dependency, of the extras either.
`pip install skyrl-gym gymnasium openenv google-tunix verl` brings them all.
"""

import contextlib
import importlib
import socket
import sys
import threading
import time
import types
import typing

import pytest

from jaxmoe.data.harmony.parse import ParsedResponse
from jaxmoe.data.rows import Message, Row
from jaxmoe.environments.environment import check_rows
from jaxmoe.environments.environment_specs import read_environment
from jaxmoe.environments.step_check import check_numbers, check_reset, check_step
from jaxmoe.environments.tool_schema import describe_function
from jaxmoe.environments.tool_specs import read_tools
from jaxmoe.rewards.conventions import Sample
from jaxmoe.rewards.rewards import read_rewards, score_samples

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]  # of the packages

MODULE = "environments_of_a_peer"
ROW = Row("6 * 7 =", "42", columns={"question": "6 * 7 =", "answer": "42"})
SKYRL = "skyrl_environment:SkyRLEnvironment"
TUNIX = "tunix_environment:TunixEnvironment"


def import_peer(name, package):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"runs {package}'s own classes: pip install {package} ({error})")


def make_turn(text, **fields):
    return [Message("assistant", text, **fields)]


def run_episode(environment, *turns):
    messages, _ = check_reset(environment.reset(ROW, seed=3))
    results = [check_step(environment.step(turn)) for turn in turns]
    return messages, results, check_numbers(environment.close(), "rewards")


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def test_skyrl_gsm8k_of_several_turns():
    import_peer("skyrl_gym", "skyrl-gym")
    make = read_environment(f"{SKYRL}(env='gsm8k_multi_turn', max_turns=3)")
    messages, results, _ = run_episode(
        make(), make_turn("hm"), make_turn("#### 41"), make_turn("#### 42")
    )
    assert messages == (Message("user", "6 * 7 ="),)
    assert [result.terminated for result in results] == [False, False, True]
    assert [result.reward for result in results] == pytest.approx([0, 0.2 / 3, 1])
    assert results[0].messages[0].role == "user" and "####" in results[0].messages[0].content
    assert sum(result.metrics["env/steps"] for result in results) == 3


def test_skyrl_gsm8k_has_one_turn_and_suggests_names():
    import_peer("skyrl_gym", "skyrl-gym")
    _, (result,), _ = run_episode(read_environment(f"{SKYRL}(env='gsm8k')")(), make_turn("#### 42"))
    assert result.reward == 1 and result.terminated
    with pytest.raises(ValueError, match="Did you mean gsm8k"):
        check_rows(read_environment(f"{SKYRL}(env='gsm8kk')"), [ROW])


def test_a_subclass_of_gymnasiums_env(module):
    gymnasium = import_peer("gymnasium", "gymnasium")

    class Guess(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(100)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.answer = options["answer"]
            return f"Guess {self.np_random.integers(1000)}.", {}

        def step(self, action):
            is_right = action == self.answer
            return "Again.", float(is_right), is_right, False, {}

    module.Guess = Guess
    module.make_wrapped = lambda: gymnasium.wrappers.TimeLimit(Guess(), 1)
    for name in ("Guess", "make_wrapped"):
        make = read_environment(
            f"gymnasium_environment:GymnasiumEnvironment(env='{MODULE}:{name}')"
        )
        first, (failed,), _ = run_episode(make(), make_turn("41"))
        assert failed.messages == (Message("user", "Again."),)
        assert failed.truncated is (name == "make_wrapped")
        assert run_episode(make(), make_turn("42"))[1][0].terminated
        assert run_episode(make())[0] == first  # one seed, one prompt


def test_tunix_task_and_tool_environments(module):
    import_peer("tunix.rl.agentic.environments.tool_environment", "google-tunix")
    tools = importlib.import_module("tunix.rl.agentic.tools.base_tool")
    environments = importlib.import_module("tunix.rl.agentic.environments.tool_environment")
    tasks = importlib.import_module("tunix.rl.agentic.environments.task_environment")

    class Multiply(tools.BaseTool):
        def __init__(self, name="multiply", description="Multiply."):
            super().__init__(name, description)

        def get_json_schema(self):
            number = {"type": "integer", "description": "A number."}
            parameters = {"type": "object", "properties": {"a": number, "b": number}}
            function = {"name": "multiply", "description": "Multiply.", "parameters": parameters}
            return {"type": "function", "function": function}

        def apply(self, a, b):
            return tools.ToolOutput(name="multiply", output=str(a * b))

    def grade(task, action):
        return float(action == task["answer"])

    module.TaskEnvironment = tasks.TaskEnvironment
    module.ToolTask = type(
        "ToolTask",
        (environments.ToolEnvironment,),
        {
            "__init__": lambda self, example, **kwargs: environments.ToolEnvironment.__init__(
                self, example, tool_map={"multiply": Multiply}, reward_fn=grade, **kwargs
            )
        },
    )
    environment = read_environment(f"{TUNIX}(env='{MODULE}:ToolTask', max_steps=4)")()
    messages, results, _ = run_episode(
        environment,
        make_turn('{"a": 6, "b": 7}', recipient="functions.multiply"),
        make_turn("{}", recipient="functions.nothing"),
        make_turn("42"),
    )
    assert messages == (Message("user", "6 * 7 ="),)
    assert [tool.name for tool in environment.tools] == ["multiply"]
    assert "42" in results[0].messages[0].content and not results[0].terminated
    assert results[1].messages and not results[1].terminated
    assert results[2].terminated and results[2].reward == 1
    _, (result,), _ = run_episode(
        read_environment(f"{TUNIX}(env='{MODULE}:TaskEnvironment')")(), make_turn("42")
    )
    assert result.terminated and result.reward == 0


def test_verls_tools(module):
    base = import_peer("verl.tools.base_tool", "verl")
    functions = importlib.import_module("verl.tools.function_tool")
    schemas = importlib.import_module("verl.tools.schemas")

    class Note(base.BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            return schemas.ToolResponse(text=f"noted {parameters['word']}"), 0.5, {}

        async def calc_reward(self, instance_id, **kwargs):
            return 2.0

    module.Note = Note

    @functions.function_tool("look_up")
    def look(word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return schemas.ToolResponse(text=word.upper()), 0.25, {"hits": 1}

    module.look = look
    word = {"word": {"type": "string", "description": "A word."}}
    schema = {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Note.",
            "parameters": {"type": "object", "properties": word, "required": ["word"]},
        },
    }
    tools = read_tools(
        f"verl_tools:wrap_tool(tool='{MODULE}:Note', tool_schema={schema}) + "
        f"verl_tools:wrap_function(function='{MODULE}:look')"
    )
    assert [tool.address for tool in tools] == ["functions.note", "functions.look_up"]
    assert tools[1].description.parameters["properties"]["word"]["type"] == "string"
    _, results, rewards = run_episode(
        read_environment("", tools=tools)(),
        make_turn('{"word": "x"}', recipient="functions.note"),
        make_turn('{"word": "x"}', recipient="functions.look_up"),
    )
    assert [r.messages[0].content for r in results] == ["noted x", "X"]
    assert [r.reward for r in results] == [0.5, 0.25] and rewards == {"tool/note": 2.0}


def test_verls_scorer_of_gsm8k_is_a_reward():
    import_peer("verl.utils.reward_score.gsm8k", "verl")
    rewards = read_rewards("verl.utils.reward_score.gsm8k:compute_score", ["question", "answer"])
    samples = [Sample(0, ROW, ParsedResponse(text), [1]) for text in ("#### 42", "#### 41", "42")]
    assert score_samples(rewards, samples).rewards.tolist() == [1, 0, 0]


def search(
    query: str,
    k: int = 3,
    kind: typing.Literal["web", "news"] = "web",
    weights: list[float] | None = None,
    options: dict[str, int] | None = None,
    limit: int | float = 1,
    exact: bool = False,
) -> str:
    """Search the web.

    Args:
        query: What to look for,
            in any language.
        k: Number of pages.
        kind: Kind of pages.
        weights: Of the pages.
        options: Of the engine.
        limit: In seconds.
        exact: Match the words.

    Returns:
        The pages.
    """
    return query


def test_the_functions_schema_is_that_of_transformers(hugging):
    utilities = importlib.import_module("transformers.utils")
    function = utilities.get_json_schema(search)["function"]
    description = describe_function(search, "")
    assert description.name == function["name"]
    assert description.description == function["description"]
    assert description.parameters == function["parameters"]


def test_an_openenv_server_on_loopback():
    import_peer("openenv.core", "openenv")
    uvicorn = importlib.import_module("uvicorn")
    server_types = importlib.import_module("openenv.core.env_server.types")
    interfaces = importlib.import_module("openenv.core.env_server.interfaces")
    create_app = importlib.import_module("openenv.core.env_server").create_fastapi_app

    class Say(server_types.Action):
        message: str

    class Heard(server_types.Observation):
        text: str

    class Echo(interfaces.Environment):
        def reset(self, seed=None, episode_id=None, **kwargs):
            return Heard(text=f"ready {seed}", done=False)

        def step(self, action, timeout_s=None, **kwargs):
            is_right = action.message == "42"
            return Heard(text=f"no {action.message}", reward=float(is_right), done=is_right)

        @property
        def state(self):
            return server_types.State()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(
        create_app(Echo, Say, Heard), host="127.0.0.1", port=port, log_level="error"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        environment = read_environment(
            f"openenv_environment:OpenEnvEnvironment(url='http://127.0.0.1:{port}')"
        )()
        with contextlib.closing(environment):
            messages, results, _ = run_episode(environment, make_turn("41"), make_turn("42"))
    finally:
        server.should_exit = True
        thread.join(10)
    assert messages == (Message("user", "6 * 7 =\n\nready 3"),)
    assert results[0].messages[0].content == "no 41" and not results[0].terminated
    assert results[1].terminated and results[1].reward == 1
