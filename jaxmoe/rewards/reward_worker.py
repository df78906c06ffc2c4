# SPDX-License-Identifier: Apache-2.0
"""The process that runs reward functions, in its main thread, so that signals work.

math_verify, for example, sets an alarm, which Python allows only in the main thread. This module
imports only the standard library and starts fast.
Next: jaxmoe/rewards/reward_process.py is the other end of the connection.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

# ("value", what it returned), ("late", None), or ("raised", the error)
Outcome = tuple[str, Any]
_MAX_FRACTION_OF_MEMORY = 0.5  # of this machine, for the process and for each that it starts


def run_calls(
    function: Callable[..., Any], calls: Sequence[dict[str, Any]], limit_s: float | None
) -> list[Outcome]:
    """Call a function once for each set of arguments; async calls run concurrently.

    limit_s: time limit of an async call; None for no limit. An error of one call is its outcome.
    """
    outcomes = [_call(function, arguments) for arguments in calls]
    if any(inspect.isawaitable(value) for _, value in outcomes):
        return asyncio.run(_await_all(outcomes, limit_s))
    return outcomes


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Outcome:
    try:
        return "value", function(**arguments)
    except KeyboardInterrupt:  # the run's own stop
        raise
    # BaseException, because sys.exit() in a reward function must not end the process without an
    # answer.
    except BaseException as error:
        return "raised", _as_exception(error)


async def _await_all(outcomes: list[Outcome], limit_s: float | None) -> list[Outcome]:
    return list(await asyncio.gather(*(_await_result(*outcome, limit_s) for outcome in outcomes)))


async def _await_result(kind: str, value: Any, limit_s: float | None) -> Outcome:
    if not inspect.isawaitable(value):
        return kind, value
    clock = asyncio.timeout(limit_s)
    try:
        async with clock:
            return "value", await value
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, TimeoutError) and clock.expired():
            return "late", None
        return "raised", _as_exception(error)


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, SystemExit):
        return RuntimeError(f"it called sys.exit({error.code!r})")
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def main() -> None:
    """Serve the connection whose file descriptor is the first argument, until it closes."""
    connection = Connection(int(sys.argv[1]))
    # The trainer decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    _limit_memory()
    own_pid = os.getpid()
    try:
        sys.path[:] = connection.recv()
        functions: dict[Any, Callable[..., Any]] = {}
        while True:
            number, request = connection.recv()
            message = _answer(functions, *request)
            # A function that forked returns here twice, and the copy must not answer.
            if os.getpid() != own_pid:
                os._exit(1)
            connection.send((number, own_pid, message))
    except (EOFError, OSError):  # the trainer is gone
        return


def _limit_memory() -> None:
    """Limit the memory of this process, and have the kernel end it before the trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with contextlib.suppress(OSError, ValueError):  # of systems without these numbers
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit_bytes = int(total_bytes * _MAX_FRACTION_OF_MEMORY)
        hard_bytes = resource.getrlimit(resource.RLIMIT_DATA)[1]
        if hard_bytes == resource.RLIM_INFINITY or limit_bytes < hard_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard_bytes))


def _answer(
    functions: dict[Any, Callable[..., Any]],
    key: Any,
    path: str,
    options: dict[str, Any],
    calls: list[dict[str, Any]],
    limit_s: float | None,
) -> bytes:
    """The pickled answer to a request: the outcomes of its calls, or the error of its import."""
    try:
        if key not in functions:
            functions[key] = _import_function(path, options)
        outcomes = run_calls(functions[key], calls, limit_s)
        return pickle.dumps(("returned", [_as_sendable(outcome) for outcome in outcomes]))
    except BaseException as error:
        return pickle.dumps(("raised", _describe_error(error)))


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


def _as_sendable(outcome: Outcome) -> Outcome:
    """An outcome that can be pickled; a generator becomes a list of its items."""
    kind, value = outcome
    try:
        if kind == "raised":
            return kind, _describe_error(value)
        value = list(value) if inspect.isgenerator(value) else value
        pickle.dumps(value)
        return kind, value
    except BaseException as error:
        return "raised", _describe_error(error)


def _describe_error(error: BaseException) -> tuple[bytes | None, str, str]:
    """(pickled error or None, its text, its traceback)."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        pickled = pickle.dumps(error)
        # Some exceptions can be pickled and not be rebuilt.
        pickle.loads(pickled)
    except BaseException:
        pickled = None
    return pickled, f"{type(error).__name__}: {error}", trace


if __name__ == "__main__":
    main()
