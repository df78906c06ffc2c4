# SPDX-License-Identifier: Apache-2.0
"""A save that fails under a limit of file size, in a process of its own."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxmoe.checkpoint.failed_writers import join_failed_writers

PROGRAM = """
import resource, sys
from pathlib import Path

import jax.numpy as jnp
from jaxmoe.checkpoint.store import CheckpointError, save_checkpoint

folder = Path(sys.argv[1])
parts = {"policy": {f"array {i}": jnp.full((3, 3), i) for i in range(60)}}
save_checkpoint(folder, 1, parts, {}, keep=3)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    save_checkpoint(folder, 2, parts, {}, keep=3)
except CheckpointError as error:
    print(error)
else:
    raise SystemExit("the save must fail")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
save_checkpoint(folder, 2, parts, {}, keep=3)
"""


@pytest.mark.parametrize("limit_bytes", [300, 3000])
def test_a_failed_save_is_one_line_and_the_next_one_is_complete(tmp_path: Path, limit_bytes: int):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(limit_bytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\n") == 1 and "File too large" in done.stdout, done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_threads_of_a_failed_block_have_ended():
    ended = threading.Event()

    def write():
        time.sleep(0.2)
        ended.set()

    with pytest.raises(OSError, match="full"), join_failed_writers():
        threading.Thread(target=write).start()
        raise OSError("full")
    assert ended.is_set()


def test_a_thread_that_hangs_does_not_hang_the_run():
    release = threading.Event()
    with pytest.raises(OSError, match="full"), join_failed_writers(timeout_s=0.1):
        threading.Thread(target=release.wait).start()
        raise OSError("full")
    release.set()
