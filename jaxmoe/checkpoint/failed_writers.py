# SPDX-License-Identifier: Apache-2.0
"""The writing threads of orbax when a save fails. Next: jaxmoe/checkpoint/store.py."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def join_failed_writers(timeout_s: float = 30.0) -> Iterator[None]:
    """If the block raises, wait until the threads that it started have ended.

    orbax writes a checkpoint in several threads and raises the first error. The other threads go
    on: they would write into a folder that the caller is about to remove, and log a traceback each
    while the process ends. The caller reports the error, so their tracebacks are not logged.
    """
    logging.getLogger("absl").addFilter(_is_no_thread_error)
    earlier = set(threading.enumerate())
    try:
        yield
    except BaseException:
        end = time.monotonic() + timeout_s
        for thread in set(threading.enumerate()) - earlier:
            thread.join(max(0.0, end - time.monotonic()))
        raise


def _is_no_thread_error(record: logging.LogRecord) -> bool:
    """False for the message with which orbax logs an error that it also raises."""
    return "_SignalingThread.run() raised an exception" not in str(record.msg)
