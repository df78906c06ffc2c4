# SPDX-License-Identifier: Apache-2.0
"""What a trainer started ends with it, in real processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from jaxmoe.vllm.plugin import watchdog

CHILD = """
import os, sys, time
from jaxmoe.vllm.plugin import watchdog
watchdog.POLL_S = 0.05
if sys.argv[1] == "poll" and hasattr(os, "pidfd_open"):
    del os.pidfd_open
if sys.argv[1] == "rejected":  # by a kernel or a sandbox
    def refuse(pid):
        raise OSError(38, "Function not implemented")
    os.pidfd_open = refuse
watchdog.watch_process(int(sys.argv[2]))
watchdog.watch_process(int(sys.argv[2]))
print("watching", flush=True)
time.sleep(60)
"""


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


@pytest.mark.parametrize("method", ["wait", "poll", "rejected"])
def test_a_process_ends_with_the_process_it_watches(method):
    trainer = sleeper()
    command = [sys.executable, "-c", CHILD, method, str(trainer.pid)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "watching\n"
        time.sleep(0.2)
        assert child.poll() is None
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        assert child.wait(timeout=10) == watchdog.ORPHAN_EXIT_STATUS


def test_a_process_ends_if_its_trainer_is_dead():
    trainer = sleeper()
    trainer.kill()
    trainer.wait()
    command = [sys.executable, "-c", CHILD, "wait", str(trainer.pid)]
    assert (
        subprocess.run(command, timeout=10, capture_output=True).returncode
        == watchdog.ORPHAN_EXIT_STATUS
    )


def test_the_plugin_imports_no_jax_flax_torch_vllm():
    code = """
import sys
class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("jax", "jaxlib", "flax", "optax", "torch", "vllm", "ml_dtypes"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
from jaxmoe.vllm.plugin import compat, loaded_state, manifest, names, tensor_mailbox
from jaxmoe.vllm.plugin import watchdog, worker
import jaxmoe.vllm.plugin as plugin
assert "needs vllm" in compat.find_missing_api()
plugin.register()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_killing_the_trainer_leaves_no_vllm_process(tmp_path):
    import socket

    import jax

    from jaxmoe.checkpoint.hf import save_params
    from jaxmoe.model import init_params, tiny

    cfg = tiny(vocab_size=97, d_model=64, n_q_heads=2, n_kv_heads=1, head_dim=32, n_experts=4)
    save_params(init_params(jax.random.key(0), cfg), cfg, tmp_path / "model", dtype="float32")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trainer, family = sleeper(), []
    env = os.environ | {
        watchdog.PARENT_PID_VARIABLE: str(trainer.pid),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    options = (
        f"--model {tmp_path / 'model'} --dtype float32 --enforce-eager --max-model-len 64 "
        f"--kv-cache-memory-bytes {64 << 20} --skip-tokenizer-init --port {port} "
        "--host 127.0.0.1 --max-num-seqs 4"
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split()]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        family = psutil.Process(server.pid).children(recursive=True)
        assert family  # the engine is a process of its own
        trainer.kill()
        trainer.wait()
        server.wait(timeout=15)
        assert not psutil.wait_procs(family, timeout=15)[1]
    finally:
        trainer.kill()
        trainer.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.kill()
        server.wait()
