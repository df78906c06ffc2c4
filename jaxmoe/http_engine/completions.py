# SPDX-License-Identifier: Apache-2.0
"""Checks of what a server sampled, for every backend. Back: jaxmoe/http_engine/backend.py."""

import math
from collections.abc import Collection
from typing import Any

from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.strict_json import format_value

MAX_LOGP = 1e-4  # a rounded log-prob may be this much above 0, nats
MIN_LOGP = -9000.0  # vLLM writes -9999 for a log-prob that is missing or not a number


def check_sampled(
    tokens: Any, finish: Any, *, max_tokens: int, stop_ids: Collection[int], vocab_size: int
) -> list[int]:
    """Return the token ids of a sample that ended by `finish`. Raises RequestFailed."""
    aborted = finish == "abort"
    # A sample that is aborted before its first token has no list.
    if tokens is None and aborted:
        tokens = []
    # isinstance would accept true and false as integers.
    if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
        raise RequestFailed(
            f"token_ids must be a list of whole numbers, got {format_value(tokens)}"
        )
    outside = [t for t in tokens if not 0 <= t < vocab_size]
    if outside:
        raise RequestFailed(
            f"token ids must be below {vocab_size}, got {format_value(outside[:4])}"
        )
    if len(tokens) > max_tokens or not (tokens or aborted):
        raise RequestFailed(f"a response must have 1 to {max_tokens} tokens, got {len(tokens)}")
    stops = [i for i, t in enumerate(tokens) if t in stop_ids]
    if finish == "stop":
        if stops != [len(tokens) - 1]:
            raise RequestFailed(
                f"finish_reason is stop, but stop tokens are at {stops} of {len(tokens)} tokens"
            )
    elif finish in ("length", "abort"):
        if stops:
            raise RequestFailed(f"finish_reason is {finish}, but a stop token is at {stops[0]}")
        if finish == "length" and len(tokens) != max_tokens:
            raise RequestFailed(
                f"finish_reason is length after {len(tokens)} of {max_tokens} tokens: is the "
                "longest context of the server (vLLM's --max-model-len) too small?"
            )
    else:
        raise RequestFailed(
            f"finish_reason must be stop, length or abort, got {format_value(finish)}"
        )
    return tokens


def check_logp(value: Any, field: str) -> float:
    """Return a log-prob, at most 0. Raises RequestFailed."""
    if type(value) not in (int, float) or value != value or abs(value) == math.inf:
        raise RequestFailed(f"{field} must be a finite number, got {format_value(value)}")
    if not MIN_LOGP < value <= MAX_LOGP:
        raise RequestFailed(f"{field} must be a log-prob, got {format_value(value)}")
    return min(float(value), 0.0)
