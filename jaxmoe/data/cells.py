# SPDX-License-Identifier: Apache-2.0
"""Parse the columns of a file's record into a `Row`.

A record holds a plain question or a chat, under the column names of verl or of TRL.
Next: jaxmoe/data/rows.py defines `Row`.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.chat_turns import EXAMPLE_CHAT, is_text, parse_chat
from jaxmoe.data.json_columns import CHAT_COLUMNS, decode_columns, read_single_text
from jaxmoe.data.row_tools import parse_tools
from jaxmoe.data.rows import Message, Row

# In TRL's data sets that have both, `answer` is short and `solution` has the complete derivation.
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution")
_EXAMPLE_ROW = '{"question": "2 + 2 =", "answer": "4"}'


def read_row(location: str, record: Any, *, answers: bool) -> Row:
    """Parse one record; the row keeps all columns.

    Columns read:
    prompt, question or messages: a text, or a chat of user, assistant and tool turns that ends
        with a user turn. A leading system (or developer) turn, or a column `system`, is the row's
        system prompt. The content of a turn is a text, or a list of text parts in OpenAI's format,
        which are joined by line breaks. A chat may be stored as JSON text.
    reward_model.ground_truth (verl), else answer, ground_truth or solution: the answer, which is
        a text, a number, a boolean, or a list of these, each of which is correct.

    tools, or `tools` of the first turn: tools in OpenAI's format, which the prompt declares.

    location: "file:line", for error messages.
    answers: True if a row must have an answer. If False, a missing or unreadable answer becomes
        None: the reward functions decide.

    Raises: ConfigError that names `location` if the record has any other form.
    """
    if not isinstance(record, dict):
        raise ConfigError(
            f"{location} must be a JSON object, got {type(record).__name__}. Write {_EXAMPLE_ROW}"
        )
    record = decode_columns(location, record)
    name = next((name for name in CHAT_COLUMNS if name in record), None)
    if name is None:
        raise _missing_column_error(location, record, "question", CHAT_COLUMNS)
    chat = _parse_prompt(location, name, record[name])
    tools = parse_tools(location, _find_tools(location, record, record[name]))
    *earlier, last = chat
    return Row(
        last.content,
        *_parse_answers(location, record, answers),
        system=_find_system_prompt(location, record, earlier),
        earlier=tuple(m for m in earlier if m.role not in ("system", "developer")),
        columns=record,
        location=location,
        tools=tools,
        chat=isinstance(record[name], list),
    )


def stored_answer(record: Mapping[str, Any]) -> tuple[str, Any]:
    """(column, unparsed value) of the record's answer; ("", None) if it has no answer column."""
    verl = record.get("reward_model")
    if isinstance(verl, dict) and "ground_truth" in verl:
        return "reward_model.ground_truth", verl["ground_truth"]
    name = next((name for name in _ANSWER_COLUMNS if name in record), "")
    return name, record.get(name)


def _parse_prompt(location: str, name: str, value: Any) -> list[Message]:
    """The messages of a prompt's column; a plain text becomes one user turn."""
    if is_text(value):
        return [Message("user", value)]
    if isinstance(value, list) and value:
        return parse_chat(location, name, value)
    raise ConfigError(
        f"{location}: {name} must be a non-empty text or a chat, got {value!r:.60}. "
        f"Write {_EXAMPLE_ROW}, or a chat {EXAMPLE_CHAT}"
    )


def _find_system_prompt(location: str, record: Mapping[str, Any], earlier: list[Message]) -> str:
    prompts = [m.content for m in earlier[:1] if m.role in ("system", "developer")]
    column = record.get("system") or ""
    if not isinstance(column, str):
        raise ConfigError(
            f"{location}: system must be a text, the row's system prompt, got {column!r:.60}. "
            "Rename the column if it is not a system prompt."
        )
    if prompts and column:
        raise ConfigError(
            f"{location} must have one system prompt; it has a column system and a "
            f"{earlier[0].role} turn. Drop one of them."
        )
    return prompts[0] if prompts else column


def _find_tools(location: str, record: Mapping[str, Any], chat: Any) -> Any:
    """The column of tools, or the tools of the chat's first turn."""
    first = chat[0] if isinstance(chat, list) and chat else None
    stored = [record.get("tools"), first.get("tools") if isinstance(first, dict) else None]
    values = [value for value in stored if value]
    if len(values) > 1:
        raise ConfigError(
            f"{location} must declare its tools once; it has a column tools and a first turn with "
            "tools. Drop one of them."
        )
    return values[0] if values else None


def _parse_answers(
    location: str, record: Mapping[str, Any], required: bool
) -> tuple[str | None, tuple[str, ...]]:
    name, value = stored_answer(record)
    if not name and required:
        raise _missing_column_error(location, record, "answer", _ANSWER_COLUMNS)
    alternatives = value if isinstance(value, list) else [value]
    texts = [text for alternative in alternatives for text in _answer_texts(alternative)] or [None]
    if None in texts:
        if required:
            raise ConfigError(
                f"{location}: {name} must be a non-empty text, a number, a boolean, or a list of "
                f"these, got {value!r:.60}. Write {_EXAMPLE_ROW}, or score it yourself: "
                "--set data.rewards=module:function"
            )
        return None, ()
    first, *alternative_texts = [text for text in texts if text is not None]
    return first, tuple(alternative_texts)


def _answer_texts(value: Any) -> list[str | None]:
    """All accepted spellings of an answer; [None] if the value cannot be an answer."""
    if isinstance(value, bool):
        # Python's spelling and JSON's are both right. bool is tested first, because it is a
        # subclass of int.
        return [str(value), str(value).lower()]
    # CSV stores a boolean and a list as text. A list of several is one answer: it may be a list.
    if value in ("True", "False", "true", "false"):
        return [value, value.lower() if value[0].isupper() else value.title()]
    if isinstance(value, str) and (single := read_single_text(value)) is not None:
        return [single, value]
    return [_answer_text(value)]


def _answer_text(value: Any) -> str | None:
    """The text that responses are compared with; None if the value cannot be an answer."""
    if is_text(value):
        return value
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        # Without an exponent, because nobody answers "1e-07".
        return format(Decimal(repr(value)), "f")
    return None


def _missing_column_error(
    location: str, record: Mapping[str, Any], kind: str, names: tuple[str, ...]
) -> ConfigError:
    *first_names, last = names
    return ConfigError(
        f"{location} must have a column {', '.join(first_names)} or {last}; it has "
        f"{', '.join(map(str, record)) or 'none of them'}. Write {_EXAMPLE_ROW}, or name the "
        f"file's own column: --set data.columns.{kind}=NAME"
    )
