# SPDX-License-Identifier: Apache-2.0
"""A real server that we start: who may come in, how soon a hang shows, and what is left of it.

JAXMOE_FAULTS=10 kills it so often; each kill costs a start of vLLM.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import urllib3
from vllm_cases import CFG, NEW, PROMPT, PYTHON, ROWS

from jaxmoe.config import VllmConfig
from jaxmoe.http_engine import server_processes
from jaxmoe.http_engine.backend import RequestFailed, SampleRequest
from jaxmoe.records import Sampling
from jaxmoe.vllm.client.backend import request_body
from jaxmoe.vllm.client.http_backend import HttpBackend, check_requires_key
from jaxmoe.vllm.engine.server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
KILLS = int(os.environ.get("JAXMOE_FAULTS", "1"))
NOBODY = 65534
DANGEROUS = (
    "/update_weight_version /finish_weight_update /start_weight_update "
    "/init_weight_transfer_engine /sleep /resume /pause /inference/v1/generate "
    "/collective_rpc /reset_prefix_cache /wake_up /update_weights /abort_requests "
    "/server_info"
).split()
UNLISTED = {"/metrics", "/docs", "/redoc", "/openapi.json", "/no/such", "//collective_rpc", "/"}


@pytest.fixture(scope="module")
def started_server(tmp_path_factory):
    server = Server(
        VllmConfig(python=PYTHON),
        CFG,
        work=tmp_path_factory.mktemp("server"),
        number=0,
        context=PROMPT + NEW,
        rows=ROWS,
    )
    yield server, server.start()
    server.stop()


def test_without_the_key_every_route_answers_401(started_server):
    server, _ = started_server
    pool = urllib3.PoolManager(retries=False)
    headers = {"Authorization": f"Bearer {server.key}"}
    files = pool.request("GET", server.url + "/openapi.json", headers=headers).json()["paths"]
    assert files.keys() >= set(DANGEROUS) and len(files) > 40
    for path in files.keys() | UNLISTED:
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
            for wrong_headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": server.key}):
                answer = pool.request(method, server.url + path, headers=wrong_headers, body=b"{}")
                assert answer.status == 401, (method, path, wrong_headers)
    stranger = HttpBackend(server.url, timeout_s=5.0, key="another")
    with pytest.raises(RequestFailed, match="401: it requires another key. Set VLLM_API_KEY"):
        stranger.pause("abort")
    stranger.close()


class UnguardedServer(Server):
    """A server started with only vLLM's own key."""

    def build_command(self, port):
        command = super().build_command(port)
        position = command.index("--middleware")
        return command[:position] + command[position + 2 :]


@pytest.mark.slow
def test_what_vllms_own_key_leaves_open_is_told(started_server, tmp_path, capsys):
    server, guarded_backend = started_server
    check_requires_key(guarded_backend)
    assert capsys.readouterr().err == ""
    server = UnguardedServer(
        VllmConfig(python=PYTHON), CFG, work=tmp_path, number=1, context=PROMPT + NEW, rows=ROWS
    )
    backend = server.start()
    stranger = HttpBackend(server.url, timeout_s=20.0)
    with pytest.raises(RequestFailed, match="401"):
        stranger.max_context()
    assert stranger.loaded_state()[0]["instance"]  # it is as open as the line says
    capsys.readouterr()
    check_requires_key(backend)
    assert capsys.readouterr().err.startswith(f"! {server.url} takes commands without a key")
    stranger.close()
    server.stop()


def test_other_users_see_neither_key_nor_sockets(started_server):
    server, _ = started_server
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    listed = subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
    assert "vllm.entrypoints" in listed and server.key not in listed
    assert server.key not in server.log.read_text()
    code = f"import os, sys; os.setuid({NOBODY}); os.listdir(sys.argv[1])"
    for folder in (server._scratch, f"/proc/{server._process.pid}/fd"):
        result = subprocess.run(
            [sys.executable, "-c", code, folder], capture_output=True, text=True
        )
        assert "PermissionError" in result.stderr


def list_vllm_leftovers():
    """Return what vLLM processes left in shared memory and temporary files; others run
    concurrently.
    """
    temporary = Path(tempfile.gettempdir())
    memory = {
        p for name in ("psm_*", "vllm*") for p in server_processes.SHARED_MEMORY_DIR.glob(name)
    }
    sockets = {p for p in temporary.glob("????????-????-????-????-????????????")}
    return {*memory, *sockets, *temporary.glob("jaxmoe-vllm-*"), *temporary.glob("vllm_dist_*")}


def by_name(group):
    """Its processes, the server first."""
    files = {
        pid: Path(f"/proc/{pid}/comm").read_text()
        for pid in sorted(server_processes.list_group_members(group))
    }
    return [pid for pid, name in files.items() if "VLLM" in name or pid == group]


ANOTHER = pytest.mark.slow  # a start and 20 seconds of silence each


@pytest.mark.parametrize(
    "process",
    [
        pytest.param(0, id="server", marks=ANOTHER),
        pytest.param(1, id="engine"),
        pytest.param(2, id="worker", marks=ANOTHER),
    ],
)
def test_a_hanging_server_is_noticed_within_30_seconds(started_server, process):
    server, backend = started_server
    if not server.is_alive() or server._heartbeat.hung:
        backend = server.start()
    victims = by_name(server._process.pid)
    ended, body = [], request_body(SampleRequest([1, 2], 1, NEW, 0, Sampling(NEW, ())))

    def send_request():
        try:
            while True:
                backend.generate(body)  # all three are needed for it
        except RequestFailed as error:
            ended.append((time.monotonic(), str(error)))

    thread = threading.Thread(target=send_request)
    thread.start()
    time.sleep(4)
    assert not ended
    os.kill(victims[min(process, len(victims) - 1)], signal.SIGSTOP)
    start = time.monotonic()
    thread.join(60)
    before = time.monotonic()
    server.stop()
    print(f"found after {ended[0][0] - start:.1f} s, ended in {time.monotonic() - before:.1f} s")
    assert ended[0][0] - start < 25 and time.monotonic() - start < 30
    assert "vLLM 0 hangs" in ended[0][1]


@pytest.mark.timeout(600 + 120 * KILLS)  # a start each
def test_killed_servers_leave_no_segment_process_or_file(tmp_path):
    server = Server(
        VllmConfig(python=PYTHON), CFG, work=tmp_path, number=0, context=PROMPT + NEW, rows=ROWS
    )
    before = list_vllm_leftovers()
    for turn in range(KILLS):
        backend = server.start()
        time.sleep(0.5)
        assert list_vllm_leftovers() > before
        group = server._process.pid
        victims = by_name(group)
        for victim in victims if turn % 4 == 3 else [victims[min(turn % 4, len(victims) - 1)]]:
            os.kill(victim, signal.SIGKILL)
        time.sleep(2.0)
        backend.close()
        server.stop()
        assert list_vllm_leftovers() <= before
        deadline = time.monotonic() + 5  # whoever adopted them may take its time
        while server_processes.list_group_members(group) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not server_processes.list_group_members(group)
