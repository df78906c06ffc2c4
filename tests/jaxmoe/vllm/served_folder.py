# SPDX-License-Identifier: Apache-2.0
"""A real vLLM that serves an exported folder, started as a user would: a teacher for tests."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import urllib3
from process_environ import free_port
from vllm_cases import PYTHON

from jaxmoe.http_engine import server_processes
from jaxmoe.vllm.engine.server import default_environment
from jaxmoe.vllm.plugin import watchdog

START_TIMEOUT_S = 400.0
FLAGS = "--dtype float32 --max-num-seqs 16 --enforce-eager --kv-cache-memory-bytes 67108864"


class ServedFolder:
    """A server's URL and its processes."""

    def __init__(self, folder: Path, log: Path, *, context: int) -> None:
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        typed = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        typed += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(context)]
        environ = {
            **os.environ,
            **default_environment(cpu=True),
            watchdog.PARENT_PID_VARIABLE: str(os.getpid()),
        }
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [*typed, *FLAGS.split()],
                env=environ,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.segments: set[Path] = set()

    def wait_until_healthy(self) -> None:
        deadline, pool = time.monotonic() + START_TIMEOUT_S, urllib3.PoolManager(retries=False)
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                if pool.request("GET", f"{self.url}/health", timeout=5.0).status == 200:
                    self.segments = server_processes.find_shared_memory(self.process.pid)
                    return
            except urllib3.exceptions.HTTPError:
                pass
            time.sleep(0.2)
        self.kill()
        raise AssertionError(self.log.read_text()[-4000:])

    def kill(self) -> None:
        """Kill all its processes, and remove the shared memory that they leave."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        server_processes.remove_shared_memory(self.segments)


@contextmanager
def serve_folder(folder: Path, log: Path, *, context: int) -> Iterator[ServedFolder]:
    """Yield a vLLM that answers."""
    server = ServedFolder(folder, log, context=context)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.kill()
