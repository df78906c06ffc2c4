# SPDX-License-Identifier: Apache-2.0
"""The state that a vLLM's workers report, checked before use.

Next: jaxmoe/vllm/client/sync.py compares it with what was sent.
"""

from typing import Any

from jaxmoe.http_engine.strict_json import format_value

MAX_WORKERS = 4096  # of one vLLM
MAX_NAME_CHARS = 300  # of a label or of a tensor's name


def check_worker_states(results: Any) -> list[dict[str, Any]]:
    """Return `results`, one dict per worker, if every field that is read has its type.

    Raises ValueError. Other fields may be anything.
    """
    if not isinstance(results, list) or not 0 < len(results) <= MAX_WORKERS:
        raise ValueError(f"the response must be a list of workers, got {format_value(results)}")
    for state in results:
        if not isinstance(state, dict):
            raise ValueError(f"a worker's response must be an object, got {format_value(state)}")
        for field, (kind, is_valid) in _FIELDS.items():
            value = state.get(field)
            if value is not None and not is_valid(value):
                raise ValueError(f"{field} must be {kind}, got {format_value(value)}")
    return results


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME_CHARS


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_digests(value: Any) -> bool:
    return isinstance(value, dict) and _is_names([*value]) and _is_names([*value.values()])


def _is_model(value: Any) -> bool:
    """Return True for values of config.json: numbers, names of a dtype or kind, RoPE objects."""
    return isinstance(value, dict) and all(
        _is_setting(name, x) or (name.startswith("rope_") and _is_rope(x))
        for name, x in value.items()
    )


def _is_rope(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_setting(name, x) for name, x in value.items())


def _is_setting(name: str, value: Any) -> bool:
    if name in ("dtype", "rope_type", "type"):
        return value is None or _is_text(value)
    return isinstance(value, int | float | None)


_FIELDS = {
    "instance": ("a text", _is_text),
    "label": ("a text", _is_text),
    "logprobs_mode": ("a text", _is_text),
    "vllm": ("a text", _is_text),
    "experts": ("a text", _is_text),
    "drafts": ("a text", _is_text),
    "replicas": ("a number above 0", _is_count),
    "rows": ("a number above 0", _is_count),
    "received": ("digests by name", _is_digests),
    "live": ("digests by name", _is_digests),
    "stale": ("names of tensors", _is_names),
    "unreadable": ("names of tensors", _is_names),
    "model": ("settings of config.json", _is_model),
}
