# SPDX-License-Identifier: Apache-2.0
"""JSON from files that others wrote: an object, and no key twice, of which Python keeps the last.

Next: jaxmoe/model/config.py reads config.json, jaxmoe/checkpoint/tensor_files.py headers.
"""

import json
from typing import Any


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object that a text holds. Raises ValueError where it holds none, or a key twice."""
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError(f"an object is needed, got {type(found).__name__}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found
