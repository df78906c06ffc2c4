# SPDX-License-Identifier: Apache-2.0
"""The writers of orbax when a save fails. Next: jaxmoe/checkpoint/store.py."""

import logging
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def join_failed_writers(timeout_s: float = 30.0) -> Iterator[None]:
    """If the block raises an Exception, wait until the threads that it started have ended.

    orbax writes a checkpoint in several threads and raises the first error. The other threads go
    on, and log a traceback each while the process ends. The caller reports the error, so their
    log and their warnings are dropped.
    """
    logging.getLogger("absl").addFilter(_is_no_thread_error)
    earlier = set(threading.enumerate())
    try:
        yield
    # Not for a KeyboardInterrupt: a second Ctrl-C stops at once.
    except Exception:
        warnings.filterwarnings("ignore", "coroutine 'async_serialize", RuntimeWarning)
        end = time.monotonic() + timeout_s
        # a thread may start another one before it ends
        while (threads := set(threading.enumerate()) - earlier) and time.monotonic() < end:
            for thread in threads:
                # A thread that is just being started is not alive yet, and cannot be joined.
                if thread.is_alive():
                    # not thread.join: that of orbax raises the thread's error
                    threading.Thread.join(thread, max(0.0, end - time.monotonic()))
            time.sleep(0.001)
        raise


def remove_unfinished(directory: Path, quiet_s: float = 0.5, timeout_s: float = 5.0) -> None:
    """Remove the folder of a failed save until it has been absent for `quiet_s`.

    tensorstore writes in threads of its own, which nothing can wait for: they create folders again
    that were removed while they wrote, and the next save would fail on them.
    """
    end = time.monotonic() + timeout_s
    absent_since = time.monotonic()
    while time.monotonic() < min(end, absent_since + quiet_s):
        for folder in directory.glob("*orbax-checkpoint-tmp*"):
            shutil.rmtree(folder, ignore_errors=True)
            absent_since = time.monotonic()
        time.sleep(0.02)


def _is_no_thread_error(record: logging.LogRecord) -> bool:
    """False for the message with which orbax logs an error that it also raises."""
    return "_SignalingThread.run() raised an exception" not in str(record.msg)
