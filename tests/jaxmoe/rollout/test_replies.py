# SPDX-License-Identifier: Apache-2.0
"""Threads for the replies of environments: as many as are needed, and none after a run."""

import threading
import time

from jaxmoe.rollout import replies
from jaxmoe.rollout.replies import ReplyThreads


def count_threads():
    return sum(thread.name == "jaxmoe-reply" for thread in threading.enumerate())


def test_idle_threads_end_and_start_again(monkeypatch):
    monkeypatch.setattr(replies, "IDLE_S", 0.05)
    before, threads = count_threads(), ReplyThreads(4)
    for _ in range(2):
        gate = threading.Barrier(4)  # all four calls wait for each other
        assert threads.run_all([gate.wait] * 4, limit_s=60) and not gate.broken
        end = time.perf_counter() + 60
        while count_threads() > before and time.perf_counter() < end:
            time.sleep(0.01)
        assert count_threads() <= before
