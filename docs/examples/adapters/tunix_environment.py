# SPDX-License-Identifier: Apache-2.0
"""Environments written for Tunix 0.1.7: `reset() -> (dict, dict)`, `step(action)` -> 4-tuple.

    data.environment=tunix_environment:TunixEnvironment(env='my_env:Env', max_steps=4)

An action is the text of a turn, or a list with one call of a tool in OpenAI's form. Tunix is not
imported.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.config.function_specs import import_attribute
from jaxmoe.data.harmony.tools import called_tool
from jaxmoe.data.rows import Message, Row, ToolDescription, prompt_messages
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.environment import Unchecked, replace_question, row_columns, turn_text
from jaxmoe.environments.environment_specs import KEY, bind_options, list_parameters
from jaxmoe.environments.step_check import EnvironmentFault, describe_value
from jaxmoe.environments.tool_schema import read_openai_schema
from jaxmoe.environments.tools import ToolError, ToolResult, read_json_object, reply_message

_QUESTIONS = ("prompts", "question")  # keys that Tunix's agents read
_CALL_ID = "call"
_ROW_NAMES = ("single_example", "task")  # parameters that get the row


class TunixEnvironment:
    """One episode with an environment of the form of Tunix's BaseEnv.

    An environment that has a `final_reward_fn` pays it at the end, as part "final".
    """

    def __init__(self, *, env: str, system: str = "", **options: Any) -> None:
        target = import_attribute(env, KEY, "an environment")
        self._label = f"{KEY}: {env}"
        self._row_name = find_row_parameter(target, options)
        unbound = (*_ROW_NAMES, "group_id", "pair_index", self._row_name)
        self._make = bind_options(target, options, self._label, unbound)
        self._system = system
        self._instance: Any = None
        self._tools: Sequence[ToolDescription] = ()

    @property
    def tools(self) -> Sequence[ToolDescription]:
        return self._tools

    def reset(self, row: Row, *, seed: int) -> Unchecked:
        columns = {self._row_name: copy.deepcopy(row_columns(row))} if self._row_name else {}
        self._instance = self._make(**columns, group_id=seed, pair_index=0)
        manager = getattr(self._instance, "tool_manager", None)
        schemas = [] if manager is None else manager.get_json_schema()
        self._tools = [read_openai_schema(schema, self._label) for schema in schemas]
        result = wait_for_result(self._instance.reset())
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise EnvironmentFault(f"reset must return (dict, dict), got {describe_value(result)}")
        messages = prompt_messages(row, self._system)
        return replace_question(messages, _observation_text(result[0])), {}

    def step(self, messages: list[Message]) -> Unchecked:
        call = messages[-1] if messages and messages[-1].recipient else None
        action: Any = turn_text(messages)
        if call is not None:
            try:
                arguments = json.dumps(read_json_object(call.content))
            except ToolError as error:
                result = ToolResult(f"Error: {error}", is_error=True)
                metrics = {"tool/calls": 1.0, "tool/errors": 1.0}
                return [reply_message(call, result)], 0.0, False, False, {"metrics": metrics}
            name = called_tool(call.recipient)
            function = {"name": name, "arguments": arguments}
            action = [{"id": _CALL_ID, "type": "function", "function": function}]
        result = wait_for_result(self._instance.step(action))
        if not isinstance(result, tuple | list) or len(result) != 4:
            raise EnvironmentFault(
                f"step must return (observation, reward, done, info), got {describe_value(result)}"
            )
        observation, reward, terminated, _ = result
        metrics = {} if call is None else {"tool/calls": 1.0}
        return _read_reply(observation, call), reward, terminated, False, {"metrics": metrics}

    def close(self) -> Unchecked:
        instance, self._instance = self._instance, None
        if instance is None:
            return None
        try:
            final_reward = getattr(instance, "final_reward_fn", None)
            return {"final": wait_for_result(final_reward())} if callable(final_reward) else None
        finally:
            if hasattr(instance, "close"):
                wait_for_result(instance.close())


def find_row_parameter(target: Any, options: Mapping[str, Any]) -> str:
    """The parameter of an environment that gets the row; "" if it takes no row."""
    parameters = list_parameters(target)
    names = [name for name in _ROW_NAMES if name in parameters]
    required = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in options
    ]
    return (names + required + [""])[0]


def _read_reply(observation: Any, call: Message | None) -> list[Message]:
    """The messages of an observation: outputs of tools, or a text."""
    outputs = observation.get("tool_outputs") if isinstance(observation, Mapping) else None
    if isinstance(outputs, Mapping) and call is not None:
        return [reply_message(call, ToolResult(str(output or ""))) for output in outputs.values()]
    text = _observation_text(observation)
    return [Message("user", text)] if text else []


def _observation_text(observation: Any) -> str:
    """The text of an observation, as Tunix's agents read it; "" if it has none."""
    if isinstance(observation, Mapping):
        observation = next((observation[name] for name in _QUESTIONS if name in observation), "")
    return observation if isinstance(observation, str) else ""
