# SPDX-License-Identifier: Apache-2.0
"""Tools written for verl 0.9: classes in the form of its BaseTool, and its function tools.

verl is not imported: a class with `execute` and `release` is such a tool. Its instance for an
episode is created with the first call and released at the end of the episode; the rewards of
`execute` and, at the end, of `calc_reward` are parts of the episode's reward.
"""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Row, ToolDescription
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.step_check import check_number, check_numbers
from jaxmoe.environments.tools import Tool, ToolResult, read_result

_METHODS = ("create", "execute", "calc_reward", "release")
_EXAMPLE = (
    '{"type": "function", "function": {"name": "search", "description": "…", "parameters": '
    '{"type": "object", "properties": {}, "required": []}}}'
)


def is_verl_tool(target: Any) -> bool:
    """True for a class or an object in the form of verl's BaseTool."""
    return all(callable(getattr(target, name, None)) for name in _METHODS)


def make_verl_tool(target: Any, options: Mapping[str, Any], label: str) -> Tool:
    """Return the tool of a BaseTool class, made from the options config and tool_schema.

    Raises: ConfigError if there is no schema.
    """
    unknown = sorted(options.keys() - {"config", "tool_schema"})
    if unknown:
        raise ConfigError(
            f"{label} has no option {unknown[0]!r}. A verl tool takes config={{…}} and "
            "tool_schema={…}; put it into config."
        )
    tool = target
    if isinstance(target, type):
        schema = options.get("tool_schema")
        try:
            tool = target(options.get("config", {}), schema and _parse_schema(schema))
        except (AssertionError, AttributeError) as error:
            if schema is not None:
                raise
            raise ConfigError(
                f"{label} must have a schema, got none: {error}. Write tool_schema={_EXAMPLE} "
                "among its options."
            ) from error
    description = read_openai_schema(getattr(tool, "tool_schema", None), label)

    def start_episode(row: Row) -> Tool:
        return _start_tool(tool, started_form, row)

    started_form = Tool(description, _refuse_call)
    return dataclasses.replace(started_form, start=start_episode)


def find_function_schema(function: Callable[..., Any]) -> Any:
    """The schema of a function that `@function_tool` registered under another name or schema.

    None if it did not, or if verl is not loaded.
    """
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    return next((entry.tool_schema for entry in registry.values() if entry.fn is function), None)


def read_openai_schema(schema: Any, label: str) -> ToolDescription:
    """The description of a tool from OpenAI's form: a dict, or an object with the same names."""
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_unset=True, exclude_none=True)
    elif isinstance(schema, SimpleNamespace):
        schema = schema.source
    function = schema.get("function", schema) if isinstance(schema, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{label}: tool_schema must be a schema in OpenAI's form, got {schema!r:.80}. Write "
            f"{_EXAMPLE}."
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolDescription(function["name"], function.get("description") or "", parameters)


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
