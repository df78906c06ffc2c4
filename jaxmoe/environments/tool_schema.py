# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of a function's parameters, from its types and its docstring.

The forms are those that Hugging Face's chat templates use, which TRL and verl rely on too.
Next: jaxmoe/environments/tools.py checks the arguments of a call against them.
"""

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.errors import suggest_name
from jaxmoe.data.rows import ToolDescription
from jaxmoe.environments.step_check import describe_value

_JSON_TYPES = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
SCHEMA_EXAMPLE = (
    '{"type": "function", "function": {"name": "search", "description": "…", "parameters": '
    '{"type": "object", "properties": {}, "required": []}}}'
)
_SUPPORTED = "int, float, str, bool, list, dict, Literal, Enum, unions of them and Optional"
_SECTION = re.compile(r"\n[ \t]*(Args|Arguments|Returns|Raises|Yields|Examples?):[ \t]*(?=\n|$)")
_ARGUMENT = re.compile(r"(\w+)(?:[ \t]*\([^()\n]*\))?:[ \t]*(.*)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def read_openai_schema(schema: Any, label: str) -> ToolDescription:
    """The description of a tool from OpenAI's form: a dict, or an object with the same names."""
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_unset=True, exclude_none=True)
    function = schema.get("function", schema) if isinstance(schema, Mapping) else {}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{label}: tool_schema must be a schema in OpenAI's form, got {schema!r:.80}. Write "
            f"{SCHEMA_EXAMPLE}."
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolDescription(function["name"], function.get("description") or "", parameters)


def describe_function(
    function: Callable[..., Any], label: str, bound: Mapping[str, Any] | None = None
) -> ToolDescription:
    """The description of a tool: a function's name, its docstring's summary, a JSON schema.

    label: of the tool in messages. bound: options; these parameters are not the policy's.
    Raises: ConfigError for a function without docstring, types, or descriptions of its arguments.
    """
    doc = inspect.getdoc(function) or ""
    summary, arguments = _parse_docstring(doc)
    if not summary:
        raise ConfigError(
            f"{label} must have a docstring, which tells the policy what the tool does, got none. "
            'Write """Multiply two numbers.""" and a section "Args:" below its def.'
        )
    try:
        hints = typing.get_type_hints(function, include_extras=False)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"{label} must have types that can be resolved; {error}. Import them in its module."
        ) from error
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in (bound or {}):
            continue
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise ConfigError(
                f"{label} must take its arguments by name, got {parameter}. Name each of them."
            )
        if name not in hints:
            raise ConfigError(
                f"{label} must have a type for {name}, got none. Write {name}: str, or one of "
                f"{_SUPPORTED}."
            )
        if name not in arguments:
            raise ConfigError(
                f'{label} must describe {name} in its docstring. Add the line "{name}: …" to the '
                'section "Args:".'
            )
        properties[name] = _describe_parameter(hints[name], arguments[name], f"{label}: {name}")
        if parameter.default is parameter.empty:
            required.append(name)
    schema = {"type": "object", "properties": properties}
    name = getattr(function, "__name__", type(function).__name__)
    return ToolDescription(name, summary, schema | ({"required": required} if required else {}))


def schema_of_type(hint: Any, label: str) -> dict[str, Any]:
    """The JSON schema of a type.

    Raises: ConfigError, which begins with `label`, for a type that JSON has no form of.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _schema_of_values([member.value for member in hint], label)
    if origin is typing.Literal:
        return _schema_of_values(list(args), label)
    if origin in (list, dict) and not args:  # typing.List and typing.Dict without a parameter
        return {"type": _JSON_TYPES[origin]}
    if origin is list:
        return {"type": "array", "items": schema_of_type(args[0], label)}
    if origin is dict and args[0] is str:
        return {"type": "object", "additionalProperties": schema_of_type(args[1], label)}
    if origin in (typing.Union, types.UnionType):
        schemas = [schema_of_type(arg, label) for arg in args if arg is not type(None)]
        if len(schemas) == 1:
            schema = schemas[0]
        elif all(s.keys() == {"type"} and isinstance(s["type"], str) for s in schemas):
            schema = {"type": sorted({s["type"] for s in schemas})}
        else:
            schema = {"anyOf": schemas}
        return schema | ({"nullable": True} if type(None) in args else {})
    raise ConfigError(f"{label} must have a type that JSON has, got {hint}. Use {_SUPPORTED}.")


def check_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """The fault in the arguments of a call, as a text for the policy; None if they fit."""
    properties = schema.get("properties") or {}
    for name in arguments:
        if name not in properties and not schema.get("additionalProperties"):
            return f"there is no argument {name[:100]!r}. {suggest_name(name, properties)}"
    missing = [name for name in schema.get("required") or () if name not in arguments]
    if missing:
        return f"the argument {missing[0]!r} is missing"
    for name, value in arguments.items():
        fault = _check_value(value, properties.get(name) or {})
        if fault is not None:
            return f"the argument {name!r} must be {fault}"
    return None


def restore_enums(value: Any, hint: Any) -> Any:
    """Replace JSON values by members where the type of a checked argument is an Enum."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if origin is list and isinstance(value, list):
        return [restore_enums(x, args[0]) for x in value]
    if origin is dict and isinstance(value, dict):
        return {name: restore_enums(x, args[1]) for name, x in value.items()}
    if origin in (typing.Union, types.UnionType):
        for arg in args:
            if _check_value(value, schema_of_type(arg, "")) is None:
                return restore_enums(value, arg)
    return value


def _check_value(value: Any, schema: Mapping[str, Any]) -> str | None:
    """The requirement that a JSON value violates, and the value; None if it fits."""
    if value is None and (schema.get("nullable") or "type" not in schema and not schema):
        return None
    branches = schema.get("anyOf")
    if branches:
        faults = [_check_value(value, branch) for branch in branches]
        return None if None in faults else faults[0]
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names and not any(_has_type(value, name) for name in names):
        return f"of type {' or '.join(names)}, got {describe_value(value)}"
    choices = schema.get("enum")
    if choices is not None and not any(value == x and type(value) is type(x) for x in choices):
        return f"one of {json.dumps(choices)}, got {describe_value(value)}"
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return next(filter(None, (_check_value(x, schema["items"]) for x in value)), None)
    if isinstance(value, dict):
        return _check_object(value, schema)
    return None


def _check_object(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    if "properties" in schema:
        fault = check_arguments(value, {"additionalProperties": True, **schema})
        return None if fault is None else f"an object that fits: {fault}"
    values = schema.get("additionalProperties")
    if not isinstance(values, Mapping):
        return None
    return next(filter(None, (_check_value(x, values) for x in value.values())), None)


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    match name:
        case "integer":
            return isinstance(value, int)
        case "number":
            return isinstance(value, int | float)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case "null":
            return value is None
    return name not in ("boolean",)  # a type that JSON schema does not have: the tool decides


def _schema_of_values(values: list[Any], label: str) -> dict[str, Any]:
    """The schema of one of several values."""
    if not values or any(
        type(value) not in (int, float, str, bool, type(None)) for value in values
    ):
        raise ConfigError(f"{label} must be one of texts, numbers or booleans, got {values}.")
    names = sorted({_JSON_TYPES[type(value)] for value in values if value is not None})
    schema: dict[str, Any] = {"type": names[0] if len(names) == 1 else names} if names else {}
    return (
        schema
        | {"enum": [x for x in values if x is not None]}
        | ({"nullable": True} if None in values else {})
    )


def _describe_parameter(hint: Any, text: str, label: str) -> dict[str, Any]:
    schema = schema_of_type(hint, label)
    choices = _CHOICES.search(text)
    if choices:
        try:
            schema["enum"] = json.loads(choices[1])
        except ValueError as error:
            raise ConfigError(
                f'{label}: "(choices: …)" of the docstring must be a JSON list; {error}. Write '
                '(choices: ["a", "b"]).'
            ) from error
        text = text[: choices.start()].strip()
    return schema | {"description": text}


def _parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Summary and descriptions of arguments of a docstring in Google's style."""
    summary, *sections = _SECTION.split("\n" + doc.strip())
    arguments: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title in ("Args", "Arguments"):
            arguments |= _parse_arguments(body)
    return summary.strip(), arguments


def _parse_arguments(body: str) -> dict[str, str]:
    """Descriptions by name; lines that are indented further continue an argument."""
    lines = [line for line in body.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    entries: list[str] = []
    for line in lines:
        if len(line) - len(line.lstrip()) == indent or not entries:
            entries.append(line.strip())
        else:
            entries[-1] += " " + line.strip()
    matches = [_ARGUMENT.fullmatch(entry) for entry in entries]
    return {match[1]: match[2].strip() for match in matches if match}
