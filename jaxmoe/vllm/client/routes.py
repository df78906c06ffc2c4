# SPDX-License-Identifier: Apache-2.0
"""The routes of a vLLM, over HTTP or in this process.

Next: http_backend.py and jaxmoe/vllm/engine/in_process_backend.py implement them; backend.py makes
a `Backend` of them.
"""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class VllmRoutes(Protocol):
    """Routes of a vLLM; requests and responses are the dicts of its token-in-token-out route.

    Every method may be called from several threads and raises RequestFailed on failure.
    """

    name: str  # for messages: a URL, or "this process"

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the response of POST /inference/v1/generate to this body."""
        ...

    def loaded_state(self) -> list[dict[str, Any]]:
        """Return each worker's loaded state: the plugin's `jaxmoe_loaded_state`."""
        ...

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Initialize the weight transfer, once per vLLM, before its first update."""
        ...

    def pause(self, mode: str) -> None:
        """Stop sampling; requests in flight are kept, waited for or aborted, by mode."""
        ...

    def resume(self) -> None: ...

    def start_update(self) -> None: ...

    def send_update(self, update_info: dict[str, Any]) -> None: ...

    def finish_update(self, label: str) -> None: ...

    def load_adapter(self, folder: str) -> None:
        """Serve only this adapter from now on: the plugin's `jaxmoe_load_adapter`."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Return True if nothing computed from older weights remains."""
        ...
