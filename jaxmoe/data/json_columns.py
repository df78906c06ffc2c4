# SPDX-License-Identifier: Apache-2.0
"""Columns that hold JSON as text, as CSV and some parquet exports leave them: chats and verl's.

A chat that stays a text would be trained on as a question full of brackets, and nothing would
fail. Next: jaxmoe/data/cells.py.
"""

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json

CHATS = ("prompt", "question", "messages")
_OBJECTS = ("reward_model", "extra_info")
_LOOKS_LIKE_A_CHAT = re.compile(r"\s*\[?\s*\{.*?[\"']role[\"']\s*:", re.DOTALL)
_LOOKS_LIKE_AN_OBJECT = re.compile(r"\s*\{")


def decode_columns(where: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record with chats, reward_model and extra_info decoded where they are stored as text.

    The text is JSON, or what Python prints for such a value. Every other column is left alone.
    Raises: ConfigError for a text that looks like one of these and cannot be read.
    """
    decoded: dict[str, Any] = {}
    for names, looks, kind, example in (
        (CHATS, _LOOKS_LIKE_A_CHAT, list, '[{"role": "user", "content": "2 + 2 ="}]'),
        (_OBJECTS, _LOOKS_LIKE_AN_OBJECT, dict, '{"ground_truth": "4"}'),
    ):
        for name in names:
            text = record.get(name)
            if not isinstance(text, str) or not looks.match(text):
                continue
            value = _read(text)
            if not isinstance(value, kind):
                what = "a chat" if kind is list else "an object"
                raise ConfigError(
                    f"{where}: {name} looks like {what} stored as text and cannot be read as one, "
                    f"got {text!r:.60}. Write {example}, as JSON; a question that begins so is "
                    "the content of a user's turn."
                )
            decoded[name] = value
    return {**record, **decoded} if decoded else record


def _read(text: str) -> Any:
    """The value of JSON or of a Python literal; None for any other text."""
    with suppress(ValueError):
        return parse_json(text)
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
