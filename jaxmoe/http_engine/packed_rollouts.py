# SPDX-License-Identifier: Apache-2.0
"""Serialize rollouts for other processes: arrays and JSON, no pickle.

Next: jaxmoe/vllm/engine/multi_process_engine.py.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from jaxmoe.records import Prompt, Rollout, StopReason

_ARRAYS = (
    "tokens",
    "rollout_logp",
    "weight_versions",
    "log_kept",
    "routed_experts",
    "policy_mask",
    "token_rewards",
)
_NUMBERS = ("env_rewards", "env_metrics")
_PLAIN = ("lost", "env_fault", "state_keys", "context_starts")


def serialize_rollouts(rollouts: Sequence[Rollout], **extra: Any) -> bytes:
    """Return rollouts as bytes; a shared prompt is stored once, `extra` values are JSON."""
    prompts = {id(r.prompt): r.prompt for r in rollouts}
    numbers = {key: n for n, key in enumerate(prompts)}
    head: dict[str, Any] = {
        "extra": extra,
        "prompts": [asdict(p) for p in prompts.values()],
        "prompt_of": [numbers[id(r.prompt)] for r in rollouts],
        "stop": [r.stop.value for r in rollouts],
    }
    head |= {name: [dict(getattr(r, name)) for r in rollouts] for name in _NUMBERS}
    head |= {name: [getattr(r, name) for r in rollouts] for name in _PLAIN}
    joined: dict[str, Any] = {}
    for name in _ARRAYS:
        arrays = [getattr(r, name) for r in rollouts]
        # None: the rollout has no such array, which an empty array would not say.
        head[name] = [None if a is None else len(a) for a in arrays]
        if present := [a for a in arrays if a is not None]:
            joined[name] = np.concatenate(present)
    joined["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **joined)
    return file.getvalue()


def deserialize_rollouts(data: bytes) -> tuple[list[Rollout], dict[str, Any]]:
    """Return the rollouts and the extra values."""
    # Whoever reaches the coordinator's port can send data, and a pickle could run code.
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        head = json.loads(archive["head"].tobytes())
        split = {name: _split_array(archive, name, head[name]) for name in _ARRAYS}
    prompts = [Prompt(**p | {"tokens": tuple(p["tokens"])}) for p in head["prompts"]]
    rollouts = [
        Rollout(
            prompts[n],
            stop=StopReason(stop),
            **{name: split[name][i] for name in _ARRAYS},
            # A queue that an older version saved has fewer of them.
            **{name: head[name][i] for name in (*_NUMBERS, *_PLAIN) if name in head},
        )
        for i, (n, stop) in enumerate(zip(head["prompt_of"], head["stop"], strict=True))
    ]
    return rollouts, head["extra"]


def _split_array(archive: Any, name: str, lengths: list[int | None]) -> list[Any]:
    if name not in archive:
        return [None] * len(lengths)
    joined, start, parts = archive[name], 0, list[Any]()
    for length in lengths:
        parts.append(None if length is None else joined[start : start + length])
        start += length or 0
    return parts
