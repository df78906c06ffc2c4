# SPDX-License-Identifier: Apache-2.0
"""JSON schemas from functions, and the check of a call's arguments against them."""

import enum
import json
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.config import ConfigError
from jaxmoe.environments.tool_schema import check_arguments, describe_function, schema_of_type


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


def search(query: str, k: int = 3, *, exact: bool = False) -> list[str]:
    """Search the web.

    The pages are those of yesterday.

    Args:
        query: What to look for,
            in any language.
        k (int, optional): Number of pages.
        exact: Match the words exactly.

    Returns:
        The pages.
    """
    return [query] * k


def test_a_function_describes_itself():
    description = describe_function(search, "data.tools: a:search")
    assert description.name == "search"
    assert description.description == "Search the web.\n\nThe pages are those of yesterday."
    assert description.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in any language."},
            "k": {"type": "integer", "description": "Number of pages."},
            "exact": {"type": "boolean", "description": "Match the words exactly."},
        },
        "required": ["query"],
    }
    assert "k" not in describe_function(search, "", {"k": 5}).parameters["properties"]


@pytest.mark.parametrize(
    "hint, schema",
    [
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (dict, {"type": "object"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (list, {"type": "array"}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Optional[int], {"type": "integer", "nullable": True}),  # noqa: UP045
        (int | float, {"type": ["integer", "number"]}),
        (Any, {}),
        (
            list[int] | str,
            {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]},
        ),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (
            Literal[1, "b", None],
            {"type": ["integer", "string"], "enum": [1, "b"], "nullable": True},
        ),
        (Unit, {"type": "string", "enum": ["m", "ft"]}),
    ],
)
def test_each_type_has_its_schema(hint, schema):
    assert schema_of_type(hint, "x") == schema


def no_docstring(a: int):
    return a


def no_types(a):
    """Add.

    Args:
        a: A number.
    """


def no_description(a: int):
    """Add."""


def star(*numbers: int):
    """Add."""


def strange_type(a: set):
    """Add.

    Args:
        a: A set.
    """


def unknown_type(a: "Elsewhere"):  # noqa: F821
    """Add.

    Args:
        a: A thing.
    """


def bad_choices(a: str):
    """Add.

    Args:
        a: A word. (choices: a, b)
    """


@pytest.mark.parametrize(
    "function, message",
    [
        (no_docstring, "must have a docstring"),
        (no_types, "must have a type for a"),
        (no_description, "must describe a in its docstring"),
        (star, "by name"),
        (strange_type, "must have a type that JSON has"),
        (unknown_type, "can be resolved"),
        (bad_choices, "must be a JSON list"),
    ],
)
def test_a_function_that_cannot_be_described_is_one_line(function, message):
    with pytest.raises(ConfigError, match=message) as error:
        describe_function(function, "data.tools: my_tools:f")
    assert str(error.value).startswith("data.tools: my_tools:f") and "\n" not in str(error.value)


def test_choices_of_the_docstring_restrict_a_parameter():
    def paint(colour: str):
        """Paint.

        Args:
            colour: The colour. (choices: ["red", "blue"])
        """

    schema = describe_function(paint, "").parameters
    assert schema["properties"]["colour"] == {
        "type": "string",
        "enum": ["red", "blue"],
        "description": "The colour.",
    }
    assert "one of" in (check_arguments({"colour": "green"}, schema) or "")


@pytest.mark.parametrize(
    "arguments, fault",
    [
        ({"query": "x"}, None),
        ({"query": "x", "k": 1, "exact": True}, None),
        ({}, "'query' is missing"),
        ({"qeury": "x"}, "Did you mean query?"),
        ({"query": "x", "zzz": 1}, "Known: query, k, exact"),
        ({"query": 3}, "of type string"),
        ({"query": "x", "k": "3"}, "of type integer"),
        ({"query": "x", "k": 3.0}, "of type integer"),
        ({"query": "x", "k": True}, "of type integer"),
        ({"query": None}, "of type string"),
    ],
)
def test_arguments_must_fit_the_parameters(arguments, fault):
    reason = check_arguments(arguments, describe_function(search, "").parameters)
    assert reason is None if fault is None else fault in reason


@pytest.mark.parametrize(
    "hint, good, bad",
    [
        (list[int], [[], [1, 2]], [["1"], 3, {}, [None]]),
        (float, [1, 2.5], ["1", True]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "1"}, []]),
        (Any, [None, 1, "x", []], []),
        (Optional[int], [None, 3], ["3"]),  # noqa: UP045
        (list[int] | str, ["x", [1]], [1, ["x"]]),
        (Literal[1, 2], [1, 2], [3, "1", True, 1.0]),
    ],
)
def test_values_are_checked_in_depth(hint, good, bad):
    schema = {"type": "object", "properties": {"x": schema_of_type(hint, "x")}}
    assert [check_arguments({"x": value}, schema) for value in good] == [None] * len(good)
    assert all(check_arguments({"x": value}, schema) for value in bad)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["query", "k", "exact", "zzz"]), _JSON))
def test_arguments_that_pass_can_be_passed(arguments):
    reason = check_arguments(arguments, describe_function(search, "").parameters)
    if reason is None:
        assert isinstance(arguments["query"], str) and isinstance(arguments.get("k", 1), int)
        json.dumps(arguments)
    else:
        assert "\n" not in reason
