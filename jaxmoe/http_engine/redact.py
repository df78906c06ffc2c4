# SPDX-License-Identifier: Apache-2.0
"""Removal of API keys from messages: a server's text that repeats the request's key is not shown.

Error pages of proxies often repeat the request with its Authorization header, verbatim, escaped,
encoded or truncated. Next: jaxmoe/vllm/client/http_backend.py, which redacts a text before showing
it.
"""

import base64
import html
import re
from urllib.parse import unquote

MIN_PART_CHARS = 8  # consecutive characters of the key that hide a text
MIN_LONG_CHARS = 16  # of a key; no correct response contains so many by chance
HIDDEN_TEXT = "(its text repeats the key of the request and is not shown)"


class Key:
    """The key of a server, or an empty one; `repr` does not show it."""

    def __init__(self, value: str) -> None:
        self._value = value
        encoded = _encode_key(value)
        self._parts = set(_substrings(_normalize_text(value), MIN_PART_CHARS))
        self._parts |= {
            part for form in encoded for part in _substrings(_normalize_text(form), MIN_LONG_CHARS)
        }
        forms = {value, *encoded, *_substrings(value, MIN_LONG_CHARS)[:: MIN_PART_CHARS // 2]}
        self._needles = [form.encode() for form in forms]

    def auth_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def redact_text(self, text: str) -> str:
        """Return the text, or HIDDEN_TEXT if it has MIN_PART_CHARS letters and digits of the key.

        They are found behind escapes of JSON, HTML, URLs and Python, in base64 and hexadecimal, in
        other letter case, reversed, and with other characters in between.
        """
        if not self._value:
            return text
        for form in _decode_escapes(text):
            plain = _normalize_text(form)
            if any(part in plain or part in plain[::-1] for part in self._parts):
                return HIDDEN_TEXT
        return text

    def is_in(self, body: bytes) -> bool:
        """Return True if a long response has the key, or MIN_LONG_CHARS of it, plain or encoded.

        A key that is a short word may be in a correct response: it counts only after "Bearer".
        """
        if not self._value:
            return False
        if b"\\u00" in body:
            body = re.sub(rb"\\u00([2-7][0-9a-fA-F])", lambda m: bytes([int(m[1], 16)]), body)
        if len(self._value) < MIN_LONG_CHARS:
            return f"Bearer {self._value}".encode() in body
        return any(needle in body for needle in self._needles)


def _normalize_text(text: str) -> str:
    """Return the letters and digits of the text in lower case; the text itself if it has none."""
    return re.sub(r"[^a-z0-9]", "", text.lower()) or text


def _substrings(text: str, length: int) -> list[str]:
    return [text[i : i + length] for i in range(max(1, len(text) - length + 1))]


def _decode_escapes(text: str) -> list[str]:
    """Return the text, and its forms with up to three layers of escapes decoded."""
    readings = [text]
    for _ in range(3):
        text = html.unescape(unquote(text))
        text = re.sub(
            r"\\u\{?([0-9a-fA-F]{2,4})\}?|\\x([0-9a-fA-F]{2})",
            lambda m: chr(int(m[1] or m[2], 16)),
            text,
        )
        text = text.replace("\\\\", "\\")
        readings.append(text)
    return readings


def _encode_key(key: str) -> set[str]:
    """Return the key in hexadecimal, and in base64 at each alignment without partial characters."""
    raw = key.encode()
    forms = {raw.hex()}
    for n_leading_bytes in range(3):
        text = base64.b64encode(b"\0" * n_leading_bytes + raw).decode().rstrip("=")
        inner = text[-(-n_leading_bytes * 8 // 6) : len(raw + b"\0" * n_leading_bytes) * 8 // 6]
        forms |= {inner, inner.replace("+", "-").replace("/", "_")}
    return {text for text in forms if len(text) >= MIN_PART_CHARS}
