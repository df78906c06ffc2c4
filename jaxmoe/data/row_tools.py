# SPDX-License-Identifier: Apache-2.0
"""Read the tools that a row declares, in OpenAI's format. Next: jaxmoe/data/cells.py."""

from collections.abc import Mapping
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json
from jaxmoe.data.harmony.tools import check_tools
from jaxmoe.data.rows import ToolDescription

_EXAMPLE = (
    '[{"type": "function", "function": {"name": "add", "description": "…", "parameters": {}}}]'
)


def parse_tools(location: str, value: Any) -> tuple[ToolDescription, ...]:
    """The tools of a list, or of a list as JSON text; () for None, "" and an empty list.

    location: "file:line", for error messages.
    Raises: ConfigError for anything else, and for names that no call can contain.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value)
        except ValueError:
            raise _format_error(location, value) from None
    if value is None or value == "":
        return ()
    if not isinstance(value, list):
        raise _format_error(location, value)
    tools = tuple(_parse_tool(location, tool) for tool in value)
    try:
        check_tools(tools)
    except ConfigError as error:
        raise ConfigError(f"{location}: column tools: {error}") from error
    return tools


def drop_nulls(value: Any) -> Any:
    """The value without keys whose value is None, at all levels.

    A column of a parquet file has one type: Arrow gives each object all keys that occur in others.
    """
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _parse_tool(location: str, tool: Any) -> ToolDescription:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    function = drop_nulls(function) if isinstance(function, Mapping) else {}
    name, description = function.get("name"), function.get("description", "")
    parameters = function.get("parameters", {})
    if isinstance(parameters, str):
        try:
            parameters = drop_nulls(parse_json(parameters))
        except ValueError:
            raise _format_error(location, tool) from None
    if not (
        isinstance(name, str) and isinstance(description, str) and isinstance(parameters, Mapping)
    ):
        raise _format_error(location, tool)
    # An object without properties takes no arguments.
    parameters = parameters if parameters.get("properties") else {}
    return ToolDescription(name, description, parameters)


def _format_error(location: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{location}: the column tools must hold a list of tools in OpenAI's format, got "
        f"{value!r:.60}. Write {_EXAMPLE}, or rename the column."
    )
