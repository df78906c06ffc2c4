# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still while a process waits for a processor, to tell a hang from a busy
machine.

Next: fault_training.py, fault_files.py.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def ends_in_time(is_done: Callable[[], bool], pid: int, limit_s: float) -> bool:
    """Whether `is_done` before the process, or a child of it, could have used `limit_s` seconds.

    Time counts that no thread of them spent in the queue for a processor.
    """
    spent, last, waited = 0.0, time.monotonic(), _waited(pid)
    while not is_done():
        if spent > limit_s:
            return False
        time.sleep(0.05)
        now, then = time.monotonic(), waited
        waited = _waited(pid)
        queued = max((s - then.get(thread, 0.0) for thread, s in waited.items()), default=0.0)
        spent += max(now - last - queued, 0.0)
        last = now
    return True


def _waited(pid: int) -> dict[str, float]:
    """Seconds that each thread has waited for a processor so far."""
    found = dict[str, float]()
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (str(pid), *children):
            for task in Path(f"/proc/{process}/task").iterdir():
                with suppress(OSError):  # it has ended
                    found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found
