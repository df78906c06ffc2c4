# SPDX-License-Identifier: Apache-2.0
"""Check the types in samples.jsonl, which is untrusted, before its rows are shown.

A value of a wrong type is replaced by the name of its type, or by None if it must be a number.
Next: jaxmoe/observe/samples_page.py shows them; jaxmoe/collection/recorded.py writes them.
"""

from collections.abc import Mapping
from typing import Any

_TEXTS = ("kind", "row", "prompt", "answer", "response", "stop", "fault")
_NUMBERS = ("reward", "advantage", "gap_mean", "gap_max", "length", "turns", "env_length")
WRITERS = ("policy", "environment")  # of the texts of an episode
_MAX_ABS_VALUE = 1e100


def check_row_types(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `read_samples` in which all values have the expected types."""
    checked = {"stage": row["stage"], "step": row["step"]} | _check_answer(row)
    if "samples" in row:
        samples = row["samples"] if isinstance(row["samples"], list) else []
        checked["samples"] = [
            _check_answer(sample) for sample in samples if isinstance(sample, dict)
        ]
    return checked


def _check_answer(row: Mapping[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {name: _check_text(row[name]) for name in _TEXTS if name in row}
    checked |= {name: _check_number(row[name]) for name in _NUMBERS if name in row}
    tokens = row.get("tokens")
    if isinstance(tokens, list):
        checked["tokens"] = [
            [_check_text(token[0]), *map(_check_number, token[1:])]
            for token in tokens
            # A reply of the environment has neither gap nor probability.
            if isinstance(token, list) and len(token) in (1, 3)
        ]
    for name in ("turn_rewards", "turn_advantages"):
        if isinstance(row.get(name), list):
            checked[name] = [_check_number(x) for x in row[name]]
    transcript = row.get("transcript")
    if isinstance(transcript, list):
        checked["transcript"] = [
            [part[0], *map(_check_text, part[1:])]
            for part in transcript
            if isinstance(part, list) and len(part) == 3 and part[0] in WRITERS
        ]
    return checked


def _check_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return repr(value)
    return f"({type(value).__name__})"  # it may be nested too deeply for repr


def _check_number(value: Any) -> int | float | None:
    if type(value) not in (int, float) or not abs(value) <= _MAX_ABS_VALUE:
        return None
    return value
