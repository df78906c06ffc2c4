# SPDX-License-Identifier: Apache-2.0
"""The system and developer messages of harmony prompts, and the tools that they declare.

Functions are declared in the developer message as TypeScript types, python in the system message.
The texts equal those of oss-harmony. Next: jaxmoe/data/templates.py makes prompts of them.
"""

import re
from collections.abc import Sequence

from jaxmoe.config import ConfigError
from jaxmoe.data.json_schema_types import write_type
from jaxmoe.data.rows import ToolDescription

_FUNCTIONS, _PYTHON = "functions", "python"
# The model was trained with this text.
PYTHON_DESCRIPTION = (
    "Use this tool to execute Python code in your chain of thought. The code will not be shown to "
    "the user. This tool should be used for internal reasoning, but not for code that is intended "
    "to be visible to the user (e.g. when creating plots, tables, or files).\n\n"
    "When you send a message containing Python code to python, it will be executed in a stateful "
    "Jupyter notebook environment. python will respond with the output of the execution or time "
    "out after 120.0 seconds. The drive at '/mnt/data' can be used to save and persist user files. "
    "Internet access for this session is UNKNOWN. Depends on the cluster."
)


def tool_recipient(tool_name: str) -> str:
    """The recipient of calls of a tool, which is also the name of the messages that it writes."""
    return tool_name if tool_name == _PYTHON else f"{_FUNCTIONS}.{tool_name}"


def called_tool(recipient: str) -> str:
    """The name of the tool that a call's recipient means; the inverse of `tool_recipient`."""
    return recipient.removeprefix(f"{_FUNCTIONS}.")


def write_system_text(reasoning_effort: str, tools: Sequence[ToolDescription] = ()) -> str:
    """The content of the system message: the model's standard text, without the date.

    A tool with the name python is declared here, by its description, or by the standard one if it
    has none. The arguments of its calls are code, so its parameters are not shown.
    """
    python = [tool.description or PYTHON_DESCRIPTION for tool in tools if tool.name == _PYTHON]
    sections = [
        "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06",
        f"Reasoning: {reasoning_effort}",
    ]
    if python:
        lines = [f"## {_PYTHON}\n", *_split_lines(python[0])]
        sections += ["# Tools", "\n".join(lines)]
    channels = (
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )
    if any(tool.name != _PYTHON for tool in tools):
        channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
    return "\n\n".join([*sections, channels])


def write_developer_text(instructions: str, tools: Sequence[ToolDescription] = ()) -> str:
    """The content of the developer message; "" without instructions and functions.

    A function with empty `parameters` takes none.
    Raises: ConfigError for names of tools that a call cannot contain, or that are not unique.
    """
    check_tools(tools)
    functions = [tool for tool in tools if tool.name != _PYTHON]
    sections = ["# Instructions", instructions] if instructions else []
    if functions:
        lines = [f"## {_FUNCTIONS}\n", f"namespace {_FUNCTIONS} {{\n"]
        for tool in functions:
            lines += [f"// {line}" for line in _split_lines(tool.description)]
            parameters = f"_: {write_type(tool.parameters)}" if tool.parameters else ""
            lines.append(f"type {tool.name} = ({parameters}) => any;\n")
        lines.append(f"}} // namespace {_FUNCTIONS}")
        sections += ["# Tools", "\n".join(lines)]
    return "\n\n".join(sections)


def check_tools(tools: Sequence[ToolDescription]) -> None:
    """Raise ConfigError unless the names of tools can be called, and are unique."""
    names = [tool.name for tool in tools]
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][\w-]*", name, re.ASCII):
            raise ConfigError(
                f"the name of a tool must consist of letters, digits and underscores; "
                f"got {name!r}. Rename it."
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"the names of tools must be unique; there are {names.count(name)} named {name}. "
                "Rename one of them."
            )


def _split_lines(text: str) -> list[str]:
    lines = re.split(r"\r?\n", text)
    return lines[:-1] if lines[-1] == "" else lines
