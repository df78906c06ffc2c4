# SPDX-License-Identifier: Apache-2.0
"""A proxy before a server, that spoils chosen answers to /inference/v1/generate."""

import json
import threading
from http.server import ThreadingHTTPServer

import urllib3

from tests.jaxmoe.vllm.quiet_handler import QuietHandler


def too_few(answer):
    answer["choices"].pop()


def too_few_tokens(answer):
    answer["choices"][0]["token_ids"].pop()


def no_number(answer):
    answer["choices"][-1]["logprobs"]["content"][0]["logprob"] = None


def outside(answer):
    choice = answer["choices"][0]
    choice["token_ids"][-1] = choice["logprobs"]["content"][-1]["token_id"] = 10**6


def unlabelled(answer):
    answer["choices"][0]["weight_versions"] = None


def old_label(answer):
    for span in answer["choices"][0]["weight_versions"] or []:
        span["version"] = "default"


SPOIL = {
    f.__name__: f for f in (too_few, too_few_tokens, no_number, outside, unlabelled, old_label)
}
KINDS = ("500", "cut", "closed", "silent", "no_json", *SPOIL)


class Proxy:
    """`faults` is taken from the left, one a request; None lets a request through."""

    def __init__(self, upstream, keys=None):
        self.upstream = upstream
        self.keys = dict(keys or {})  # of the servers that want one, by URL
        self.faults: list[str | None] = []
        self.spoilt: list[str] = []
        self.lock, self.closed = threading.Lock(), threading.Event()
        pool = urllib3.PoolManager(maxsize=64, retries=False)
        outer = self

        class Handler(QuietHandler):
            def do_GET(self):
                self.pass_on("GET")

            def do_POST(self):
                self.pass_on("POST")

            def pass_on(self, method):
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length) or None
                kind = outer.next_fault() if self.path == "/inference/v1/generate" else None
                if kind == "500":
                    return self.send(500, b'{"error": "injected"}')
                if kind == "silent":
                    outer.closed.wait(60)
                headers = {"Content-Type": "application/json"} if body else {}
                if key := outer.keys.get(outer.upstream):
                    headers["Authorization"] = f"Bearer {key}"
                try:
                    answer = pool.request(
                        method, outer.upstream + self.path, body=body, headers=headers
                    )
                except urllib3.exceptions.HTTPError:
                    self.close_connection = True
                    return
                data = answer.data
                if kind == "closed" or kind == "silent":
                    self.close_connection = True
                    return
                if kind == "no_json":
                    data = data[: len(data) // 2]
                if kind in SPOIL and answer.status == 200:
                    answer = json.loads(data)
                    SPOIL[kind](answer)
                    data = json.dumps(answer).encode()
                self.send(answer.status, data, cut=kind == "cut")

            def send(self, status, data, cut=False):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if cut else data)
                if cut:
                    self.wfile.flush()
                    self.close_connection = True

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass

        self.pool = pool
        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def next_fault(self):
        with self.lock:
            kind = self.faults.pop(0) if self.faults else None
            if kind is not None:
                self.spoilt.append(kind)
            return kind

    def close(self):
        self.closed.set()
        self.http.shutdown()
        self.http.server_close()
        self.pool.clear()
