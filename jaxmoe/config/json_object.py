# SPDX-License-Identifier: Apache-2.0
"""JSON from files of other programs: with limited nesting, and without duplicate keys.

Python keeps the last of two equal keys. It reads deep nesting, but fails when it prints, compares
or writes the result.

Next: jaxmoe/model/config.py reads config.json, jaxmoe/checkpoint/tensor_files.py headers.
"""

import json
from collections.abc import Callable
from typing import Any

MAX_DEPTH_LEVELS = 100  # levels


def parse_json(
    text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is invalid or nested too deep."""
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH_LEVELS} levels") from error
    # The number of opening brackets bounds the depth, so levels are counted for unusual texts only.
    if isinstance(text, bytes):
        opened = text.count(b"[") + text.count(b"{")
    else:
        opened = text.count("[") + text.count("{")
    if opened > MAX_DEPTH_LEVELS and _nesting_depth(value) > MAX_DEPTH_LEVELS:
        raise ValueError(f"nested deeper than {MAX_DEPTH_LEVELS} levels")
    return value


def _nesting_depth(value: Any) -> int:
    """Number of levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level := [x for x in level if isinstance(x, dict | list)]:
        depth += 1
        level = [y for x in level for y in (x.values() if isinstance(x, dict) else x)]
    return depth


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ValueError for another type or duplicate keys."""
    value = parse_json(text, reject_duplicate_keys)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises ValueError for a key that occurs twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is a duplicate key")
    return result
