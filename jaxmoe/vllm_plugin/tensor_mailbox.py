# SPDX-License-Identifier: Apache-2.0
"""Where a trainer in vLLM's own process leaves new weights: tensors are handed over, not copied.

What is put is taken once. vLLM must share the process: VLLM_ENABLE_V1_MULTIPROCESSING=0.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

Update = tuple[Mapping[str, Any], Iterable[tuple[str, Any]]]

_waiting: dict[str, Update] = {}  # the two sides meet in nothing but this process
_lock = threading.Lock()


def put(key: str, manifest: Mapping[str, Any], tensors: Iterable[tuple[str, Any]]) -> None:
    """Leave a weight update; `tensors` are torch tensors by checkpoint name, in any order."""
    with _lock:
        _waiting[key] = (manifest, tensors)


def take(key: str) -> Update | None:
    """The weight update under this key, or None where there is none in this process."""
    with _lock:
        return _waiting.pop(key, None)
