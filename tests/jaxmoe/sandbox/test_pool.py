# SPDX-License-Identifier: Apache-2.0
"""Pools of sandboxes leave nothing: no process, no descriptor, no memory, however they end."""

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.sandbox import (
    count_descriptors,
    is_running,
    kill_trainer,
    processes_of,
    read_rss_kb,
    wait_gone,
)
from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.pool import SandboxPool
from jaxmoe.sandbox.process import CallStatus, SandboxError
from tests.jaxmoe.sandbox.kinds import CONFIG, KINDS, first_kind, open_sandbox, require_kind


@pytest.fixture
def pool():
    pool = SandboxPool(Launcher(first_kind(), CONFIG), n_warm=2)
    yield pool
    pool.close()


def wait_idle(pool, count):
    deadline = time.monotonic() + 30
    while len(pool._state.idle) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_in_fresh_sandbox(pool, code):
    sandbox = pool.acquire()
    try:
        return sandbox.run(code, 5.0)
    finally:
        pool.release(sandbox)


def test_warm_sandboxes_wait_and_are_used_once(pool):
    assert run_in_fresh_sandbox(pool, "x = 1").status is CallStatus.OK
    wait_idle(pool, 2)
    waiting = list(pool._state.idle)
    sandbox = pool.acquire()
    assert sandbox is waiting[0]
    assert sandbox.run("x", 5.0).error == "NameError"
    pool.release(sandbox)
    assert not sandbox.is_running
    assert run_in_fresh_sandbox(pool, "2").output == "2\n"


def test_a_dead_warm_sandbox_is_not_used(pool):
    pool.release(pool.acquire())
    wait_idle(pool, 2)
    for sandbox in list(pool._state.idle):
        os.kill(sandbox._child.pid, signal.SIGKILL)
        sandbox._child.wait()
    assert run_in_fresh_sandbox(pool, "3").output == "3\n"


def test_a_sandbox_survives_the_thread_that_acquired_it(pool):
    sandboxes = []
    thread = threading.Thread(target=lambda: sandboxes.append(pool.acquire()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert sandboxes[0].run("4", 5.0).output == "4\n"


def test_a_closed_pool_ends_its_sandboxes():
    descriptors = count_descriptors()
    pool = SandboxPool(Launcher(first_kind(), CONFIG), n_warm=2)
    sandbox = pool.acquire()
    wait_idle(pool, 2)
    pids = processes_of(sandbox).union(*({s._child.pid} for s in pool._state.idle))
    pool.close()
    wait_gone(pids)
    assert not any(map(is_running, pids)) and count_descriptors() == descriptors
    with pytest.raises(SandboxError):
        pool.acquire()


def test_a_pool_that_nobody_holds_ends_its_sandboxes():
    pool = SandboxPool(Launcher(first_kind(), CONFIG), n_warm=0)
    pids = processes_of(pool.acquire())
    del pool
    gc.collect()
    wait_gone(pids)
    assert not any(map(is_running, pids))


def test_many_calls_leave_no_descriptor_and_no_memory():
    with open_sandbox() as sandbox:
        for _ in range(50):
            sandbox.run("x = [0] * 1000", 5.0)
        descriptors, before = count_descriptors(), read_rss_kb(sandbox.worker_pid)
        for i in range(300):  # benchmarks/sandbox.py makes 10,000
            assert sandbox.run(f"x = {i}\nx", 5.0).output == f"{i}\n"
        assert count_descriptors() == descriptors
        assert read_rss_kb(sandbox.worker_pid) - before < 500 < before < 25_000


def test_sandboxes_at_once_answer_each_for_itself():
    pool = SandboxPool(Launcher(first_kind(), CONFIG), n_warm=0)
    with ThreadPoolExecutor(16) as threads:
        sandboxes = list(threads.map(lambda _: pool.acquire(), range(16)))
        results = list(threads.map(lambda i: sandboxes[i].run(f"{i}", 30.0).output, range(16)))
    pids = set().union(*map(processes_of, sandboxes))
    pool.close()
    wait_gone(pids)
    assert results == [f"{i}\n" for i in range(16)] and not any(map(is_running, pids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_trainer_leaves_no_sandbox(kind):
    require_kind(kind)
    _, seconds = kill_trainer(kind)  # which asserts that all have ended
    assert seconds < 2
