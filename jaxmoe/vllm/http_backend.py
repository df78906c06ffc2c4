# SPDX-License-Identifier: Apache-2.0
"""A vLLM server, over HTTP.

It must run with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, and with our plugin's worker and
weight-transfer backend; server.py starts such a one. Next: jaxmoe/vllm/replica.py.
"""

import json
import math
import socket
import threading
import time
import weakref
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import urllib3
from urllib3.util import parse_url

from jaxmoe.vllm.backend import Unanswered

CONNECT_S = 10.0
HEALTH_S = 10.0
HELD_S = 120.0  # one pass over the weights, and more where a CPU has packed them
IDLE_S = 3.0  # a connection is used again; vLLM closes it at 5, unseen by a request on its way
SHOWN = 400  # characters of an error's body that are passed on


class HttpBackend:
    """Thread-safe: a pool of connections, grown as threads ask."""

    def __init__(self, url: str, *, timeout_s: float, connections: int = 64) -> None:
        self.name = url.rstrip("/")
        self._prefix = (parse_url(self.name).path or "").rstrip("/")
        self._timeout_s = timeout_s
        self._pool = urllib3.connectionpool.connection_from_url(
            self.name, maxsize=connections, block=False, retries=False
        )
        self._live, self._lock, self._closed = weakref.WeakSet[Any](), threading.Lock(), False
        base: Any = self._pool.ConnectionCls
        outer = self

        class Connection(base):
            answered = -math.inf  # well, and when

            def connect(self) -> None:
                super().connect()
                with outer._lock:
                    outer._live.add(self)
                    closed = outer._closed
                if closed:
                    raise OSError("closed")

            def getresponse(self) -> Any:
                response = super().getresponse()
                well = response.status == 200  # after an error uvicorn may close it
                self.answered = time.monotonic() if well else -math.inf
                return response

            @property
            def is_connected(self) -> bool:
                return super().is_connected and time.monotonic() - self.answered < IDLE_S

        self._pool.ConnectionCls = Connection

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._post("/inference/v1/generate", body)

    def context(self) -> int:
        models = self._ask("GET", "/v1/models")
        try:
            return int(models["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Unanswered(f"{self.name}/v1/models names no max_model_len") from error

    def health(self) -> None:
        self._ask("GET", "/health", timeout_s=HEALTH_S)

    def held(self) -> list[dict[str, Any]]:
        answer = self._ask(
            "POST", "/collective_rpc", {"method": "jaxmoe_held"},
            timeout_s=min(HELD_S, self._timeout_s),
        )  # fmt: skip
        held = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(held, list) or not held or not all(isinstance(h, dict) for h in held):
            raise Unanswered(f"{self.name}/collective_rpc jaxmoe_held answered {str(answer)[:99]}")
        return held

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def pause(self, mode: str) -> None:
        self._post("/pause?" + urlencode({"mode": mode}))

    def resume(self) -> None:
        self._post("/resume")

    def start_update(self) -> None:
        self._post("/start_weight_update")

    def update(self, update_info: dict[str, Any]) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_update(self, label: str) -> None:
        self._post("/finish_weight_update", {"weight_version": label})

    def reset_prefix_cache(self) -> bool:
        answer = self._post("/reset_prefix_cache?reset_running_requests=true")
        return isinstance(answer, dict) and answer.get("success") is True

    def close(self) -> None:
        """Whoever waits for an answer stops waiting: Unanswered."""
        self._pool.close()
        with self._lock:
            self._closed, live = True, list(self._live)
        for connection in live:
            with suppress(OSError, AttributeError):  # it is closed already
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._ask("POST", path, body)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None,
        *, timeout_s: float | None = None,
    ) -> Any:  # fmt: skip
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        timeout = urllib3.Timeout(connect=CONNECT_S, read=timeout_s or self._timeout_s)
        where = f"{self.name}{path}"
        try:
            answer = self._pool.request(
                method, self._prefix + path, body=data, headers=headers, timeout=timeout
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unanswered(f"{where}: {type(error).__name__}: {error}") from error
        if answer.status != 200:
            text = answer.data.decode(errors="replace")[:SHOWN]
            raise Unanswered(f"{where} answered {answer.status}: {text}")
        if not answer.data:
            return {}
        try:
            return json.loads(answer.data)
        except ValueError as error:
            raise Unanswered(f"{where} answered no JSON: {answer.data[:80]!r}") from error
