# SPDX-License-Identifier: Apache-2.0
"""Keys do not reach messages: a server's text that repeats the key of a request is not shown.

Pages of proxies that describe an error often repeat the request with its Authorization header, as
it was, escaped, encoded or cut off. Next: jaxmoe/vllm/http_backend.py asks before it shows a text.
"""

import base64
import html
import re
from urllib.parse import unquote

PART = 8  # characters of the key, in a row, that are not shown
LONG = 16  # characters of a key that no correct answer contains by chance
HIDDEN = "(its text repeats the key of the request and is not shown)"


class Key:
    """The key of a server, or an empty one; `repr` does not show it."""

    def __init__(self, value: str) -> None:
        self._value = value
        encoded = _encoded(value)
        self._parts = set(_windows(_plain(value), PART))
        self._parts |= {part for form in encoded for part in _windows(_plain(form), LONG)}
        whole = {value, *encoded, *_windows(value, LONG)[:: PART // 2]}
        self._needles = [form.encode() for form in whole]

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def redact(self, text: str) -> str:
        """The text, or HIDDEN where PART letters and digits of the key are in it.

        They are found behind escapes of JSON, HTML, URLs and Python, in base64 and hexadecimal, in
        other letter case, backwards, and with other characters in between.
        """
        if not self._value:
            return text
        for form in _readings(text):
            plain = _plain(form)
            if any(part in plain or part in plain[::-1] for part in self._parts):
                return HIDDEN
        return text

    def is_in(self, body: bytes) -> bool:
        """True where a long answer holds the key, or LONG characters of it, plainly or encoded.

        A key that is a short word may be in a correct answer: then only beside "Bearer".
        """
        if not self._value:
            return False
        if b"\\u00" in body:
            body = re.sub(rb"\\u00([2-7][0-9a-fA-F])", lambda m: bytes([int(m[1], 16)]), body)
        if len(self._value) < LONG:
            return f"Bearer {self._value}".encode() in body
        return any(needle in body for needle in self._needles)


def _plain(text: str) -> str:
    """Its letters and digits alone, in lower case; the text where there are none."""
    return re.sub(r"[^a-z0-9]", "", text.lower()) or text


def _windows(text: str, length: int) -> list[str]:
    return [text[i : i + length] for i in range(max(1, len(text) - length + 1))]


def _readings(text: str) -> list[str]:
    """The text, and what it says where its escapes are undone, up to three layers of them."""
    found = [text]
    for _ in range(3):
        text = html.unescape(unquote(text))
        text = re.sub(
            r"\\u\{?([0-9a-fA-F]{2,4})\}?|\\x([0-9a-fA-F]{2})",
            lambda m: chr(int(m[1] or m[2], 16)), text,
        )  # fmt: skip
        text = text.replace("\\\\", "\\")
        found.append(text)
    return found


def _encoded(key: str) -> set[str]:
    """The key in base64 and hexadecimal, wherever it begins, without the uneven ends."""
    raw = key.encode()
    found = {raw.hex()}
    for before in range(3):
        text = base64.b64encode(b"\0" * before + raw).decode().rstrip("=")
        inner = text[-(-before * 8 // 6) : len(raw + b"\0" * before) * 8 // 6]
        found |= {inner, inner.replace("+", "-").replace("/", "_")}
    return {text for text in found if len(text) >= PART}
