# SPDX-License-Identifier: Apache-2.0
"""From the columns of a file to a row: plain questions, chats, and the names verl and TRL use.

Next: jaxmoe/data/rows.py is what they become.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.data.json_columns import CHATS, decode_columns
from jaxmoe.data.rows import Message, Row

_ANSWER = ("answer", "ground_truth", "solution")  # of TRL's sets with both, answer is the short one
_EXAMPLE = '{"question": "2 + 2 =", "answer": "4"}'
_CHAT = '[{"role": "user", "content": "2 + 2 ="}]'


def read_row(where: str, record: Any, *, answers: bool) -> Row:
    """The row of one record; all its columns come along.

    prompt, question or messages: a text, or a chat of user and assistant turns that ends with the
        user's; a system (or developer) turn first, or a column `system`, is the row's system
        prompt. A turn's content is a text, or a list of text parts as OpenAI has them, which are
        joined by line breaks. A chat may be stored as JSON text.
    answer: reward_model.ground_truth (verl), else answer, ground_truth or solution: a text, a
        number, a boolean, or a list of these, each of which is right.
    answers: whether a row must have one. Without, whatever is no such answer is left to the
        reward functions.

    Raises: ConfigError naming `where`, "file:line", for anything else.
    """
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where} must be a JSON object, got {type(record).__name__}. Write {_EXAMPLE}"
        )
    record = decode_columns(where, record)
    name = next((name for name in CHATS if name in record), None)
    if name is None:
        raise _missing(where, record, CHATS)
    chat = _chat(where, name, record[name])
    *earlier, last = chat
    return Row(
        last.content, *_answers(where, record, answers), system=_system(where, record, earlier),
        earlier=tuple(m for m in earlier if m.role in ("user", "assistant")), columns=record,
        where=where, chat=isinstance(record[name], list),
    )  # fmt: skip


def stored_answer(record: Mapping[str, Any]) -> tuple[str, Any]:
    """(column, what it holds, as the file has it); "" and None where there is none."""
    verl = record.get("reward_model")
    if isinstance(verl, dict) and "ground_truth" in verl:
        return "reward_model.ground_truth", verl["ground_truth"]
    name = next((name for name in _ANSWER if name in record), "")
    return name, record.get(name)


def _chat(where: str, name: str, value: Any) -> list[Message]:
    """A text is a chat of one turn."""
    if _is_text(value):
        return [Message("user", value)]
    if isinstance(value, list) and value:
        return [_turn(where, name, i, turn, last=i == len(value) - 1)
                for i, turn in enumerate(value)]  # fmt: skip
    raise ConfigError(
        f"{where}: {name} must be a text that is not empty, or a chat, got {value!r:.60}. "
        f"Write {_EXAMPLE}, or a chat {_CHAT}"
    )


def _turn(where: str, name: str, i: int, turn: Any, *, last: bool) -> Message:
    fields: dict[str, Any] = turn if isinstance(turn, dict) else {}
    role, content = fields.get("role"), _joined_parts(fields.get("content", ""))
    calls = fields.get("tool_calls") or fields.get("function_call")
    if last:
        roles = ("user",)
    else:
        roles = ("system", "developer", "user", "assistant") if i == 0 else ("user", "assistant")
    if not isinstance(role, str) or role not in roles or not _is_text(content) or calls:
        place = " (the last)" if last else ""
        raise ConfigError(
            f"{where}: {name}[{i}]{place} must have a role, {' or '.join(roles)}, and a content "
            f"that is a text and not empty{', and no tool calls' if calls else ''}, got "
            f"{turn!r:.60}. Write {_CHAT}"
        )
    return Message(role, content)


def _joined_parts(content: Any) -> Any:
    """The text of OpenAI's content parts; anything else as it is."""
    if not isinstance(content, list) or not content:
        return content
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in content
    ]
    strings = [text for text in texts if isinstance(text, str)]
    return "\n".join(strings) if len(strings) == len(texts) else content


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _system(where: str, record: Mapping[str, Any], earlier: list[Message]) -> str:
    told = [m.content for m in earlier[:1] if m.role in ("system", "developer")]
    column = record.get("system") or ""
    if not isinstance(column, str):
        raise ConfigError(
            f"{where}: system must be a text, the row's system prompt, got {column!r:.60}. "
            "Rename the column if it is none."
        )
    if told and column:
        raise ConfigError(
            f"{where} must have one system prompt; it has a column system and a {earlier[0].role} "
            "turn. Drop one of them."
        )
    return told[0] if told else column


def _answers(
    where: str, record: Mapping[str, Any], needed: bool
) -> tuple[str | None, tuple[str, ...]]:
    name, value = stored_answer(record)
    if not name and needed:
        raise _missing(where, record, _ANSWER)
    alternatives = value if isinstance(value, list) else [value]
    texts = [text for alternative in alternatives for text in _texts(alternative)] or [None]
    if None in texts:
        if needed:
            raise ConfigError(
                f"{where}: {name} must be a text that is not empty, a number, a boolean, or a list "
                f"of these, got {value!r:.60}. Write {_EXAMPLE}, or score it yourself: "
                "--set data.rewards=module:function"
            )
        return None, ()
    first, *others = [text for text in texts if text is not None]
    return first, tuple(others)


def _texts(value: Any) -> list[str | None]:
    """An answer as it is compared, each of which is right; None for what is no answer."""
    if isinstance(value, bool):
        return [str(value), str(value).lower()]  # as Python and as JSON write it
    return [_text(value)]


def _text(value: Any) -> str | None:
    """An answer as it is compared; None for what is none."""
    if _is_text(value):
        return value
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return format(Decimal(repr(value)), "f")  # 1e-07 is a number to nobody's answer
    return None


def _missing(where: str, record: Mapping[str, Any], names: tuple[str, ...]) -> ConfigError:
    *most, last = names
    return ConfigError(
        f"{where} must have a column {', '.join(most)} or {last}; it has "
        f"{', '.join(map(str, record)) or 'none of them'}. Write {_EXAMPLE}"
    )
