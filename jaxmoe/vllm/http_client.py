# SPDX-License-Identifier: Apache-2.0
"""HTTP with limits: one deadline for the whole of a request, and a bound on what is received.

A read timeout bounds one read only: a server that sends a byte now and then is waited for without
end. Here every read of a response, its head included, gets the time that is left of the request,
and bytes are counted as they leave the socket, before anything is made of them. No compression is
accepted and no redirect is followed. Next: jaxmoe/vllm/http_backend.py asks a vLLM with it.
"""

import http.client
import io
import math
import socket
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import urllib3
from urllib3.util import parse_url

CONNECT_S = 10.0
IDLE_S = 3.0  # a connection is used again; vLLM closes it at 5, unseen by a request just sent
HEAD_BYTES = 1 << 17  # of a status line, headers and interim responses
ERROR_BYTES = 1 << 16  # of the body of an error: more of it is not read
PIECE_BYTES = 1 << 16


class HttpFailed(Exception):
    """No response came within the limits, or what came is not HTTP; the message is untrusted."""


class Response(NamedTuple):
    """A response as it was received; the body of an error may be cut off at ERROR_BYTES."""

    status: int
    body: bytes


class _Limits(NamedTuple):
    until: float  # time.monotonic() when the request has failed
    received: int  # bytes of one response, head and framing included

    def left_s(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline of the request passed")
        return left


class _BoundedReader(io.RawIOBase):
    """The bytes of one response from its socket, up to a deadline and a number of bytes."""

    def __init__(self, sock: socket.socket, limits: _Limits) -> None:
        self._sock, self._limits, self._left = sock, limits, limits.received
        self._raw = sock.makefile("rb", buffering=0)  # keeps the socket open as http.client expects

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._limits.left_s())
        count = self._raw.readinto(memoryview(buffer)) or 0
        self._left -= count
        if self._left < 0:
            raise OSError(f"more than {self._limits.received} bytes came")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _BoundedResponse(http.client.HTTPResponse):
    def __init__(self, limits: _Limits, sock: socket.socket, **options: Any) -> None:
        super().__init__(sock, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_BoundedReader(sock, limits))


class HttpClient:
    """Thread-safe: a pool of connections to one server, grown as threads ask."""

    def __init__(self, url: str, *, connections: int) -> None:
        self._prefix = (parse_url(url).path or "").rstrip("/")
        self._pool = urllib3.connectionpool.connection_from_url(
            url, maxsize=connections, block=False, retries=False
        )
        self._live, self._lock, self._closed = weakref.WeakSet[Any](), threading.Lock(), False
        self._request = threading.local()  # the limits of the request that this thread makes
        base: Any = self._pool.ConnectionCls
        outer = self

        class Connection(base):
            answered_at = -math.inf  # when it last answered with 200

            def connect(self) -> None:
                super().connect()
                with outer._lock:
                    outer._live.add(self)
                    closed = outer._closed
                if closed:
                    raise OSError("closed")

            def send(self, data: Any) -> None:
                if self.sock is not None:  # else it connects first, which has a timeout of its own
                    self.sock.settimeout(outer._request.limits.left_s())
                super().send(data)

            def getresponse(self) -> Any:
                self.response_class = partial(_BoundedResponse, outer._request.limits)
                response = super().getresponse()
                ok = response.status == 200  # after an error uvicorn may close it
                self.answered_at = time.monotonic() if ok else -math.inf
                return response

            @property
            def is_connected(self) -> bool:
                return super().is_connected and time.monotonic() - self.answered_at < IDLE_S

        self._pool.ConnectionCls = Connection

    def request(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], *,
        timeout_s: float, most_bytes: int,
    ) -> Response:  # fmt: skip
        """The response, which came within `timeout_s` and has at most `most_bytes` of body.

        Raises HttpFailed.
        """
        # framing may double a body: a chunk of one byte has a line of its own
        limits = _Limits(time.monotonic() + timeout_s, HEAD_BYTES + 2 * most_bytes)
        self._request.limits = limits
        try:
            response = self._pool.urlopen(
                method, self._prefix + path, body=body, headers=headers, redirect=False,
                timeout=urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s),
                preload_content=False, decode_content=False,
            )  # fmt: skip
            try:
                return _read(response, most_bytes)
            except BaseException:
                response.close()  # what is left of it must not be taken for the next response
                raise
        # http.client and urllib3 raise ValueError for some kinds of nonsense, a length of -5 say
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as e:
            late = time.monotonic() >= limits.until
            why = f"no whole response in {timeout_s:g} s" if late else f"{type(e).__name__}: {e}"
            raise HttpFailed(why) from None  # the error may hold all that a server sent

    def close(self) -> None:
        """Whoever waits for a response stops waiting."""
        self._pool.close()
        with self._lock:
            self._closed, live = True, list(self._live)
        for connection in live:
            with suppress(OSError, AttributeError):  # it is closed already
                connection.sock.shutdown(socket.SHUT_RDWR)


def _read(response: Any, most_bytes: int) -> Response:
    for name, allowed in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        if (got := response.headers.get(name, allowed).strip().lower()) != allowed:
            raise ValueError(f"{name} must be {allowed}, got {got[:40]!r}")
    ok = response.status == 200
    most = most_bytes if ok else min(ERROR_BYTES, most_bytes)
    body = bytearray()
    while piece := response.read(PIECE_BYTES, decode_content=False):
        body += piece
        if len(body) > most:
            if ok:
                raise ValueError(f"a body must have at most {most} bytes, more came")
            response.close()
            break
    return Response(response.status, bytes(body[:most]))
