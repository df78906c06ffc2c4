# SPDX-License-Identifier: Apache-2.0
"""Weight updates from a trainer in vLLM's own process: tensors are handed over, not copied.

An update can be taken once. vLLM must share the process: VLLM_ENABLE_V1_MULTIPROCESSING=0.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

Update = tuple[Mapping[str, Any], Iterable[tuple[str, Any]]]

_waiting: dict[str, Update] = {}  # the process is all that the two sides share
_lock = threading.Lock()


def put_update(key: str, manifest: Mapping[str, Any], tensors: Iterable[tuple[str, Any]]) -> None:
    """Store a weight update; `tensors` are torch tensors by checkpoint name, in any order."""
    with _lock:
        _waiting[key] = (manifest, tensors)


def pop_update(key: str) -> Update | None:
    """Return and remove the weight update under this key; None if this process has none."""
    with _lock:
        return _waiting.pop(key, None)
