# SPDX-License-Identifier: Apache-2.0
"""A vLLM server, over HTTP.

It must run with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, and with our plugin's worker,
weight-transfer backend and door; server.py starts such a one. It is not trusted: http_client.py
bounds an answer's time and size, strict_json.py its values, and redact.py keeps the key out of
messages. Next: jaxmoe/vllm/replica.py.
"""

import json
import math
import os
import sys
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlencode

from urllib3.util import parse_url

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.observe.printable import printable
from jaxmoe.vllm.backend import RequestFailed
from jaxmoe.vllm.http_client import HttpClient, HttpFailed, Response
from jaxmoe.vllm.redact import Key
from jaxmoe.vllm.strict_json import read_json, shown
from jaxmoe.vllm.worker_state import checked_states
from jaxmoe.vllm_plugin.door import VARIABLE

HEALTH_S = 10.0
LOADED_S = 120.0  # one pass over the weights, and more where a CPU has packed them
BODY_BYTES = 1 << 20  # of an answer that is not of tokens
STATE_BYTES = 1 << 24  # of all workers' digests: some 200 bytes a tensor
_CLOSED = {401, 403, 404, *range(300, 400)}  # a stranger's command was not taken
SHOWN = 400  # characters of an error's body that are passed on
LOOKED_AT = 1 << 16  # bytes of it in which the key is looked for


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


def body_bytes_per_token(cfg: ModelConfig) -> int:
    """A bound on what a generate response says of one token: 1 KiB and its experts in base64.

    vLLM writes some 100 bytes of JSON for a token, and one or two bytes for an expert; the bound
    has room for other spellings and for experts of 8 bytes.
    """
    return 1024 + math.ceil(4 / 3 * 8 * cfg.n_layers * cfg.experts_per_token)


class HttpBackend:
    """Thread-safe: a pool of connections, grown as threads ask; `key` goes with every request.

    A request fails after `timeout_s`, however slowly its answer comes, and where the answer has
    more than BODY_BYTES and, of a generate request, `token_bytes` for each token of each sample.
    `model`: what is asked of those that the server has by name; empty: the one that there is.
    """

    def __init__(
        self, url: str, *, timeout_s: float, connections: int = 64, key: str = "",
        model: str = "", token_bytes: int = 4096,
    ) -> None:  # fmt: skip
        self.name = url.rstrip("/")
        self._model = {"model": model} if model else {}
        self._key = Key(key)
        self._why_closed = ""
        self._timeout_s, self._token_bytes = timeout_s, token_bytes
        self._client = HttpClient(self.name, connections=connections)

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = body["sampling_params"]
        tokens = asked.get("n", 1) * (len(body["token_ids"]) + asked["max_tokens"])
        most = BODY_BYTES + tokens * self._token_bytes
        return self._ask("POST", "/inference/v1/generate", body | self._model, most_bytes=most)

    def context(self) -> int:
        models = self._ask("GET", "/v1/models")
        try:
            context = models["data"][0]["max_model_len"]
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed(f"{self.name}/v1/models names no max_model_len") from error
        if type(context) is not int or not 0 < context < 2**31:
            raise RequestFailed(
                f"{self.name}/v1/models must name max_model_len as a number of tokens, got "
                f"{shown(context)}"
            )
        return context

    def health(self) -> None:
        self._ask("GET", "/health", timeout_s=HEALTH_S)

    def answers(self, path: str, timeout_s: float) -> bool:
        """Whether anything at all comes back in time, a refusal included."""
        try:
            self._send("GET", path, None, timeout_s, BODY_BYTES)
        except RequestFailed:
            return False
        return True

    def takes_commands_from_anybody(self) -> bool:
        """Whether a method of its workers could be called without the key.

        Asked by GET, which runs none: 405 from an open route. Raises RequestFailed.
        """
        response = self._send("GET", "/collective_rpc", None, HEALTH_S, BODY_BYTES, Key(""))
        return response.status not in _CLOSED

    def loaded_state(self) -> list[dict[str, Any]]:
        response = self._ask(
            "POST", "/collective_rpc", {"method": "jaxmoe_loaded_state"},
            timeout_s=min(LOADED_S, self._timeout_s), most_bytes=STATE_BYTES,
        )  # fmt: skip
        results = response.get("results") if isinstance(response, dict) else None
        try:
            return checked_states(results)
        except ValueError as error:
            raise RequestFailed(
                f"{self.name}/collective_rpc jaxmoe_loaded_state: {error}"
            ) from error

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
        self._client.close()

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._ask("POST", path, body)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None,
        *, timeout_s: float | None = None, most_bytes: int = BODY_BYTES,
    ) -> Any:  # fmt: skip
        where = f"{self.name}{path}"
        response = self._send(method, path, body, timeout_s or self._timeout_s, most_bytes)
        if response.status == 401:
            raise RequestFailed(
                f"{where} answered 401: it wants another key. Set {VARIABLE} to the one that it "
                "was started with"
            )
        if response.status != 200:
            raise RequestFailed(f"{where} answered {response.status}: {self._shown(response.body)}")
        if not response.body:
            return {}
        if self._key.is_in(response.body):  # a later message would show it
            raise RequestFailed(f"{where} answered with the key of the request in its text")
        try:
            return read_json(response.body, most_bytes)
        except ValueError as error:
            raise RequestFailed(
                f"{where} answered no JSON that can be used ({self._shown(str(error))}): "
                f"{self._shown(response.body, 80)}"
            ) from None

    def _shown(self, text: bytes | str, length: int = SHOWN) -> str:
        if isinstance(text, bytes):
            text = text[:LOOKED_AT].decode(errors="replace")
        return printable(self._key.redact(text)[:length])

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float,
        most_bytes: int, key: Key | None = None,
    ) -> Response:  # fmt: skip
        data = None if body is None else json.dumps(body).encode()
        headers = (self._key if key is None else key).headers() | (
            {} if data is None else {"Content-Type": "application/json"}
        )
        try:
            return self._client.request(
                method, path, data, headers, timeout_s=timeout_s, most_bytes=most_bytes
            )
        except HttpFailed as error:
            why = self._why_closed or self._shown(str(error))
            raise RequestFailed(f"{self.name}{path}: {why}") from None
