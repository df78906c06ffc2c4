# SPDX-License-Identifier: Apache-2.0
"""Requests to a judge's chat completions, with limits, retries, and a reason for each failure.

Next: jaxmoe/http_engine/http_client.py bounds the time and the bytes of a request.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from jaxmoe.config import ConfigError
from jaxmoe.http_engine.http_client import HttpClient, HttpFailed, Response

MAX_REPLY_BYTES = 1 << 20
_FIRST_WAIT_S = 0.5  # before the first retry; doubled for each further one
_MISTAKES = {401: "the key was refused", 403: "the key was refused", 404: "no such path or model"}


class JudgeFailed(Exception):
    """No verdict; `reason` is down, slow, http_error, malformed or unclear."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def request_judge(
    url: str,
    fields: Mapping[str, Any],
    key: str,
    read: Callable[[str], float | None],
    *,
    timeout_s: float,
    deadline_s: float,
    retries: int,
    concurrency: int,
) -> float:
    """The verdict that `read` finds in the reply to a request.

    Raises: JudgeFailed after the last try, or at the deadline; ConfigError if the endpoint refuses
        the key or has no such path or model.
    """
    deadline = time.monotonic() + deadline_s
    executor = _open_executor(url, concurrency)
    failure = JudgeFailed("slow", f"no verdict in {deadline_s:g} s")
    try:
        async with asyncio.timeout(deadline_s):
            for number in range(retries + 1):
                if number:
                    await asyncio.sleep(_FIRST_WAIT_S * 2 ** (number - 1))
                try:
                    return await asyncio.get_running_loop().run_in_executor(
                        executor,
                        _request,
                        url,
                        fields,
                        key,
                        read,
                        timeout_s,
                        deadline,
                    )
                except JudgeFailed as error:
                    failure = error
    except TimeoutError:
        pass
    raise failure


def _request(
    url: str,
    fields: Mapping[str, Any],
    key: str,
    read: Callable[[str], float | None],
    timeout_s: float,
    deadline: float,
) -> float:
    limit_s = min(timeout_s, deadline - time.monotonic())
    if limit_s <= 0:
        raise JudgeFailed("slow", "the deadline passed while other answers were judged")
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    start = time.monotonic()
    try:
        response = _open_client(url).request(
            "POST",
            "/chat/completions",
            json.dumps(fields).encode(),
            headers,
            timeout_s=limit_s,
            max_body_bytes=MAX_REPLY_BYTES,
        )
    except HttpFailed as error:
        is_slow = time.monotonic() - start >= limit_s
        raise JudgeFailed("slow" if is_slow else "down", str(error)) from None
    _check_status(url, response)
    score = read(_reply_text(response.body))
    if score is None:
        raise JudgeFailed("unclear", "its reply has not exactly one verdict")
    return score


def _check_status(url: str, response: Response) -> None:
    if response.status in _MISTAKES:
        raise ConfigError(
            f"data.rewards: score_by_judge must be accepted by {url}; it answered "
            f"{response.status}, {_MISTAKES[response.status]}. Check url, model and key_env."
        )
    if response.status != 200:
        raise JudgeFailed("http_error", f"it answered with status {response.status}")


def _reply_text(body: bytes) -> str:
    """The text of the first choice. A reply that was cut off has no verdict, so it is empty."""
    try:
        choice = json.loads(body)["choices"][0]
        text = choice["message"]["content"]
        is_cut = choice.get("finish_reason") == "length"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise JudgeFailed("malformed", "its reply is not a chat completion") from None
    if text is None or is_cut:
        return ""
    if not isinstance(text, str):
        raise JudgeFailed("malformed", "the content of its reply is not a text")
    return text


@lru_cache
def _open_client(url: str) -> HttpClient:
    return HttpClient(url)


@lru_cache
def _open_executor(url: str, concurrency: int) -> ThreadPoolExecutor:
    """Threads for the requests to one judge, shared by the calls that run concurrently."""
    return ThreadPoolExecutor(concurrency, thread_name_prefix="judge")
