# SPDX-License-Identifier: Apache-2.0
"""HTTP with limits: one deadline for a complete request, and a limit on the received bytes.

A read timeout limits one read only: with it, a server that sends a byte now and then is waited for
without end. Here every read of a response, including its head, gets the remaining time of the
request, and bytes are counted as they leave the socket, before they are parsed. No compression is
accepted and no redirect is followed. Next: jaxmoe/vllm/client/http_backend.py sends vLLM's
requests.
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

CONNECT_TIMEOUT_S = 10.0
# An idle connection is not reused after this time: vLLM closes it at 5 s, perhaps under a new
# request.
MAX_IDLE_S = 3.0
# Idle connections that are kept; urllib3 warns of each further one. Answers for training, for an
# evaluation and in place of a failed server are in flight beside each other.
MAX_KEPT = 1024
MAX_HEAD_BYTES = 1 << 17  # of a status line, headers and interim responses
MAX_ERROR_BYTES = 1 << 16  # of the body of an error; the rest is not read
CHUNK_BYTES = 1 << 16


class HttpFailed(Exception):
    """No response arrived within the limits, or it is not HTTP; the message is untrusted."""


class Response(NamedTuple):
    """A response as received; the body of an error may be truncated to MAX_ERROR_BYTES."""

    status: int
    body: bytes


class _Limits(NamedTuple):
    deadline: float  # by time.monotonic()
    max_received_bytes: int  # bytes of one response, head and framing included

    def remaining_s(self) -> float:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the deadline of the request passed")
        return remaining


class _BoundedReader(io.RawIOBase):
    """The bytes of one response from its socket, with a deadline and a maximum number of bytes."""

    def __init__(self, sock: socket.socket, limits: _Limits) -> None:
        self._sock, self._limits, self._remaining_bytes = sock, limits, limits.max_received_bytes
        self._raw = sock.makefile("rb", buffering=0)  # keeps the socket open as http.client expects

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._limits.remaining_s())
        count = self._raw.readinto(memoryview(buffer)) or 0
        self._remaining_bytes -= count
        if self._remaining_bytes < 0:
            raise OSError(f"more than {self._limits.max_received_bytes} bytes were received")
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
    """A pool of connections to one server. Thread-safe; it grows as threads send requests."""

    def __init__(self, url: str) -> None:
        self._prefix = (parse_url(url).path or "").rstrip("/")
        # No retries: the caller decides, and may ask another server.
        self._pool = urllib3.connectionpool.connection_from_url(
            url, maxsize=MAX_KEPT, block=False, retries=False
        )
        self._live, self._lock, self._closed = weakref.WeakSet[Any](), threading.Lock(), False
        self._request = threading.local()  # the limits of this thread's current request
        base: Any = self._pool.ConnectionCls
        outer = self

        class Connection(base):
            answered_at = -math.inf  # when it last answered with 200

            def connect(self) -> None:
                super().connect()
                with outer._lock:
                    outer._live.add(self)
                    closed = outer._closed
                # close() may have run while this thread connected, and has then not seen the
                # connection.
                if closed:
                    raise OSError("closed")

            def send(self, data: Any) -> None:
                if self.sock is not None:  # else it connects first, with a timeout of its own
                    self.sock.settimeout(outer._request.limits.remaining_s())
                super().send(data)

            def getresponse(self) -> Any:
                self.response_class = partial(_BoundedResponse, outer._request.limits)
                response = super().getresponse()
                ok = response.status == 200  # after an error uvicorn may close it
                self.answered_at = time.monotonic() if ok else -math.inf
                return response

            @property
            def is_connected(self) -> bool:
                return super().is_connected and time.monotonic() - self.answered_at < MAX_IDLE_S

        self._pool.ConnectionCls = Connection

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        *,
        timeout_s: float,
        max_body_bytes: int,
    ) -> Response:
        """Return a response within `timeout_s`, with at most `max_body_bytes` of body.

        Raises HttpFailed.
        """
        # Framing may double a body: a chunk of one byte has a line of its own.
        limits = _Limits(time.monotonic() + timeout_s, MAX_HEAD_BYTES + 2 * max_body_bytes)
        self._request.limits = limits
        try:
            response = self._pool.urlopen(
                method,
                self._prefix + path,
                body=body,
                headers=headers,
                redirect=False,
                timeout=urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, timeout_s), read=timeout_s),
                preload_content=False,
                decode_content=False,
            )
            try:
                return _read_response(response, max_body_bytes)
            except BaseException:
                response.close()  # its rest must not be read as the next response
                raise
        # http.client and urllib3 raise ValueError for some malformed responses, e.g. a length of -5
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as e:
            reason = f"{type(e).__name__}: {e}"
            if time.monotonic() >= limits.deadline:
                reason = f"no complete response in {timeout_s:g} s"
            raise HttpFailed(reason) from None  # the error may contain all that a server sent

    def close(self) -> None:
        """Close all connections; threads that wait for a response stop waiting."""
        self._pool.close()
        with self._lock:
            self._closed, live = True, list(self._live)
        for connection in live:
            with suppress(OSError, AttributeError):  # it is closed already
                # close() alone would not wake a thread that waits in recv.
                connection.sock.shutdown(socket.SHUT_RDWR)


def _read_response(response: Any, max_body_bytes: int) -> Response:
    # A compressed body may expand beyond any limit on the received bytes.
    for name, allowed in (("Content-Encoding", "identity"), ("Transfer-Encoding", "chunked")):
        if (encoding := response.headers.get(name, allowed).strip().lower()) != allowed:
            raise ValueError(f"{name} must be {allowed}, got {encoding[:40]!r}")
    ok = response.status == 200
    max_bytes = max_body_bytes if ok else min(MAX_ERROR_BYTES, max_body_bytes)
    body = bytearray()
    while chunk := response.read(CHUNK_BYTES, decode_content=False):
        body += chunk
        if len(body) > max_bytes:
            if ok:
                raise ValueError(f"a body must have at most {max_bytes} bytes, got more")
            response.close()
            break
    return Response(response.status, bytes(body[:max_bytes]))
