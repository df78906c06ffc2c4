# SPDX-License-Identifier: Apache-2.0
"""Tools written for verl 0.9: classes in the form of its BaseTool, and its function tools.

    data.tools=verl_tools:wrap_tool(tool='my_verl:SearchTool', config={}, tool_schema={…})
    data.tools=verl_tools:wrap_function(function='my_verl:web_search')

verl is not imported. An instance of a class for an
episode is created with the first call and released at the end of the episode; the rewards of
`execute` and, at the end, of `calc_reward` are parts of the episode's reward.
"""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.function_specs import import_attribute
from jaxmoe.data.rows import Row, ToolDescription
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.step_check import check_number, check_numbers
from jaxmoe.environments.tool_schema import (
    SCHEMA_EXAMPLE,
    describe_function,
    read_openai_schema,
)
from jaxmoe.environments.tools import Tool, ToolResult, read_result

KEY = "data.tools"


def wrap_tool(*, tool: str, config: Any = None, tool_schema: Any = None) -> Tool:
    """The tool of a BaseTool class, or of an object, made from config and tool_schema.

    Raises: ConfigError if there is no schema.
    """
    label, made = f"{KEY}: {tool}", import_attribute(tool, KEY, "a tool")
    if isinstance(made, type):
        try:
            made = made(config or {}, tool_schema and _parse_schema(tool_schema))
        except (AssertionError, AttributeError) as error:
            if tool_schema is not None:
                raise
            raise ConfigError(
                f"{label} must have a schema, got none: {error}. Write "
                f"tool_schema={SCHEMA_EXAMPLE} among its options."
            ) from error
    description = _read_schema(getattr(made, "tool_schema", None), label)

    def start_episode(row: Row) -> Tool:
        return _start_tool(made, started_form, row)

    started_form = Tool(description, _refuse_call)
    return dataclasses.replace(started_form, start=start_episode)


def wrap_function(*, function: str) -> Tool:
    """The tool of a function, under the name and the schema of `@function_tool` if it has them."""
    label, target = f"{KEY}: {function}", import_attribute(function, KEY, "a tool")
    target = getattr(target, "fn", target)  # verl's FunctionTool
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    schemas = [entry.tool_schema for entry in registry.values() if entry.fn is target]
    form = _read_schema(schemas[0], label) if schemas else describe_function(target, label)
    return Tool(form, lambda **given: read_verl_result(wait_for_result(target(**given))))


def _read_schema(schema: Any, label: str) -> ToolDescription:
    return read_openai_schema(getattr(schema, "source", schema), label)


def read_verl_result(value: Any) -> ToolResult:
    """Return what a verl tool returned: a response, or a tuple (response, reward, metrics).

    Metrics that are not numbers are left out.

    Raises: EnvironmentFault for a reward that is not finite; ToolError as `read_result` does.
    """
    if not isinstance(value, tuple):
        return read_result(value)
    if not 1 <= len(value) <= 3:
        raise TypeError(f"a verl tool returns (response, reward, metrics), got {len(value)} values")
    response, reward, metrics = (*value, None, None)[:3]
    numbers = {k: v for k, v in (metrics or {}).items() if isinstance(v, int | float)}
    return dataclasses.replace(
        read_result(response),
        reward=0.0 if reward is None else check_number(reward, "the reward of the tool"),
        metrics=check_numbers(numbers, "the tool's metrics"),
    )


def _parse_schema(schema: Any) -> Any:
    """verl's own object for a schema, or one with the same names if verl is not installed."""
    if not isinstance(schema, Mapping):
        return schema
    try:
        return importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema(**schema)
    except ImportError:
        function = schema.get("function", {})
        return SimpleNamespace(
            type=schema.get("type", "function"),
            function=SimpleNamespace(**function),
            source=schema,
        )


def _start_tool(tool: Any, form: Tool, row: Row) -> Tool:
    """The tool of one episode, with verl's instance id."""
    name = form.description.name
    instance: list[Any] = []  # the id, as soon as there is one

    async def execute(**parameters: Any) -> Any:
        if not instance:
            instance.append(await _create_instance(tool, name, row))
        return read_verl_result(await _await(tool.execute(instance[0], parameters)))

    async def finish() -> dict[str, float]:
        if not instance:
            return {}
        instance_id = instance.pop()
        try:
            reward = await _await(tool.calc_reward(instance_id))
        finally:
            await _await(tool.release(instance_id))
        return {f"tool/{name}": 0.0 if reward is None else reward}

    return dataclasses.replace(
        form, call=execute, close=lambda: wait_for_result(finish()), start=None
    )


async def _create_instance(tool: Any, name: str, row: Row) -> Any:
    """Create verl's instance; the row's extra_info may have arguments for it, as in verl."""
    extra = row.columns.get("extra_info")
    by_tool = extra.get("tools_kwargs") if isinstance(extra, Mapping) else None
    entry = by_tool.get(name) if isinstance(by_tool, Mapping) else None
    arguments = (entry.get("create_kwargs") if isinstance(entry, Mapping) else None) or {}
    takes_any = any(
        p.kind is p.VAR_KEYWORD or p.name == "create_kwargs"
        for p in inspect.signature(tool.create).parameters.values()
    )
    created = await _await(tool.create(**({"create_kwargs": arguments} if takes_any else {})))
    return created[0] if isinstance(created, tuple) else created


async def _await(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _refuse_call(**_: Any) -> Any:
    raise RuntimeError("the tool has no episode; ToolEnvironment.reset starts it")
