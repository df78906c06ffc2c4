# SPDX-License-Identifier: Apache-2.0
"""Parse the turns of a stored chat into messages, tool calls and tool turns included.

Tool calls are stored in OpenAI's format (`tool_calls`), or with harmony's fields (`channel`,
`recipient`, `content_type`). Next: jaxmoe/data/cells.py makes rows of the messages.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json
from jaxmoe.data.harmony.tools import tool_recipient
from jaxmoe.data.row_tools import drop_nulls
from jaxmoe.data.rows import Message

EXAMPLE_CHAT = '[{"role": "user", "content": "2 + 2 ="}]'
_EXAMPLE_CALL = '{"id": "1", "function": {"name": "add", "arguments": "{}"}}'
_EXAMPLE_TOOL = '{"role": "tool", "name": "add", "content": "4"}'
_NO_CALLS = ", and no tool calls (an assistant's turn may have tool_calls)"
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
_CHANNELS = ("analysis", "commentary", "final")


def is_text(value: Any) -> bool:
    """True for a string that is not only white space."""
    return isinstance(value, str) and bool(value.strip())


def parse_chat(location: str, name: str, turns: list[Any]) -> list[Message]:
    """The messages of a chat that ends with a user turn.

    An assistant turn with `tool_calls` becomes a message for its content, on the commentary
    channel, and one for each call. Its `reasoning_content`, `reasoning` or `thinking` becomes a
    message before it, on the analysis channel. A tool turn names its tool, or the id of an
    earlier call.

    location, name: "file:line" and the column, for error messages.
    Raises: ConfigError for turns that cannot be written as messages.
    """
    messages: list[Message] = []
    tools_by_id: dict[str, str] = {}
    for i, turn in enumerate(turns):
        last = i == len(turns) - 1
        label = f"{location}: {name}[{i}]{' (the last)' if last else ''}"
        messages += _parse_turn(label, turn, tools_by_id, first=i == 0, last=last)
    return messages


def _parse_turn(
    label: str, turn: Any, tools_by_id: dict[str, str], *, first: bool, last: bool
) -> list[Message]:
    fields: dict[str, Any] = turn if isinstance(turn, dict) else {}
    role, content = fields.get("role"), _join_text_parts(fields.get("content", ""))
    calls = fields.get("tool_calls") if role == "assistant" and not last else None
    has_other_calls = not calls and (fields.get("tool_calls") or fields.get("function_call"))
    if last:
        roles = ("user",)
    elif first:
        roles = ("system", "developer", "user", "assistant")
    else:
        roles = ("user", "assistant", "tool")
    may_be_empty = (content is None and calls) or (
        isinstance(content, str) and (calls or role == "tool")
    )
    if (
        not isinstance(role, str)
        or role not in roles
        or not (is_text(content) or may_be_empty)
        or has_other_calls
    ):
        raise ConfigError(
            f"{label} must have a role ({' or '.join(roles)}) and a content that is a non-empty "
            f"text{_NO_CALLS if has_other_calls else ''}, got {turn!r:.60}. Write {EXAMPLE_CHAT}"
        )
    message = Message(role, content or "")
    if role not in ("assistant", "tool"):
        return [message]
    channel, recipient, kind = (
        _parse_text_field(label, fields, key) for key in ("channel", "recipient", "content_type")
    )
    if channel and channel not in _CHANNELS:
        raise ConfigError(
            f"{label} must have the channel {', '.join(_CHANNELS[:-1])} or {_CHANNELS[-1]}, got "
            f"{channel!r:.40}. Leave it out for final."
        )
    thought = _parse_thought(label, fields)
    kind = kind.removeprefix("<|constrain|>").strip()
    message = replace(message, channel=channel, recipient=recipient, content_type=kind)
    if role == "tool":
        return [replace(message, name=_find_tool_name(label, fields, tools_by_id))]
    if not calls:
        return [*thought, message]
    preamble = [replace(message, channel=channel or "commentary")] if is_text(content) else []
    return thought + preamble + _parse_calls(label, calls, tools_by_id)


def _parse_calls(label: str, calls: Any, tools_by_id: dict[str, str]) -> list[Message]:
    messages = []
    for call in calls if isinstance(calls, list) else [None]:
        fields = call if isinstance(call, Mapping) else {}
        function = fields.get("function", fields)
        function = function if isinstance(function, Mapping) else {}
        name, arguments = function.get("name"), function.get("arguments")
        if not is_text(name) or not isinstance(arguments, str | Mapping):
            raise ConfigError(
                f"{label} must have tool_calls with names and arguments, got {calls!r:.60}. "
                f"Write {_EXAMPLE_CALL}"
            )
        recipient = _complete_name(str(name))
        if isinstance(arguments, Mapping):
            arguments = json.dumps(drop_nulls(arguments), ensure_ascii=False, default=str)
        elif recipient != tool_recipient("python"):  # whose arguments are code
            arguments = _decode_arguments(label, arguments)
        tools_by_id[str(fields.get("id"))] = recipient
        messages.append(
            Message(
                "assistant",
                arguments,
                channel="commentary",
                recipient=recipient,
                content_type="json",
            )
        )
    return messages


def _decode_arguments(label: str, text: str) -> str:
    """The JSON object of a call's arguments, which exports may have encoded twice."""
    value: Any = text if text.strip() else "{}"
    decoded = value
    while isinstance(decoded, str):
        value = decoded
        try:
            decoded = parse_json(value)
        except ValueError:
            break
    if not isinstance(decoded, dict):
        raise ConfigError(
            f"{label} must have tool_calls whose arguments are a JSON object, got {text!r:.60}. "
            f"Write {_EXAMPLE_CALL}"
        )
    return value


def _parse_thought(label: str, fields: Mapping[str, Any]) -> list[Message]:
    """The message of a stored chain of thought, which servers and TRL keep beside the content."""
    texts = [_parse_text_field(label, fields, key) for key in _THOUGHT_KEYS]
    return [Message("assistant", text, channel="analysis") for text in filter(None, texts)][:1]


def _find_tool_name(label: str, fields: Mapping[str, Any], tools_by_id: dict[str, str]) -> str:
    name = _parse_text_field(label, fields, "name")
    if name:
        return _complete_name(name)
    call = str(fields.get("tool_call_id"))
    if call not in tools_by_id:
        raise ConfigError(
            f"{label} must have the name of the tool, or the tool_call_id of an earlier call, got "
            f"{fields!r:.60}. Write {_EXAMPLE_TOOL}"
        )
    return tools_by_id[call]


def _complete_name(name: str) -> str:
    return name if "." in name else tool_recipient(name)


def _parse_text_field(label: str, fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{label} must have a text as {key}, got {value!r:.40}. Leave it out.")
    return (value or "").strip()


def _join_text_parts(content: Any) -> Any:
    """Join a list of OpenAI text parts into one text; return any other content unchanged."""
    if not isinstance(content, list) or not content:
        return content
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in content
    ]
    strings = [text for text in texts if isinstance(text, str)]
    return "\n".join(strings) if len(strings) == len(texts) else content
