# SPDX-License-Identifier: Apache-2.0
"""A judge for tests: a real HTTP server with OpenAI's chat completions, which may misbehave."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Request:
    """What the judge received: the texts, and the words that this request has for a verdict."""

    fields: dict[str, Any]
    headers: dict[str, str]
    rules: str
    content: str
    yes: str
    no: str

    @property
    def answer(self) -> str:
        match = re.search(r"\nANSWER (\w+)\n(.*)\nEND OF ANSWER \1\n", self.content, re.S)
        assert match
        return match[2]


@dataclass
class JudgeServer:
    """The url, the requests so far, and how many were answered at the same time at most."""

    url: str
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def run_judge(reply) -> Iterator[JudgeServer]:
    """A server whose reply(request) is a text, (status, body), or a number of seconds to hang."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_POST(self):
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            rules, content = (message["content"] for message in fields["messages"])
            yes, no = re.findall(r"only the word (\w+)", rules)
            request = Request(fields, dict(self.headers), rules, content, yes, no)
            with server.lock:
                server.requests.append(request)
                server.at_once += 1
                server.most_at_once = max(server.most_at_once, server.at_once)
            answer = reply(request)
            if isinstance(answer, float):
                time.sleep(answer)
                answer = "late"
            with server.lock:
                server.at_once -= 1
            if isinstance(answer, str):
                answer = 200, json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
            status, body = answer
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request, client_address):
            pass  # clients leave before a late or long reply

    http_server = Server(("127.0.0.1", 0), Handler)
    http_server.daemon_threads = True
    server = JudgeServer(f"http://127.0.0.1:{http_server.server_port}/v1")
    thread = threading.Thread(target=http_server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        http_server.shutdown()
        thread.join()
        http_server.server_close()
