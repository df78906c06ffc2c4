# SPDX-License-Identifier: Apache-2.0
"""Nobody without the key reaches any route of a vLLM that takes weights.

vLLM's own --api-key guards what begins with /v1, /v2, /inference or /cohere. What pauses it, loads
weights and calls methods of its workers by name lies beside them, open to whoever reaches the port.
vLLM takes this by --middleware jaxmoe.vllm_plugin.door.Door, and builds it around all of its own.
Next: jaxmoe/vllm/http_backend.py knocks.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

VARIABLE = "VLLM_API_KEY"  # the one that vLLM itself reads; a command line is seen by every user

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Door:
    """ASGI: 401 to every request that has not "Authorization: Bearer KEY", whatever its path.

    Raises RuntimeError where there is no key: vLLM then stops as it starts.
    """

    def __init__(self, app: App) -> None:
        self._app, self._key = app, os.environ.get(VARIABLE, "").encode()
        if not self._key:
            raise RuntimeError(f"{VARIABLE} must hold the key that requests must have; it is empty")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_enter(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            body = b'{"error": "Unauthorized"}'
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        else:  # a websocket, before it is accepted
            await send({"type": "websocket.close", "code": 1008})

    def _may_enter(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)
