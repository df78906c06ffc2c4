# SPDX-License-Identifier: Apache-2.0
"""A server that breaks HTTP, JSON and patience in every way known here, on plain sockets.

TRICKS are what it does with the connection of one request; hostile_client.py asks for each.
"""

import base64
import gzip
import http.client
import json
import socket
import threading
import time
import zlib
from urllib.parse import urlsplit

KEY = "k3y-0f-the-run-7b1c5d9e2f4a6088"
FLOOD = 1 << 30  # bytes, of what should have been refused long before
PIECE = b"x" * (1 << 16)


def response(body, status="200 OK", headers=(), length=None):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def drip(data, pause=0.05):
    def trick(conn, request):
        for i in range(len(data)):
            conn.sendall(data[i : i + 1])
            time.sleep(pause)

    return trick


def send(*pieces):
    def trick(conn, request):
        for piece in pieces:
            conn.sendall(piece)

    return trick


def flood(head, piece):
    def trick(conn, request):
        conn.sendall(head)
        sent = 0
        while sent < FLOOD:
            conn.sendall(piece)
            sent += len(piece)

    return trick


def wait(conn, request):
    time.sleep(30)


def hold(data):
    """Send this and then keep the connection open, in silence."""

    def trick(conn, request):
        conn.sendall(data)
        time.sleep(30)

    return trick


def reset(conn, request):
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def echo(encode, status="500 Internal Server Error"):
    """A debug page: the request's head, as some proxies print it."""

    def trick(conn, request):
        conn.sendall(response(encode(request), status))

    return trick


def answer(text):
    return send(response(text if isinstance(text, bytes) else text.encode()))


def choice(**fields):
    tokens = [{"token_id": 1, "logprob": -1.0}]
    good = {
        "index": 0,
        "token_ids": [1],
        "finish_reason": "length",
        "logprobs": {"content": tokens},
        "weight_versions": [{"version": "r:1", "start": 0, "end": 1}],
        "routed_experts": None,
    }
    return json.dumps({"choices": [good | fields]})


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
BOMB = gzip.compress(b"[" + b"0," * (1 << 24) + b"0]", 9)
HEAD = response(b"")

TRICKS = {
    "slow head": drip(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 600),
    "slow body": drip(response(b" " * 600)),
    "slow chunks": drip(CHUNKED + b"1\r\n \r\n" * 100),
    "slow chunk size": drip(CHUNKED + b"0" * 600),
    "slow trailer": drip(CHUNKED + b"0\r\n" + b"X: y\r\n" * 100),
    "slow interim responses": drip(b"HTTP/1.1 100 Continue\r\n\r\n" * 30),
    "silence": wait,
    "silence after the head": hold(OK + b"Content-Length: 9\r\n\r\n"),
    "silence in the body": hold(response(b"{", length=9)),
    "endless body": flood(OK + b"\r\n", PIECE),
    "endless chunks": flood(CHUNKED, b"10000\r\n" + PIECE + b"\r\n"),
    "endless tiny chunks": flood(CHUNKED, b"1\r\n \r\n" * 9999),
    "endless trailer": flood(CHUNKED + b"0\r\n", b"X: y\r\n" * 9999),
    "endless header line": flood(OK + b"X: ", PIECE),
    "endless headers": flood(OK, b"X: y\r\n" * 9999),
    "endless status line": flood(b"HTTP/1.1 200 ", PIECE),
    "endless interim responses": flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 999),
    "endless interim headers": flood(b"HTTP/1.1 100 Continue\r\n", b"X: y\r\n" * 9999),
    "endless error": flood(b"HTTP/1.1 500 No\r\n\r\n", PIECE),
    "endless redirect": flood(b"HTTP/1.1 302 Go\r\nLocation: /\r\n\r\n", PIECE),
    "a length of a petabyte": flood(OK + b"Content-Length: 1000000000000000\r\n\r\n", PIECE),
    "a chunk of a petabyte": flood(CHUNKED + b"38d7ea4c68000\r\n", PIECE),
    "a chunk of -1": flood(CHUNKED + b"-1\r\n", PIECE),
    "a chunk of no number": send(CHUNKED + b"zz\r\n{}"),
    "a chunk size line of 5,000 digits": send(CHUNKED + b"1" * 5000 + b"\r\n{}"),
    "a length of -5": send(response(b"{}", length=-5)),
    "a length of 5,000 digits": hold(response(b"{}", length="1" * 5000)),
    "two lengths": send(response(b"{}", headers=["Content-Length: 9"])),
    "too long a length": send(response(b"{}", length=99)),
    "too short a length": send(response(b'{"choices": []}', length=3)),
    "gzip": send(response(gzip.compress(b"{}"), headers=["Content-Encoding: gzip"])),
    "gzip bomb": send(response(BOMB, headers=["Content-Encoding: gzip"])),
    "gzip bomb as an error": send(response(BOMB, "500 No", headers=["Content-Encoding: gzip"])),
    "gzip bomb of a redirect": send(
        response(BOMB, "302 Go", headers=["Content-Encoding: gzip", "Location: /"])
    ),
    "gzip in the transfer": send(OK + b"Transfer-Encoding: gzip\r\n\r\n" + gzip.compress(b"{}")),
    "deflate twice": send(
        response(zlib.compress(b"{}"), headers=["Content-Encoding: deflate, deflate"])
    ),
    "nesting 100,000 deep": answer("[" * 100_000 + "]" * 100_000),
    "nesting of objects": answer('{"a":' * 100_000 + "1" + "}" * 100_000),
    "nesting 900 deep": answer("[" * 900 + "]" * 900),
    "a million values": answer("[" + "{}," * 340_000 + "{}]"),
    "a whole number of 400 digits": answer(choice(token_ids=[int("7" * 400)])),
    "a whole number of 5,000 digits": answer('{"choices": [' + "7" * 5000 + "]}"),
    "a log-prob of 400 digits": answer(
        choice(logprobs={"content": [{"token_id": 1, "logprob": -int("7" * 400)}]})
    ),
    "a span that ends at -10^400": answer(
        choice(weight_versions=[{"version": "r:1", "start": 0, "end": -(10**400)}])
    ),
    "a span that ends at 10^17": answer(
        choice(weight_versions=[{"version": "r:1", "start": 0, "end": 10**17}] * 2)
    ),
    "a log-prob of NaN": answer(choice().replace("-1.0", "NaN")),
    "a log-prob of Infinity": answer(choice().replace("-1.0", "-Infinity")),
    "a log-prob of -1e999": answer(choice().replace("-1.0", "-1e999")),
    "no object": answer("5"),
    "null": answer("null"),
    "choices of a wrong type": answer('{"choices": {"0": {}}}'),
    "fields of a wrong type": answer(choice(index=[], token_ids={}, finish_reason=3)),
    "an index of true": answer(choice(index=True)),
    "experts of a wrong type": answer(choice(routed_experts={"a": 1})),
    "experts of a huge shape": answer(
        choice(
            routed_experts=base64.b64encode(
                b"\x93NUMPY\x01\x00\x76\x00"
                + b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d, 0), }" % 10**30
                + b" " * 60
            ).decode()
        )
    ),
    "labels of a wrong type": answer(choice(weight_versions=[[0]])),
    "not UTF-8": answer(b'{"choices": "\xff\xfe"}'),
    "UTF-16": answer(choice().encode("utf-16")),
    "half of a body": answer(choice()[:40]),
    "no body": answer(""),
    "no content": send(b"HTTP/1.1 204 No Content\r\n\r\n"),
    "no HTTP": send(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a status that is no number": send(b"HTTP/1.1 abc OK\r\n\r\n"),
    "a status of 99999": send(b"HTTP/1.1 99999 OK\r\n\r\n"),
    "a superscript status": send("HTTP/1.1 2²0 OK\r\n\r\n".encode("latin1")),
    "another version": send(b"HTTP/9.9 200 OK\r\n\r\n{}"),
    "switching protocols": send(b"HTTP/1.1 101 Go\r\nUpgrade: x\r\n\r\n"),
    "early hints": send(b"HTTP/1.1 103 Hints\r\n\r\n" * 99),
    "broken headers": send(OK + b"no colon\r\n: \r\n\x00\xff: \x1b[2J\r\n folded\r\n\r\n{}"),
    "a redirect": send(
        response(b"", "302 Go", headers=["Location: http://127.0.0.1:1/", "Retry-After: 999"])
    ),
    "a redirect to a file": send(response(b"", "307 Go", headers=["Location: file:///etc/passwd"])),
    "retry later": send(response(b"", "503 No", headers=["Retry-After: 9999"])),
    "closed at once": lambda conn, request: None,
    "reset": reset,
    "closed in the head": send(b"HTTP/1.1 200"),
    "closed in the body": send(response(b'{"choi', length=90)),
    "junk behind the body": hold(response(b"{}") + b"HTTP/1.1 200 OK\r\n\r\njunk" * 99),
    "the key in an error": echo(lambda r: r),
    "the key in JSON": echo(lambda r: json.dumps({"request": r.decode("latin1")}).encode()),
    "the key in escapes": echo(lambda r: "".join(f"\\u{b:04x}" for b in r).encode()),
    "the key in HTML": echo(lambda r: "".join(f"&#{b};" for b in r).encode()),
    "the key in a URL": echo(lambda r: "".join(f"%{b:02X}" for b in r).encode()),
    "the key in base64": echo(base64.b64encode),
    "the key in hexadecimal": echo(lambda r: r.hex().encode()),
    "the key in UTF-16": echo(lambda r: r.decode("latin1").encode("utf-16-le")),
    "the key in spaces": echo(lambda r: b" ".join(bytes([b]) for b in r)),
    "the key in capitals": echo(lambda r: r.upper()),
    "the key backwards": echo(lambda r: r[::-1]),
    "the key cut off": echo(lambda r: r[: r.index(KEY.encode()) + 12] if KEY.encode() in r else r),
    "the key in a result": echo(lambda r: json.dumps([r.decode("latin1")]).encode(), "200 OK"),
    "the key in choices": echo(
        lambda r: json.dumps({"choices": [{"index": r.decode("latin1")}]}).encode(), "200 OK"
    ),
    "the key in a label": echo(
        lambda r: choice(
            weight_versions=[{"version": r.decode("latin1"), "start": 0, "end": 1}]
        ).encode(),
        "200 OK",
    ),
    "the key in the status": lambda conn, r: conn.sendall(
        b"HTTP/1.1 " + r.replace(b"\r\n", b" ") + b"\r\n\r\n"
    ),
    "the key as a response": lambda conn, r: conn.sendall(r),
    "the key in broken headers": lambda conn, r: conn.sendall(
        OK + b"no colon " + r.replace(b"\r\n", b" ") + b"\r\n\r\n{"
    ),
}


class HostileServer:
    """Without `upstream`, a path that begins with /N plays trick number N.

    With `upstream`, the trick `armed` is played on /inference/v1/generate; the rest is passed on.
    """

    def __init__(self, upstream=None):
        self.upstream, self.armed, self.n_tricks, self.tricks = upstream, "", 0, TRICKS
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                conn, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(conn,), daemon=True).start()

    def serve(self, conn):
        try:
            with conn, conn.makefile("rb") as file:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = file.readline()
                    if not line:
                        return
                    head += line
                lower = head.lower()
                length = 0
                if b"content-length:" in lower:
                    length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
                body = file.read(length)
                method, path = head.decode("latin1").split(" ")[:2]
                name = self.armed if path == "/inference/v1/generate" else ""
                if self.upstream is None:
                    name = list(self.tricks)[int(path.split("/")[1])]
                if name:
                    self.n_tricks += 1
                    self.tricks[name](conn, head + body)
                else:
                    conn.sendall(self.pass_on(method, path, body))
        except OSError:
            pass  # the client had enough

    def pass_on(self, method, path, body):
        host = str(urlsplit(self.upstream).netloc)
        client = http.client.HTTPConnection(host, timeout=30)
        try:
            client.request(method, path, body or None, {"Content-Type": "application/json"})
            answer = client.getresponse()
            return response(answer.read(), f"{answer.status} -", ["Connection: close"])
        finally:
            client.close()

    def close(self):
        self.socket.close()
