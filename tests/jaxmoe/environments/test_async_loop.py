# SPDX-License-Identifier: Apache-2.0
"""Async calls of environments run on one loop, which outlives them, from any number of threads."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxmoe.environments.async_loop import wait_for_result


async def wait(seconds):
    await asyncio.sleep(seconds)
    return asyncio.get_running_loop(), threading.get_ident()


def test_a_result_that_is_there_is_returned_as_it_is():
    assert wait_for_result(3) == 3 and wait_for_result(None) is None


def test_calls_of_many_threads_wait_at_the_same_time_on_one_loop():
    start = time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        results = set(pool.map(lambda _: wait_for_result(wait(0.2)), range(32)))
    assert len(results) == 1 and results == {wait_for_result(wait(0))}
    assert time.perf_counter() - start < 3  # one after the other: 6.4 s


def test_an_exception_of_the_call_is_raised_where_it_is_waited_for():
    async def fail():
        raise KeyError("x")

    async def cancel():
        raise asyncio.CancelledError

    with pytest.raises(KeyError, match="x"):
        wait_for_result(fail())
    with pytest.raises(RuntimeError, match="cancelled"):
        wait_for_result(cancel())


def test_a_call_that_would_wait_for_its_own_loop_is_refused():
    async def call_back():
        return wait_for_result(wait(0))

    with pytest.raises(RuntimeError, match="waits for the same event loop"):
        wait_for_result(call_back())


def test_futures_and_other_awaitables_are_awaited():
    class Ready:
        def __await__(self):
            yield from asyncio.sleep(0).__await__()
            return 7

    assert wait_for_result(Ready()) == 7
