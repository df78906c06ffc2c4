# SPDX-License-Identifier: Apache-2.0
"""Environments of users in our own form, whose methods may be async and partly absent.

Required are `reset(row, *, seed)` and `step(messages)`; `close` and `tools` are optional. Calls of
those tools are turns like others: `step` answers them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxmoe.data.rows import Message, Row, ToolDescription
from jaxmoe.environments.async_loop import wait_for_result
from jaxmoe.environments.environment import Unchecked
from jaxmoe.environments.tool_schema import describe_function, read_openai_schema
from jaxmoe.environments.tools import Tool


class NativeEnvironment:
    """One episode with an object of the user's; async methods are awaited."""

    def __init__(self, make: Callable[[], Any], label: str) -> None:
        self._make = make
        self._label = label
        self._instance: Any = None
        self._tools: Sequence[ToolDescription] = ()

    @property
    def tools(self) -> Sequence[ToolDescription]:
        return self._tools

    def check_row(self, row: Row) -> None:
        check = getattr(self._make(), "check_row", None)
        if check is not None:
            wait_for_result(check(row))

    def reset(self, row: Row, *, seed: int) -> Unchecked:
        self._instance = self._make()
        result = wait_for_result(self._instance.reset(row, seed=seed))
        label = f"{self._label}: a tool"
        self._tools = [_describe_tool(x, label) for x in getattr(self._instance, "tools", ())]
        return result

    def step(self, messages: list[Message]) -> Unchecked:
        return wait_for_result(self._instance.step(messages))

    def close(self) -> Unchecked:
        instance, self._instance = self._instance, None
        close = getattr(instance, "close", None)
        return None if close is None else wait_for_result(close())


def _describe_tool(tool: Any, label: str) -> ToolDescription:
    """The description of a `Tool`, of a function, or of a schema in OpenAI's form."""
    if isinstance(tool, ToolDescription):
        return tool
    if isinstance(tool, Tool):
        return tool.description
    if callable(tool):
        return describe_function(tool, label)
    return read_openai_schema(tool, label)
