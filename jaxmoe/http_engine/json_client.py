# SPDX-License-Identifier: Apache-2.0
"""Requests and responses in JSON to one server, which is not trusted.

http_client.py limits a response's time and size, strict_json.py its values, and redact.py keeps the
key out of messages. Next: jaxmoe/vllm/client/http_backend.py is such a client of vLLM's routes.
"""

import json
from typing import Any

from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.http_client import HttpClient, HttpFailed, Response
from jaxmoe.http_engine.redact import Key
from jaxmoe.http_engine.strict_json import parse_untrusted_json
from jaxmoe.observe.printable import escape_unprintable

MAX_BODY_BYTES = 1 << 20  # of a response without tokens
MAX_ERROR_CHARS = 400  # of an error's body, in messages
MAX_REDACT_BYTES = 1 << 16  # of an error's body, searched for the key


class JsonClient:
    """A client of the server `name`, its URL. Thread-safe, with a growing pool of connections.

    Every request sends `key`, which the user sets by `key_variable`. It fails after `timeout_s`,
    however slowly its response arrives, and if the response has more than `max_body_bytes`.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        key: str = "",
        key_variable: str = "the key",
    ) -> None:
        self.name = url.rstrip("/")
        self._key, self._key_variable = Key(key), key_variable
        self._close_reason = ""
        self._timeout_s = timeout_s
        self._client = HttpClient(self.name)

    def answers_within(self, path: str, timeout_s: float) -> bool:
        """Return True if any response arrives in time, including an error."""
        try:
            self.send_request("GET", path, None, timeout_s, MAX_BODY_BYTES)
        except RequestFailed:
            return False
        return True

    def close(self, reason: str = "") -> None:
        """Close the connections; waiting requests raise RequestFailed with the reason."""
        self._close_reason = self._close_reason or reason
        self._client.close()

    def request_json(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> Any:
        route = f"{self.name}{path}"
        response = self.send_request(
            method, path, body, timeout_s or self._timeout_s, max_body_bytes
        )
        if response.status == 401:
            raise RequestFailed(
                f"{route} answered 401: it requires another key. Set {self._key_variable} to the "
                "one that it was started with"
            )
        if response.status != 200:
            raise RequestFailed(
                f"{route} answered {response.status}: {self._format_body(response.body)}"
            )
        if not response.body:
            return {}
        if self._key.is_in(response.body):  # a later message could show it
            raise RequestFailed(f"{route} answered with the key of the request in its text")
        try:
            return parse_untrusted_json(response.body, max_body_bytes)
        except ValueError as error:
            # `from None`, because the parser's own error may quote the text that is redacted.
            raise RequestFailed(
                f"{route} did not answer with usable JSON ({self._format_body(str(error))}): "
                f"{self._format_body(response.body, 80)}"
            ) from None

    def _format_body(self, text: bytes | str, length: int = MAX_ERROR_CHARS) -> str:
        if isinstance(text, bytes):
            text = text[:MAX_REDACT_BYTES].decode(errors="replace")
        return escape_unprintable(self._key.redact_text(text)[:length])

    def send_request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        timeout_s: float,
        max_body_bytes: int,
        key: Key | None = None,
    ) -> Response:
        data = None if body is None else json.dumps(body).encode()
        headers = (self._key if key is None else key).auth_headers() | (
            {} if data is None else {"Content-Type": "application/json"}
        )
        try:
            return self._client.request(
                method, path, data, headers, timeout_s=timeout_s, max_body_bytes=max_body_bytes
            )
        except HttpFailed as error:
            reason = self._close_reason or self._format_body(str(error))
            raise RequestFailed(f"{self.name}{path}: {reason}") from None
