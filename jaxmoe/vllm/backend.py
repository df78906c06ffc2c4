# SPDX-License-Identifier: Apache-2.0
"""One running vLLM, wherever it is. Next: http_backend.py and in_process.py are the two there are;
replica.py adds what is known about one, engine.py spreads the work over several.
"""

from typing import Any, Protocol, runtime_checkable


class Unanswered(RuntimeError):
    """No answer came, or none that can be used: asking again, or elsewhere, may help."""


@runtime_checkable
class Backend(Protocol):
    """Requests and answers are the dicts of vLLM's token-in-token-out route.

    Every method may be called from several threads and raises Unanswered where it fails.
    """

    name: str  # for messages: a URL, or "this process"

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of POST /inference/v1/generate to this body."""
        ...

    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        ...

    def health(self) -> None:
        """Returns soon where vLLM answers."""
        ...

    def held(self) -> list[dict[str, Any]]:
        """What each worker holds: the plugin's `jaxmoe_held`."""
        ...

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Once per vLLM, before its first update."""
        ...

    def pause(self, mode: str) -> None:
        """Sample nothing from now on; requests under way are kept, waited for or aborted."""
        ...

    def resume(self) -> None: ...

    def start_update(self) -> None: ...

    def update(self, update_info: dict[str, Any]) -> None: ...

    def finish_update(self, label: str) -> None: ...

    def reset_prefix_cache(self) -> bool:
        """True where nothing computed from older weights is left."""
        ...

    def close(self) -> None:
        """Let go of it; may be called twice."""
        ...
