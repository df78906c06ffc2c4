# SPDX-License-Identifier: Apache-2.0
"""The tools that a config names: "python + my_tools:search(k=3)".

A tool is a built-in name, a function with types and a docstring, or a `Tool`.
Next: jaxmoe/environments/tool_schema.py describes functions.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.errors import suggest_name
from jaxmoe.config.function_specs import (
    check_option_names,
    import_attribute,
    parse_call,
    split_calls,
)
from jaxmoe.config.sandbox import TOOL_NAME, SandboxConfig
from jaxmoe.data.harmony.tools import check_tools
from jaxmoe.data.rows import ToolDescription
from jaxmoe.environments.arithmetic import evaluate_arithmetic
from jaxmoe.environments.sandbox_tool import make_sandbox_tool
from jaxmoe.environments.tool_schema import describe_function, restore_enums
from jaxmoe.environments.tools import Tool

KEY = "data.tools"


def make_python_tool() -> Tool:
    """The built-in calculator: harmony's tool `python`, which takes code and not JSON."""
    description = ToolDescription(
        "python",
        "Evaluate arithmetic written in Python: numbers, + - * / // % **, parentheses, abs, max, "
        "min and round. Print results with print(…); the value of the last line is printed too.",
        {},
    )
    return Tool(description, evaluate_arithmetic, recipient="python", takes_text=True)


def builtin_tools(sandbox: SandboxConfig) -> Mapping[str, Callable[[], Tool]]:
    """The tools that are named without a module."""
    return {"python": make_python_tool, TOOL_NAME: lambda: make_sandbox_tool(sandbox)}


def read_tools(text: str, sandbox: SandboxConfig | None = None) -> tuple[Tool, ...]:
    """Parse calls joined by "+"; () for an empty text.

    sandbox: of the tool python_sandbox; None means the default.

    Raises: ConfigError for a tool that cannot be imported or described, or that occurs twice.
    """
    builtin = builtin_tools(sandbox or SandboxConfig())
    tools = [_read_tool(call, builtin) for call in split_calls(text)]
    addresses = [tool.address for tool in tools]
    repeated = [address for address in addresses if addresses.count(address) > 1]
    if repeated:
        raise ConfigError(
            f"{KEY} must not have two tools of one name, got {repeated[0]} twice. Rename a "
            "function."
        )
    check_tools([tool.description for tool in tools])
    return tuple(tools)


def tool_from_function(
    function: Callable[..., Any], label: str = "", options: Mapping[str, Any] | None = None
) -> Tool:
    """The tool of a function, or of a bound method, which may be async.

    Its types and the descriptions in its docstring (Google's style) make the JSON schema of its
    parameters. options: arguments that the policy does not choose.

    Raises: ConfigError for a function without types or docstring.
    """
    options = dict(options or {})
    label = label or f"the tool {getattr(function, '__name__', function)}"
    description = describe_function(function, label, options)
    hints = typing.get_type_hints(function)

    @functools.wraps(function)
    def call_function(**arguments: Any) -> Any:
        restored = {
            name: restore_enums(value, hints.get(name)) for name, value in arguments.items()
        }
        return function(**options, **restored)

    if description.name == "python":
        return _take_code(description, call_function, label)
    return Tool(description, call_function)


def _take_code(description: ToolDescription, call: Callable[..., Any], label: str) -> Tool:
    """The tool of a function named python: harmony's calls of it are code, not JSON."""
    names = list(description.parameters.get("properties", {}))
    if len(names) != 1:
        raise ConfigError(
            f"{label} must take the code and nothing else, because calls of python are code; it "
            f"takes {', '.join(names) or 'nothing'}. Rename it, or write python(code: str)."
        )
    return Tool(description, lambda code: call(**{names[0]: code}), takes_text=True)


def _read_tool(call: str, builtin: Mapping[str, Callable[[], Tool]]) -> Tool:
    path, options = parse_call(call, KEY)
    if ":" not in path:
        return _make_builtin(path, options, builtin)
    target: Any = import_attribute(path, KEY, "a tool")
    label = f"{KEY}: {path}"
    if isinstance(target, Tool):
        if options:
            raise ConfigError(f"{label} is a Tool, which takes no options, got {options}.")
        return target
    function = inspect.unwrap(target) if callable(target) else target
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        kind = "a class" if isinstance(target, type) else type(target).__name__
        raise ConfigError(
            f"{label} must be a function written in Python, or a Tool, got {kind}. Write a def "
            "with types and a docstring around it."
        )
    check_option_names(label, options, inspect.signature(function).parameters)
    if function.__annotations__.get("return") in (Tool, "Tool"):
        tool: Any = target(**options)
        return tool
    return tool_from_function(target, label, options)


def _make_builtin(
    name: str, options: Mapping[str, Any], builtin: Mapping[str, Callable[[], Tool]]
) -> Tool:
    if name not in builtin:
        hint = suggest_name(name, builtin)
        custom = "" if hint.endswith("?") else " A tool of your own is module:function."
        raise ConfigError(f"{KEY}: there is no tool {name!r}. {hint}{custom}")
    make = builtin[name]
    check_option_names(f"{KEY}: {name}", options, inspect.signature(make).parameters)
    return make()
