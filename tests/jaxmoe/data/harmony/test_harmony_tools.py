# SPDX-License-Identifier: Apache-2.0
"""Tools as the model is shown them: functions by the developer, python by the system message."""

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.data.harmony.tools import (
    PYTHON_DESCRIPTION,
    called_tool,
    tool_recipient,
    write_developer_text,
    write_system_text,
)
from jaxmoe.data.rows import ToolDescription

SEARCH = ToolDescription(
    "search",
    "Searches the web.\nQuickly.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "The words."},
            "limit": {"type": "integer", "default": 3},
        },
        "required": ["query"],
    },
)
PYTHON = ToolDescription("python", "", {})


def test_functions_are_a_namespace_of_types():
    text = write_developer_text("Be brief.", [SEARCH, ToolDescription("now", "", {}), PYTHON])
    assert text == (
        "# Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// Searches the web.\n// Quickly.\ntype search = (_: {\n// The words.\nquery: string,\n"
        "limit?: number, // default: 3\n}) => any;\n\ntype now = () => any;\n\n"
        "} // namespace functions"
    )
    assert write_developer_text("", []) == write_developer_text("", [PYTHON]) == ""
    assert write_developer_text("", [SEARCH]).startswith("# Tools")


def test_the_system_message_declares_python_and_function_calls():
    rule = "\nCalls to these tools must go to the commentary channel: 'functions'."
    plain, python, python_and_tools = (
        write_system_text("low", tools) for tools in ([], [PYTHON], [PYTHON, SEARCH])
    )
    assert "Reasoning: low\n\n# Valid channels" in plain and rule not in plain + python
    assert f"# Tools\n\n## python\n\n{PYTHON_DESCRIPTION}\n\n# Valid channels" in python
    assert python_and_tools == python + rule
    custom = ToolDescription("python", "Evaluates arithmetic only.", {})
    assert "## python\n\nEvaluates arithmetic only.\n\n# Valid" in write_system_text(
        "low", [custom]
    )


def test_the_recipient_of_a_call_names_its_tool():
    for name, recipient in (("search", "functions.search"), ("python", "python")):
        assert tool_recipient(name) == recipient and called_tool(recipient) == name
    assert called_tool("browser.open") == "browser.open" and called_tool("") == ""


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["two words"], "letters, digits and underscores; got 'two words'"),
        ([""], "got ''"),
        (["f", "f"], "must be unique; there are 2 named f"),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused(names, message):
    with pytest.raises(ConfigError, match=message):
        write_developer_text("", [ToolDescription(name, "", {}) for name in names])
