# SPDX-License-Identifier: Apache-2.0
"""JSON from an untrusted server: finite numbers of bounded size, bounded nesting and memory.

Next: jaxmoe/vllm/client/responses.py checks the values' meaning.
"""

import json
import math
import reprlib
from typing import Any

MIN_BYTES_PER_VALUE = 16  # of a body, on average; a value costs Python up to 72 bytes
MAX_DIGITS = 18  # of an integer, which then fits 64 bits
_SHORT = reprlib.Repr()  # limits depth and length before it builds a text
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 4, 80, 80


def parse_untrusted_json(body: bytes, max_body_bytes: int) -> Any:
    """Return the value. Raises ValueError for invalid JSON or too many values for its size.

    Rejected although Python reads them: NaN, Infinity, numbers beyond float64 or 18 digits.
    """
    # Counted before parsing, because the parsed values may take several times the memory of the
    # text.
    values = 1 + body.count(b",") + body.count(b"[") + body.count(b"{")
    if values > max(64, max_body_bytes // MIN_BYTES_PER_VALUE):
        raise ValueError(f"{values} values are more than the request allows")
    try:
        return json.loads(
            body.decode("utf-8"),
            parse_int=_parse_int,
            parse_float=_parse_finite,
            parse_constant=_parse_finite,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def format_value(value: Any, length: int = 120) -> str:
    """Return a short text of any value, however long or deep it is."""
    return _SHORT.repr(value)[:length]


def _parse_int(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} characters")
    return int(text)


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value
