# SPDX-License-Identifier: Apache-2.0
"""Decode chats and verl's columns that CSV and some parquet exports store as JSON text.

Without this, a chat stored as text would silently be trained on as a question full of brackets.
Next: jaxmoe/data/cells.py.
"""

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jaxmoe.answers.python_syntax import parse_expression
from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json

CHAT_COLUMNS = ("prompt", "question", "messages")
_OBJECT_COLUMNS = ("reward_model", "extra_info")
_CHAT_PATTERN = re.compile(r"\s*\[?\s*\{.*?[\"']role[\"']\s*:", re.DOTALL)
_SINGLE_PATTERN = re.compile(r"\s*\[\s*\"")
_OBJECT_PATTERN = re.compile(r"\s*\{")


def decode_columns(location: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with chats, reward_model and extra_info decoded if they are stored as text.

    The text is JSON or a Python literal. Other columns are unchanged.

    location: "file:line", for error messages.
    Raises: ConfigError for a text that looks like such a value but cannot be decoded.
    """
    decoded: dict[str, Any] = {}
    for names, pattern, kind, example in (
        (CHAT_COLUMNS, _CHAT_PATTERN, list, '[{"role": "user", "content": "2 + 2 ="}]'),
        (_OBJECT_COLUMNS, _OBJECT_PATTERN, dict, '{"ground_truth": "4"}'),
    ):
        for name in names:
            text = record.get(name)
            if not isinstance(text, str) or not pattern.match(text):
                continue
            value = _parse_value(text)
            if not isinstance(value, kind):
                description = "a chat" if kind is list else "an object"
                raise ConfigError(
                    f"{location}: {name} looks like {description} stored as text, but cannot be "
                    f"decoded, got {text!r:.60}. Write {example}, as JSON. If it is a question "
                    "that begins like that, write it as the content of a user turn."
                )
            decoded[name] = value
    return {**record, **decoded} if decoded else record


def read_single_text(text: str) -> str | None:
    """The only text of a JSON list, such as ["34"]; None for any other text."""
    if not _SINGLE_PATTERN.match(text):
        return None
    value = _parse_value(text)
    is_single = isinstance(value, list) and len(value) == 1 and isinstance(value[0], str)
    return value[0] if is_single and value[0].strip() else None


def _parse_value(text: str) -> Any:
    """The value of a JSON text or of a Python literal; None for any other text."""
    with suppress(ValueError):
        return parse_json(text)
    try:
        return ast.literal_eval(parse_expression(text.strip()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
