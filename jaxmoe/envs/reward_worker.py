# SPDX-License-Identifier: Apache-2.0
"""The process in which reward functions run: they have its main thread, so signals work there.

math_verify, for one, sets an alarm, which Python allows in no other thread. It needs nothing but
the standard library, and starts in a moment. Next: jaxmoe/envs/reward_process.py is the other end.
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
    """Call a function once for each set of arguments; async calls are awaited at the same time.

    limit_s: how long an async call may take; None for as long as it likes.
    An error of the function's own is raised, with the number of the call as `call_number`.
    """
    results: list[Any] = []
    for number, given in enumerate(calls):
        try:
            results.append(function(**given))
        except BaseException as error:
            raise _numbered(error, number) from error.__cause__
    if any(inspect.isawaitable(result) for result in results):
        return asyncio.run(_all_awaited(results, limit_s))
    return [("value", result) for result in results]


async def _all_awaited(results: list[Any], limit_s: float | None) -> list[Outcome]:
    outcomes = await asyncio.gather(
        *(_awaited(result, limit_s) for result in results), return_exceptions=True
    )
    for number, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            raise _numbered(outcome, number)
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


async def _awaited(result: Any, limit_s: float | None) -> Outcome:
    if not inspect.isawaitable(result):
        return "value", result
    clock = asyncio.timeout(limit_s)
    try:
        async with clock:
            return "value", await result
    except TimeoutError:
        if clock.expired():
            return "late", None
        raise  # one of its own


def _numbered(error: BaseException, number: int) -> BaseException:
    if isinstance(error, SystemExit):
        error = RuntimeError(f"it called sys.exit({error.code!r})")
    error.call_number = number  # type: ignore[attr-defined]
    return error


def main() -> None:
    """Serve the connection whose file descriptor is the first argument, until it closes."""
    link = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides when this ends
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    functions: dict[Any, Callable[..., Any]] = {}
    sys.path[:] = link.recv()
    while True:
        try:
            key, path, options, calls, limit_s = link.recv()
        except EOFError:
            return
        try:
            if key not in functions:
                functions[key] = _imported(path, options)
            answer = ("returned", run_calls(functions[key], calls, limit_s) if calls else [])
            message = _packed(answer)
        except BaseException as error:
            message = pickle.dumps(_raised(error))
        link.send_bytes(message)


def _end_with(parent: int) -> None:
    """A killed trainer cannot end a function that never returns."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _imported(path: str, options: dict[str, Any]) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    return functools.partial(function, **options) if options else function


def _packed(answer: Any) -> bytes:
    """Pickled; what an iterator yields is taken out first."""
    kind, outcomes = answer
    lists = [
        (what, list(value) if inspect.isgenerator(value) else value) for what, value in outcomes
    ]
    return pickle.dumps((kind, lists))


def _raised(error: BaseException) -> tuple[str, Any]:
    """("raised", (the error where it can be sent, its text, its traceback, number of the call))."""
    text = "".join(traceback.format_exception(error)).rstrip()
    number = getattr(error, "call_number", 0)
    try:
        sent = pickle.dumps(error)
        pickle.loads(sent)
    except BaseException:
        sent = None
    return "raised", (sent, f"{type(error).__name__}: {error}", text, number)


if __name__ == "__main__":
    main()
