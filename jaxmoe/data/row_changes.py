# SPDX-License-Identifier: Apache-2.0
"""Write a changed question or answer of a row into the columns that it was read from.

`data.map_rows` changes the fields of a row; reward functions and environments read its columns.
Next: jaxmoe/collection/row_functions.py calls this.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.config.json_object import parse_json
from jaxmoe.data.cells import read_row, stored_answer
from jaxmoe.data.json_columns import CHAT_COLUMNS, read_single_text
from jaxmoe.data.rows import Row


def write_changes(row: Row, changed: Row, names: Mapping[str, str]) -> Row:
    """`changed`, with its question and its answers in the columns that hold those of `row`.

    A chat has the question as its last turn, and its other turns as before. An answer has the form
    of the stored one if it can: 8 in place of 4, but "eight" too. Columns that hold anything else
    stay, also those that the function which changed the row has written itself.

    names: data.columns, whose columns are written too.
    Raises: ConfigError if the answer of a row with several changed and the others did not.
    """
    columns = dict(changed.columns)
    name = next((name for name in CHAT_COLUMNS if name in columns), None)
    if changed.question != row.question and name is not None:
        for column in dict.fromkeys((name, names.get("question", name))):
            if _parse_question(columns.get(column)) == row.question:
                columns[column] = _replace_question(columns[name], changed.question)
    name, stored = stored_answer(columns)
    if _list_answers(changed) != _list_answers(row) and name and _is_answer(stored, row):
        changed, value = _make_answer(stored, row, changed)
        file_name = names.get("answer", name)
        if file_name in columns and _is_answer(columns[file_name], row):
            columns[file_name] = value
        parent, _, field = name.rpartition(".")
        columns |= {parent: {**columns[parent], field: value}} if parent else {name: value}
    return changed if columns == changed.columns else replace(changed, columns=columns)


def _parse_question(value: Any) -> str | None:
    """The question of a text or a chat; None for any other value."""
    with suppress(ConfigError):
        return read_row("", {"question": value}, answers=False).question
    return None


def _replace_question(prompt: Any, question: str) -> Any:
    """A prompt as a row stores it, a text or a chat, with another question."""
    if isinstance(prompt, str):
        return question
    *earlier, last = prompt
    is_text = isinstance(last["content"], str)
    content = question if is_text else [{"type": "text", "text": question}]
    return [*earlier, {**last, "content": content}]


def _list_answers(row: Row) -> tuple[str, ...]:
    return () if row.answer is None else (row.answer, *row.other_answers)


def _read_answers(stored: Any) -> tuple[str, ...]:
    return _list_answers(read_row("", {"question": "?", "answer": stored}, answers=False))


def _is_answer(stored: Any, row: Row) -> bool:
    """True if a column's value is the answer of the row; a value that could not be read is not."""
    if row.answer is None or stored is None:
        return row.answer is stored
    # A procedural task writes any answer as a text, and a file does not.
    return str(stored) == row.answer or _read_answers(stored) == _list_answers(row)


def _make_answer(stored: Any, row: Row, changed: Row) -> tuple[Row, Any]:
    """The changed row, and its answers in the form of a column's value; None if it has none.

    Other answers that did not change are dropped if they were spellings of the one that did.
    """
    is_stale = bool(row.other_answers) and changed.other_answers == row.other_answers
    examples = stored if isinstance(stored, list) else [stored]
    if is_stale and len(examples) > 1:
        raise ConfigError(
            f"data.map_rows must change all answers of a row or none; of {row.location or 'a row'} "
            f"came answer={changed.answer!r:.40} beside {row.other_answers[0]!r:.40} as before. "
            "Try return dataclasses.replace(row, answer=…, other_answers=())."
        )
    if is_stale:
        changed = replace(changed, other_answers=())
    values: list[Any] = []
    spellings: list[str] = []
    for text in _list_answers(changed):
        if text not in spellings:
            values.append(_parse_like(text, examples))
            spellings += _read_answers(values[-1])
    if is_stale:
        new_spellings = tuple(text for text in spellings if text != changed.answer)
        changed = replace(changed, other_answers=new_spellings)
    is_single = len(values) == 1 and not isinstance(stored, list)
    return changed, values[0] if is_single else values or None


def _parse_like(text: str, examples: Sequence[Any]) -> Any:
    """The value that a text spells, if it is of a type of the examples; else the text."""
    if any(isinstance(x, str) and read_single_text(x) is not None for x in examples):
        return json.dumps([text], ensure_ascii=False)
    types = {type(example) for example in examples}
    value: Any = text
    with suppress(ValueError):
        value = parse_json(text.lower())
    if type(value) is bool and bool in types:
        return value
    is_number = type(value) in (int, float) and math.isfinite(value)
    return value if is_number and types & {int, float} else text
