# SPDX-License-Identifier: Apache-2.0
"""One running vLLM, wherever it is. Next: http_backend.py and in_process.py are the two there are;
replica.py adds which weights it holds, engine.py spreads the work over several.
"""

from typing import Any, Protocol, runtime_checkable


class RequestFailed(RuntimeError):
    """No response came, or none that can be used: a retry, or another replica, may help."""


@runtime_checkable
class Backend(Protocol):
    """Requests and responses are the dicts of vLLM's token-in-token-out route.

    Every method may be called from several threads and raises RequestFailed where it fails.
    """

    name: str  # for messages: a URL, or "this process"

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response of POST /inference/v1/generate to this body."""
        ...

    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        ...

    def health(self) -> None:
        """Returns soon where vLLM answers."""
        ...

    def loaded_state(self) -> list[dict[str, Any]]:
        """What each worker holds: the plugin's `jaxmoe_loaded_state`."""
        ...

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Once per vLLM, before its first update."""
        ...

    def pause(self, mode: str) -> None:
        """Sample nothing from now on; requests in flight are kept, waited for or aborted."""
        ...

    def resume(self) -> None: ...

    def start_update(self) -> None: ...

    def update(self, update_info: dict[str, Any]) -> None: ...

    def finish_update(self, label: str) -> None: ...

    def load_adapter(self, folder: str) -> None:
        """Serve this adapter alone from now on: the plugin's `jaxmoe_load_adapter`."""
        ...

    def reset_prefix_cache(self) -> bool:
        """True where nothing computed from older weights is left."""
        ...

    def close(self) -> None:
        """Let go of it; may be called twice."""
        ...
