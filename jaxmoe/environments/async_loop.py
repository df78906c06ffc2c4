# SPDX-License-Identifier: Apache-2.0
"""Run the async methods of environments and tools on one event loop, in a thread of its own.

The loop lives as long as the process, so that clients which belong to a loop stay usable from one
step to the next. An async function that blocks delays all others.
"""

import asyncio
import concurrent.futures
import functools
import inspect
import os
import threading
from collections.abc import Awaitable
from typing import Any

from jaxmoe.user_code import UserCodeExit

_START_LOCK = threading.Lock()


def wait_for_result(result: Any) -> Any:
    """Return the result of a call: await it on the shared loop if the call was async.

    Blocks the calling thread, which must not be that of the loop. Raises what the call raises.
    """
    if not inspect.isawaitable(result):
        return result
    with _START_LOCK:  # a cache alone would let several first callers start a loop each
        loop, thread = _start_loop(os.getpid())
    if threading.current_thread() is thread:
        if inspect.iscoroutine(result):
            result.close()
        raise RuntimeError(
            "an async tool or environment called a method that waits for the same event loop; "
            "await that method instead"
        )
    try:
        return asyncio.run_coroutine_threadsafe(_await_result(result), loop).result()
    except concurrent.futures.CancelledError as error:  # not an Exception: it would end the thread
        raise RuntimeError("the async call was cancelled") from error


async def _await_result(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except SystemExit as error:  # asyncio would end the loop, and every later call would wait
        raise UserCodeExit.from_error(error) from error


@functools.cache  # by process: a thread does not survive a fork
def _start_loop(_process: int) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="jaxmoe-async", daemon=True)
    thread.start()
    return loop, thread
