# SPDX-License-Identifier: Apache-2.0
"""A vLLM server, over HTTP.

It must run with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, and with our plugin's worker,
weight-transfer backend and door; server.py starts such a one. Next: jaxmoe/vllm/replica.py.
"""

import json
import math
import os
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlencode

import urllib3
from urllib3.util import parse_url

from jaxmoe.config import ConfigError
from jaxmoe.observe.printable import printable
from jaxmoe.vllm.backend import RequestFailed
from jaxmoe.vllm_plugin.door import VARIABLE

CONNECT_S = 10.0
HEALTH_S = 10.0
LOADED_S = 120.0  # one pass over the weights, and more where a CPU has packed them
IDLE_S = 3.0  # a connection is used again; vLLM closes it at 5, unseen by a request just sent
_CLOSED = {401, 403, 404, *range(300, 400)}  # a stranger's command was not taken
SHOWN = 400  # characters of an error's body that are passed on


def key_of_running_servers() -> str:
    """JAXMOE_VLLM_API_KEY, else VLLM_API_KEY; empty where neither is set.

    Raises ConfigError for what no header can carry.
    """
    name = next((n for n in ("JAXMOE_" + VARIABLE, VARIABLE) if os.environ.get(n)), VARIABLE)
    key = os.environ.get(name, "")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"{name} must be printable ASCII without spaces; {len(key)} characters were given that "
            f"are not. Try export {name}=$(openssl rand -hex 32), for the server too."
        )
    return key


def check_guarded(backend: "HttpBackend") -> None:
    """Say on stderr where a running server takes commands without a key.

    Raises ConfigError where it is not on this machine by its URL, and RequestFailed where it does
    not answer.
    """
    if not backend.takes_commands_from_anybody():
        return
    said = (
        f"{backend.name} takes commands from anybody: who reaches its port loads weights into it "
        f"and runs code as its user. Start it with {VARIABLE}=$(openssl rand -hex 32) and "
        "--middleware jaxmoe.vllm_plugin.door.Door (vLLM's own --api-key leaves these routes "
        "open), and this command with the same key"
    )
    if not _loopback(backend.name):
        raise ConfigError(f"rollout.vllm.url: {said}.")
    print(f"! {said}", file=sys.stderr)


def _loopback(url: str) -> bool:
    host = (parse_url(url).host or "").strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class HttpBackend:
    """Thread-safe: a pool of connections, grown as threads ask; `key` goes with every request.

    `model`: what is asked of those that the server has by name; empty: the one that there is.
    """

    def __init__(
        self, url: str, *, timeout_s: float, connections: int = 64, key: str = "", model: str = ""
    ) -> None:
        self.name = url.rstrip("/")
        self._model = {"model": model} if model else {}
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._why_closed = ""
        self._prefix = (parse_url(self.name).path or "").rstrip("/")
        self._timeout_s = timeout_s
        self._pool = urllib3.connectionpool.connection_from_url(
            self.name, maxsize=connections, block=False, retries=False
        )
        self._live, self._lock, self._closed = weakref.WeakSet[Any](), threading.Lock(), False
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

            def getresponse(self) -> Any:
                response = super().getresponse()
                well = response.status == 200  # after an error uvicorn may close it
                self.answered_at = time.monotonic() if well else -math.inf
                return response

            @property
            def is_connected(self) -> bool:
                return super().is_connected and time.monotonic() - self.answered_at < IDLE_S

        self._pool.ConnectionCls = Connection

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._post("/inference/v1/generate", body | self._model)

    def context(self) -> int:
        models = self._ask("GET", "/v1/models")
        try:
            return int(models["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RequestFailed(f"{self.name}/v1/models names no max_model_len") from error

    def health(self) -> None:
        self._ask("GET", "/health", timeout_s=HEALTH_S)

    def answers(self, path: str, timeout_s: float) -> bool:
        """Whether anything at all comes back in time, a refusal included."""
        try:
            self._send("GET", path, None, timeout_s)
        except RequestFailed:
            return False
        return True

    def takes_commands_from_anybody(self) -> bool:
        """Whether a method of its workers could be called without the key.

        Asked by GET, which runs none: 405 from an open route. Raises RequestFailed.
        """
        return self._send("GET", "/collective_rpc", None, HEALTH_S, {}).status not in _CLOSED

    def loaded_state(self) -> list[dict[str, Any]]:
        response = self._ask(
            "POST", "/collective_rpc", {"method": "jaxmoe_loaded_state"},
            timeout_s=min(LOADED_S, self._timeout_s),
        )  # fmt: skip
        loaded = response.get("results") if isinstance(response, dict) else None
        if (
            not isinstance(loaded, list)
            or not loaded
            or not all(isinstance(worker, dict) for worker in loaded)
        ):
            raise RequestFailed(
                f"{self.name}/collective_rpc jaxmoe_loaded_state answered {str(response)[:99]}"
            )
        return loaded

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

    def load_adapter(self, folder: str) -> None:
        self._post("/collective_rpc", {"method": "jaxmoe_load_adapter", "args": [folder]})

    def reset_prefix_cache(self) -> bool:
        response = self._post("/reset_prefix_cache?reset_running_requests=true")
        return isinstance(response, dict) and response.get("success") is True

    def close(self, why: str = "") -> None:
        """Whoever waits for a response stops waiting: RequestFailed, which says why."""
        self._why_closed = self._why_closed or why
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
        where = f"{self.name}{path}"
        response = self._send(method, path, body, timeout_s or self._timeout_s)
        if response.status == 401:
            raise RequestFailed(
                f"{where} answered 401: it wants another key. Set {VARIABLE} to the one that it "
                "was started with"
            )
        if response.status != 200:
            text = printable(response.data.decode(errors="replace")[:SHOWN])
            raise RequestFailed(f"{where} answered {response.status}: {text}")
        if not response.data:
            return {}
        try:
            return json.loads(response.data)
        except ValueError as error:
            raise RequestFailed(f"{where} answered no JSON: {response.data[:80]!r}") from error

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float,
        key: dict[str, str] | None = None,
    ) -> Any:  # fmt: skip
        data = None if body is None else json.dumps(body).encode()
        headers = (self._headers if key is None else key) | (
            {} if data is None else {"Content-Type": "application/json"}
        )
        timeout = urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s)
        try:
            return self._pool.request(
                method, self._prefix + path, body=data, headers=headers, timeout=timeout
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            why = self._why_closed or f"{type(error).__name__}: {error}"
            raise RequestFailed(f"{self.name}{path}: {why}") from error
