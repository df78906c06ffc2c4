# SPDX-License-Identifier: Apache-2.0
"""A function that runs while a server is told to take what it sends."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxmoe.http_engine.backend import RequestFailed


@contextmanager
def run_concurrently(fn: Callable[[], None]) -> Iterator[None]:
    """Run fn in a thread during the block; its error is raised, or causes the block's error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fn()
        except BaseException as error:  # raised again in the waiting thread
            errors.append(error)

    # A daemon, because a broadcast to ranks that are gone may never return.
    thread = threading.Thread(target=run, name="jaxmoe-send", daemon=True)
    thread.start()
    try:
        yield
        thread.join()
    except Exception as error:
        if not errors:
            raise
        raise RequestFailed(f"sending weights failed: {errors[0]}; {error}") from errors[0]
    if errors:
        raise RequestFailed(f"sending weights failed: {errors[0]}") from errors[0]
