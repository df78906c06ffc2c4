# SPDX-License-Identifier: Apache-2.0
"""JSON from a server that is not trusted: finite numbers of sane sizes, bounded nesting and memory.

Next: jaxmoe/vllm/responses.py checks what the values mean.
"""

import json
import math
import reprlib
from typing import Any

BYTES_A_VALUE = 16  # at least, of a body on average: a value costs Python up to 72 bytes
DIGITS = 18  # of a whole number: it fits 64 bits
_SHORT = reprlib.Repr()  # bounds depth and length before it builds a text
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 4, 80, 80


def read_json(body: bytes, most_bytes: int) -> Any:
    """The value. Raises ValueError for what is no JSON, or more than `most_bytes` of it explain.

    Refused although Python reads them: NaN, Infinity, numbers beyond float64 or 18 digits.
    """
    values = 1 + body.count(b",") + body.count(b"[") + body.count(b"{")
    if values > max(64, most_bytes // BYTES_A_VALUE):
        raise ValueError(f"{values} values are more than were asked for")
    try:
        return json.loads(
            body.decode("utf-8"), parse_int=_integer, parse_float=_finite, parse_constant=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def shown(value: Any, length: int = 120) -> str:
    """A short text of any value, however long or deep it is."""
    return _SHORT.repr(value)[:length]


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > DIGITS:
        raise ValueError(f"a whole number has {len(text)} characters")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value
