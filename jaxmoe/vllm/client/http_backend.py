# SPDX-License-Identifier: Apache-2.0
"""A vLLM server, over HTTP.

It must run with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out, and with our plugin's worker,
weight-transfer backend and auth middleware; server.py starts such a server. It is not trusted:
jaxmoe/http_engine/json_client.py bounds its responses. Next: jaxmoe/http_engine/replica.py.
"""

import math
import os
import sys
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlencode

from urllib3.util import parse_url

from jaxmoe.config import ConfigError, ModelConfig
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.json_client import MAX_BODY_BYTES, JsonClient
from jaxmoe.http_engine.redact import Key
from jaxmoe.http_engine.strict_json import format_value
from jaxmoe.vllm.client.backend import VllmBackend
from jaxmoe.vllm.client.worker_state import check_worker_states
from jaxmoe.vllm.plugin.auth_middleware import API_KEY_VARIABLE

HEALTH_TIMEOUT_S = 10.0
LOADED_STATE_TIMEOUT_S = 120.0  # one pass over the weights, more if a CPU packed them
MAX_STATE_BYTES = 1 << 24  # of all workers' digests, about 200 bytes a tensor
_REFUSED_STATUSES = {401, 403, 404, *range(300, 400)}  # a command without the key was refused


def read_api_key() -> str:
    """Return JAXMOE_VLLM_API_KEY, else VLLM_API_KEY, else "".

    Raises ConfigError for characters that no header can carry.
    """
    name = next(
        (n for n in ("JAXMOE_" + API_KEY_VARIABLE, API_KEY_VARIABLE) if os.environ.get(n)),
        API_KEY_VARIABLE,
    )
    key = os.environ.get(name, "")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"{name} must be printable ASCII without spaces; the given {len(key)} characters are "
            f"not. Try export {name}=$(openssl rand -hex 32), for the server too."
        )
    return key


def check_requires_key(backend: "HttpBackend") -> None:
    """Warn on stderr if a running server takes commands without a key.

    Raises ConfigError if its URL is not on this machine, and RequestFailed if it does not answer.
    """
    if not backend.accepts_unauthenticated_commands():
        return
    message = (
        f"{backend.name} takes commands without a key: whoever reaches its port can load weights "
        f"and run code as its user. Start it with {API_KEY_VARIABLE}=$(openssl rand -hex 32) and "
        "--middleware jaxmoe.vllm.plugin.auth_middleware.AuthMiddleware (vLLM's own --api-key "
        "leaves these routes open), and run this command with the same key"
    )
    if not _is_loopback(backend.name):
        raise ConfigError(f"rollout.vllm.url: {message}.")
    print(f"! {message}", file=sys.stderr)


def _is_loopback(url: str) -> bool:
    host = (parse_url(url).host or "").strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def max_body_bytes_per_token(cfg: ModelConfig) -> int:
    """Return a limit of a generate response's bytes per token: 1 KiB and its experts in base64.

    vLLM writes about 100 bytes of JSON for a token, and one or two bytes for an expert; the limit
    leaves room for other spellings and for experts of 8 bytes.
    """
    return 1024 + math.ceil(4 / 3 * 8 * cfg.n_layers * cfg.experts_per_token)


class HttpBackend(JsonClient, VllmBackend):
    """A Backend over HTTP.

    A response has at most MAX_BODY_BYTES plus, for a generate request, `token_bytes` for each token
    of each sample. `model` is the requested model's name on the server; empty: its only model.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        key: str = "",
        model: str = "",
        token_bytes: int = 4096,
    ) -> None:
        super().__init__(
            url,
            timeout_s=timeout_s,
            key=key,
            key_variable=API_KEY_VARIABLE,
        )
        self._model, self._token_bytes = {"model": model} if model else {}, token_bytes

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling_params = body["sampling_params"]
        tokens = sampling_params.get("n", 1) * (
            len(body["token_ids"]) + sampling_params["max_tokens"]
        )
        max_body_bytes = MAX_BODY_BYTES + tokens * self._token_bytes
        return self.request_json(
            "POST", "/inference/v1/generate", body | self._model, max_body_bytes=max_body_bytes
        )

    def max_context(self) -> int:
        models = self.request_json("GET", "/v1/models")
        try:
            context = models["data"][0]["max_model_len"]
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed(f"{self.name}/v1/models names no max_model_len") from error
        if type(context) is not int or not 0 < context < 2**31:
            raise RequestFailed(
                f"{self.name}/v1/models must name max_model_len as a number of tokens, got "
                f"{format_value(context)}"
            )
        return context

    def check_health(self) -> None:
        self.request_json("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)

    def accepts_unauthenticated_commands(self) -> bool:
        """Return True if a worker's method could be called without the key. Raises RequestFailed.

        Asked by GET, which calls nothing: an open route answers 405.
        """
        response = self.send_request(
            "GET", "/collective_rpc", None, HEALTH_TIMEOUT_S, MAX_BODY_BYTES, Key("")
        )
        return response.status not in _REFUSED_STATUSES

    def loaded_state(self) -> list[dict[str, Any]]:
        response = self.request_json(
            "POST",
            "/collective_rpc",
            {"method": "jaxmoe_loaded_state"},
            timeout_s=min(LOADED_STATE_TIMEOUT_S, self._timeout_s),
            max_body_bytes=MAX_STATE_BYTES,
        )
        results = response.get("results") if isinstance(response, dict) else None
        try:
            return check_worker_states(results)
        except ValueError as error:
            raise RequestFailed(
                f"{self.name}/collective_rpc jaxmoe_loaded_state: {error}"
            ) from error

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        self._post_json("/init_weight_transfer_engine", {"init_info": init_info})

    def pause(self, mode: str) -> None:
        self._post_json("/pause?" + urlencode({"mode": mode}))

    def resume(self) -> None:
        self._post_json("/resume")

    def start_update(self) -> None:
        self._post_json("/start_weight_update")

    def send_update(self, update_info: dict[str, Any]) -> None:
        self._post_json("/update_weights", {"update_info": update_info})

    def finish_update(self, label: str) -> None:
        self._post_json("/finish_weight_update", {"weight_version": label})

    def load_adapter(self, folder: str) -> None:
        self._post_json("/collective_rpc", {"method": "jaxmoe_load_adapter", "args": [folder]})

    def reset_prefix_cache(self) -> bool:
        response = self._post_json("/reset_prefix_cache?reset_running_requests=true")
        return isinstance(response, dict) and response.get("success") is True

    def _post_json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.request_json("POST", path, body)
