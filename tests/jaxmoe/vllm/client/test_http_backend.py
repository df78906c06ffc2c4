# SPDX-License-Identifier: Apache-2.0
"""Connections to a server: kept while they are fresh, made anew when the server may drop them."""

import threading
import time
from http.server import ThreadingHTTPServer

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.http_engine import http_client
from jaxmoe.vllm.client import http_backend
from jaxmoe.vllm.client.http_backend import HttpBackend
from tests.jaxmoe.vllm.quiet_handler import QuietHandler

SERVER_IDLE_S = 0.5  # by a server that forgets


@pytest.fixture
def server():
    """Its connections die without a word once they idle, as if the word were under way."""

    class Handler(QuietHandler):
        def do_GET(self):
            start, idle = time.monotonic(), getattr(self, "last", None)
            if idle is not None and start - idle > SERVER_IDLE_S:
                self.close_connection = True
                return
            self.last = start
            connections.add(self.client_address)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    connections = set()
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{http.server_address[1]}", connections
    http.shutdown()
    http.server_close()


def test_idle_connections_close_before_the_server_drops_them(server, monkeypatch):
    url, connections = server
    monkeypatch.setattr(http_client, "MAX_IDLE_S", 0.6 * SERVER_IDLE_S)
    backend = HttpBackend(url, timeout_s=5.0)
    for _ in range(5):
        backend.check_health()
    assert len(connections) == 1
    time.sleep(1.2 * SERVER_IDLE_S)
    backend.check_health()
    assert len(connections) == 2
    backend.close()


def test_closing_while_threads_connect_ends_them_all(server):
    url, _ = server
    for _ in range(3):
        backend = HttpBackend(url, timeout_s=5.0)
        ended = []

        def send_requests(backend=backend, ended=ended):
            try:
                while True:
                    backend.check_health()
            except http_backend.RequestFailed as error:
                ended.append(error)

        threads = [threading.Thread(target=send_requests) for _ in range(16)]
        for thread in threads:
            thread.start()
        backend.close()
        for thread in threads:
            thread.join(5)
        assert len(ended) == 16


def test_the_key_of_running_servers_is_the_environments(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    monkeypatch.delenv("JAXMOE_VLLM_API_KEY", raising=False)
    assert http_backend.read_api_key() == "theirs"
    monkeypatch.setenv("JAXMOE_VLLM_API_KEY", "ours")
    assert http_backend.read_api_key() == "ours"
    monkeypatch.setenv("JAXMOE_VLLM_API_KEY", "ours\r\nX: y")
    with pytest.raises(ConfigError, match="JAXMOE_VLLM_API_KEY must be printable ASCII"):
        http_backend.read_api_key()
    monkeypatch.delenv("JAXMOE_VLLM_API_KEY")
    monkeypatch.delenv("VLLM_API_KEY")
    assert http_backend.read_api_key() == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "[::1]", "localhost"])
def test_what_counts_as_this_machine(host):
    assert http_backend._is_loopback(f"http://{host}:8000/at")


@pytest.mark.parametrize("host", ["10.0.0.7", "[fe80::1]", "gpu7.lan", "localhost.lan"])
def test_what_counts_as_another_machine(host):
    assert not http_backend._is_loopback(f"http://{host}:8000/at")
