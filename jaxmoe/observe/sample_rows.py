# SPDX-License-Identifier: Apache-2.0
"""Lines of samples.jsonl with the types that are shown: the file may be anybody's.

A value of another type is replaced by a word for it, or left out where a number belongs.
Next: jaxmoe/observe/samples_page.py shows them; jaxmoe/envs/recorded.py writes them.
"""

from collections.abc import Mapping
from typing import Any

_TEXTS = ("kind", "row", "prompt", "answer", "response", "stop")
_NUMBERS = ("reward", "advantage", "gap_mean", "gap_max", "length")
_LARGEST = 1e100


def checked_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line that names its stage and step, as `read_samples` gives it."""
    checked = {"stage": row["stage"], "step": row["step"]} | _answer(row)
    if "samples" in row:
        samples = row["samples"] if isinstance(row["samples"], list) else []
        checked["samples"] = [_answer(one) for one in samples if isinstance(one, dict)]
    return checked


def _answer(row: Mapping[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {name: _text(row[name]) for name in _TEXTS if name in row}
    checked |= {name: _number(row[name]) for name in _NUMBERS if name in row}
    tokens = row.get("tokens")
    if isinstance(tokens, list):
        checked["tokens"] = [
            [_text(token[0]), _number(token[1]), _number(token[2])]
            for token in tokens
            if isinstance(token, list) and len(token) == 3
        ]
    return checked


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return repr(value)
    return f"({type(value).__name__})"  # it may be nested deeper than repr can follow


def _number(value: Any) -> int | float | None:
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:
        return None
    return value
