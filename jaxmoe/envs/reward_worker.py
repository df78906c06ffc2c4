# SPDX-License-Identifier: Apache-2.0
"""The process that runs reward functions, in its main thread, so that signals work.

math_verify, for example, sets an alarm, which Python allows only in the main thread. This module
imports only the standard library and starts fast.
Next: jaxmoe/envs/reward_process.py is the other end of the connection.
"""

import asyncio
import functools
import importlib
import inspect
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

Outcome = tuple[str, Any]  # ("value", what it returned), or ("late", None)


def run_calls(
    function: Callable[..., Any], calls: Sequence[dict[str, Any]], limit_s: float | None
) -> list[Outcome]:
    """Call a function once for each set of arguments; async calls run concurrently.

    limit_s: time limit of an async call; None for no limit.
    Raises: the error of the function, with the number of the call as `call_number`.
    """
    results: list[Any] = []
    for number, arguments in enumerate(calls):
        try:
            results.append(function(**arguments))
        # BaseException, because sys.exit() in a reward function must not end the process without an
        # answer.
        except BaseException as error:
            raise _set_call_number(error, number) from error.__cause__
    if any(inspect.isawaitable(result) for result in results):
        return asyncio.run(_await_all(results, limit_s))
    return [("value", result) for result in results]


async def _await_all(results: list[Any], limit_s: float | None) -> list[Outcome]:
    outcomes = await asyncio.gather(
        *(_await_result(result, limit_s) for result in results), return_exceptions=True
    )
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            raise _set_call_number(outcome, number)
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


async def _await_result(result: Any, limit_s: float | None) -> Outcome:
    if not inspect.isawaitable(result):
        return "value", result
    clock = asyncio.timeout(limit_s)
    try:
        async with clock:
            return "value", await result
    except TimeoutError:
        if clock.expired():
            return "late", None
        raise  # the function's own TimeoutError


def _set_call_number(error: BaseException, number: int) -> BaseException:
    if isinstance(error, SystemExit):
        error = RuntimeError(f"it called sys.exit({error.code!r})")
    error.call_number = number  # type: ignore[attr-defined]
    return error


def main() -> None:
    """Serve the connection whose file descriptor is the first argument, until it closes."""
    connection = Connection(int(sys.argv[1]))
    # The trainer decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    functions: dict[Any, Callable[..., Any]] = {}
    sys.path[:] = connection.recv()
    while True:
        try:
            key, path, options, calls, limit_s = connection.recv()
        except EOFError:
            return
        try:
            if key not in functions:
                functions[key] = _import_function(path, options)
            answer = ("returned", run_calls(functions[key], calls, limit_s) if calls else [])
            message = _pickle_answer(answer)
        except BaseException as error:
            message = pickle.dumps(_describe_error(error))
        connection.send_bytes(message)


def _exit_with_parent(parent: int) -> None:
    """Exit when the trainer is gone: a killed trainer cannot end a function that never returns."""
    while os.getppid() == parent:
        time.sleep(1.0)
    # sys.exit would end this thread alone.
    os._exit(1)


def _import_function(path: str, options: dict[str, Any]) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return functools.partial(function, **options) if options else function


def _pickle_answer(answer: Any) -> bytes:
    """Pickle an answer; generators are replaced by lists of their items first."""
    kind, outcomes = answer
    lists = [
        (kind_of_outcome, list(value) if inspect.isgenerator(value) else value)
        for kind_of_outcome, value in outcomes
    ]
    return pickle.dumps((kind, lists))


def _describe_error(error: BaseException) -> tuple[str, Any]:
    """("raised", (pickled error or None, its text, its traceback, number of the call))."""
    text = "".join(traceback.format_exception(error)).rstrip()
    number = getattr(error, "call_number", 0)
    try:
        pickled = pickle.dumps(error)
        # Some exceptions can be pickled and not be rebuilt.
        pickle.loads(pickled)
    except BaseException:
        pickled = None
    return "raised", (pickled, f"{type(error).__name__}: {error}", text, number)


if __name__ == "__main__":
    main()
