# SPDX-License-Identifier: Apache-2.0
"""A server is taken to hang when it neither answers nor works, and not when it is only slow."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmoe.http_engine import heartbeat, server_processes
from jaxmoe.http_engine.heartbeat import Heartbeat
from jaxmoe.http_engine.json_client import JsonClient
from jaxmoe.http_engine.server_processes import CpuTime

ROUTES = {"server_route": "/health", "engine_route": "/is_paused"}
SERVER_ROUTE, ENGINE_ROUTE = ROUTES.values()


class Backend(JsonClient):
    """Answers some paths; to the others it waits as long as it may, or refuses at once."""

    def __init__(self, answered, waits):
        self.answered, self.waits, self.closed, self.requested = (
            answered,
            waits,
            "",
            threading.Event(),
        )

    def answers_within(self, path, timeout_s):
        if path not in self.answered and self.waits:
            time.sleep(timeout_s)
        if len(self.answered) or not self.waits or path == SERVER_ROUTE:
            self.requested.set()
        return path in self.answered

    def close(self, reason=""):
        self.closed = reason
        self.requested.set()


@pytest.mark.parametrize(
    ("answered", "waits", "works", "on_disk", "expected"),
    [
        ({ENGINE_ROUTE, SERVER_ROUTE}, True, False, False, ""),
        ({SERVER_ROUTE}, True, False, False, "its processes use no CPU"),
        ({SERVER_ROUTE}, True, True, False, ""),
        ({SERVER_ROUTE}, True, False, True, ""),
        (set(), True, True, False, "its server answers no request"),
        (set(), False, False, False, ""),  # it has ended, or was stopped
    ],
    ids=["answers", "hangs", "works", "reads a disk", "server hangs", "gone"],
)
def test_what_counts_as_a_hang(monkeypatch, answered, waits, works, on_disk, expected):
    monkeypatch.setattr(heartbeat, "HANG_TIMEOUT_S", 0.2)
    monkeypatch.setattr(heartbeat, "CPU_WINDOW_S", 0.05)
    seconds = iter(range(100))
    monkeypatch.setattr(
        server_processes,
        "measure_cpu_time",
        lambda _: CpuTime({5: float(next(seconds)) if works else 7.0}, on_disk),
    )
    monkeypatch.setattr(server_processes, "find_shared_memory", lambda _: set())
    backend = Backend(answered, waits)
    routes = {f"_{name}": route for name, route in ROUTES.items()}
    fake = SimpleNamespace(_backend=backend, _group=0, **routes)
    reason = Heartbeat._find_hang(fake)  # pyright: ignore[reportArgumentType]
    assert expected in reason and bool(reason) == bool(expected)


def test_it_ends_the_connections_and_says_why(monkeypatch):
    monkeypatch.setattr(Heartbeat, "_find_hang", lambda self: "it sleeps")
    monkeypatch.setattr(
        server_processes, "find_shared_memory", lambda group: {Path(f"/dev/shm/psm_{group}")}
    )
    backend = Backend(set(), True)
    monitor = Heartbeat(backend, 5, "vLLM 3", **ROUTES)
    assert backend.requested.wait(5)
    monitor.stop()
    assert monitor.hung == backend.closed == "vLLM 3 hangs: it sleeps"
    assert monitor.segments == {Path("/dev/shm/psm_5")}


def test_one_stalled_worker_is_idle_unless_disks_work():
    before, after = {5: 1.0, 6: 1.0}, {5: 1.05, 6: 9.0}
    assert CpuTime(after, False).is_idle_since(CpuTime(before, False), 0.25)
    assert not CpuTime(after, True).is_idle_since(CpuTime(before, False), 0.25)
    assert not CpuTime({5: 1.5, 6: 9.0}, False).is_idle_since(CpuTime(before, False), 0.25)
