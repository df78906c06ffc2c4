# SPDX-License-Identifier: Apache-2.0
"""Time and memory of sandboxes, and what they leave: `python -m benchmarks.sandbox [KIND ...]`."""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from jaxmoe.config.sandbox import SandboxConfig
from jaxmoe.sandbox.launch import Launcher
from jaxmoe.sandbox.pool import SandboxPool
from jaxmoe.sandbox.process import CallStatus, Sandbox

N_CALLS, N_AT_ONCE = 10_000, 256


def make_launcher(kind: str) -> Launcher:
    return Launcher(kind, SandboxConfig(kind=kind, disk_mb=0 if kind == "landlock" else 64))


def read_rss_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def processes_of(sandbox: Sandbox) -> set[int]:
    return {sandbox._child.pid, sandbox.worker_pid}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: set[int], limit_s: float = 10.0) -> float:
    """Seconds until none of the processes runs."""
    start = time.perf_counter()
    while any(map(is_running, pids)) and time.perf_counter() - start < limit_s:
        time.sleep(0.005)
    return time.perf_counter() - start


@contextmanager
def open_sandbox(launcher: Launcher) -> Iterator[Sandbox]:
    sandbox = launcher.start()
    try:
        sandbox.wait_ready()
        yield sandbox
    finally:
        sandbox.kill()


def measure_starts(launcher: Launcher) -> str:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        with open_sandbox(launcher):
            times.append(time.perf_counter() - start)
    return f"{1e3 * statistics.median(times):.0f} ms (fastest {1e3 * min(times):.0f})"


def measure_calls(launcher: Launcher) -> str:
    """Median of a call, with the time of the same program in this process taken off."""
    code, times, plain = "x = 12 * 34\nx", [], []
    with open_sandbox(launcher) as sandbox:
        for _ in range(3000):
            start = time.perf_counter()
            sandbox.run(code, 5.0)
            times.append(time.perf_counter() - start)
            start = time.perf_counter()
            exec(compile(code, "", "exec"), {})
            plain.append(time.perf_counter() - start)
    return f"{1e3 * (statistics.median(times) - statistics.median(plain)):.2f} ms"


def measure_many_calls(launcher: Launcher) -> str:
    with open_sandbox(launcher) as sandbox:
        for _ in range(100):
            sandbox.run("y = [0] * 1000", 5.0)
        pids, descriptors = processes_of(sandbox), count_descriptors()
        before = sum(map(read_rss_kb, pids))
        for i in range(N_CALLS):
            assert sandbox.run(f"x = {i} * 2\nprint(x)", 5.0).output == f"{2 * i}\n"
        grown = sum(map(read_rss_kb, pids)) - before
        more = count_descriptors() - descriptors
    left = sum(map(is_running, pids))
    return f"{grown} kB more, {more} descriptors more, {left} processes left"


def measure_at_once(launcher: Launcher) -> str:
    descriptors = count_descriptors()
    pool = SandboxPool(launcher, n_warm=0)
    start = time.perf_counter()
    with ThreadPoolExecutor(64) as threads:
        sandboxes = list(threads.map(lambda _: pool.acquire(), range(N_AT_ONCE)))
        started = time.perf_counter() - start
        results = list(threads.map(lambda s: s.run("6 * 7", 60.0), sandboxes))
    assert all(r.status is CallStatus.OK and r.output == "42\n" for r in results)
    pids = set().union(*map(processes_of, sandboxes))
    megabytes = sum(map(read_rss_kb, pids)) / 1024 / N_AT_ONCE
    pool.close()
    gone_s = wait_gone(pids)
    assert not any(map(is_running, pids))
    return (
        f"{started:.0f} s to start, {megabytes:.1f} MB each, gone after {gone_s:.2f} s, "
        f"{count_descriptors() - descriptors} descriptors more"
    )


def kill_trainer(kind: str) -> tuple[int, float]:
    """Kill a process with sandboxes at work; their number of processes, and seconds to the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sandbox", "--be-killed", kind],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    pids = set(map(int, child.stdout.readline().split()))
    assert len(pids) >= 8 and all(map(is_running, pids))
    os.kill(child.pid, signal.SIGKILL)
    seconds = wait_gone(pids)
    child.wait()
    child.stdout.close()
    assert not any(map(is_running, pids))
    return len(pids), seconds


def measure_killed_trainer(launcher: Launcher) -> str:
    n_processes, seconds = kill_trainer(launcher.kind)
    return f"{n_processes} processes gone after {seconds:.2f} s"


def be_killed(kind: str) -> None:
    """Start sandboxes whose programs try to survive, print their processes, and wait."""
    pool = SandboxPool(make_launcher(kind), n_warm=2)
    sandboxes = [pool.acquire() for _ in range(8)]
    code = "import ctypes\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nwhile True: pass"
    threads = ThreadPoolExecutor(8)
    for sandbox in sandboxes:
        threads.submit(sandbox.run, code, 1000.0)
    time.sleep(0.5)
    print(*sorted(set().union(*map(processes_of, sandboxes))), flush=True)
    time.sleep(1000)


def main() -> None:
    measures: dict[str, Callable[[Launcher], str]] = {
        "start": measure_starts,
        "call, beyond the code": measure_calls,
        f"{N_CALLS:,} calls": measure_many_calls,
        f"{N_AT_ONCE} at once": measure_at_once,
        "8 at work, trainer killed by -9": measure_killed_trainer,
    }
    for kind in sys.argv[1:] or ("bubblewrap", "landlock"):
        for name, measure in measures.items():
            print(f"{kind:12}{name:34}{measure(make_launcher(kind))}", flush=True)


if __name__ == "__main__":
    be_killed(sys.argv[2]) if sys.argv[1:2] == ["--be-killed"] else main()
