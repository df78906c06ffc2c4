# SPDX-License-Identifier: Apache-2.0
"""Processes that meet, for tests: their variables and ports, and one command run by several."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from jaxmoe.distributed.processes import PROCESS_VARIABLES


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def make_environ(address="127.0.0.1:1", count="2", number="1"):
    return dict(zip(PROCESS_VARIABLES, (address, count, number), strict=True))


def run_together(typed: list[str], count: int, devices: int = 1, timeout_s: float = 600.0):
    """The exit status, stdout and stderr of each of `count` processes with such CPU devices."""
    address, started = f"127.0.0.1:{free_port()}", []
    for number in range(count):
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        env.pop("JAX_COMPILATION_CACHE_DIR", None)  # kept for process 0 alone, which then waits
        env |= make_environ(address, str(count), str(number)) if count > 1 else {}
        process = subprocess.Popen(
            [sys.executable, *typed],
            cwd=Path(__file__).parents[2],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
    outputs = [process.communicate(timeout=timeout_s) for process in started]
    return [(process.returncode, *out) for process, out in zip(started, outputs, strict=True)]
