# SPDX-License-Identifier: Apache-2.0
"""Middleware that rejects every request without the key, for a vLLM that takes weights.

vLLM's own --api-key protects only routes that begin with /v1, /v2, /inference or /cohere. The
routes that pause it, load weights and call methods of its workers by name are open to whoever
reaches the port. vLLM loads this class by --middleware
jaxmoe.vllm.plugin.auth_middleware.AuthMiddleware and wraps all its routes in it. Next:
jaxmoe/vllm/client/http_backend.py sends the key.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

# A variable, because every user of the machine can see a command line. vLLM reads it too.
API_KEY_VARIABLE = "VLLM_API_KEY"

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AuthMiddleware:
    """ASGI middleware: 401 to every request without "Authorization: Bearer KEY", whatever its path.

    Raises RuntimeError if there is no key; vLLM then does not start.
    """

    def __init__(self, app: App) -> None:
        self._app, self._key = app, os.environ.get(API_KEY_VARIABLE, "").encode()
        if not self._key:
            raise RuntimeError(
                f"{API_KEY_VARIABLE} must be the key that requests must send; it is empty"
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Lifespan events are of the server's own start and end; no client can send one.
        if scope["type"] == "lifespan" or self._is_authorized(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            body = b'{"error": "Unauthorized"}'
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:  # a websocket, which has not been accepted yet
            await send({"type": "websocket.close", "code": 1008})

    def _is_authorized(self, headers: list[tuple[bytes, bytes]]) -> bool:
        header = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        # The time of == depends on the first wrong byte, which would let a key be guessed byte by
        # byte.
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)
