# SPDX-License-Identifier: Apache-2.0
"""Whatever a server sends: RequestFailed in bounded time and memory, and the key in no message."""

import base64
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hostile import KEY, TRICKS, HostileServer
from stand_in import StandIn
from vllm_cases import CFG, NEW, check_rollouts, open_engine, prompts, weights

from jaxmoe.config import VllmConfig
from jaxmoe.http_engine.redact import HIDDEN_TEXT, Key
from jaxmoe.records import Sampling
from jaxmoe.vllm.client.http_backend import HttpBackend, max_body_bytes_per_token

TIMEOUT_S = 0.6
MEMORY = 200 << 20
LANES = 3  # processes at once: most of them wait
TESTS_DIR = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def server():
    hostile_server = HostileServer()
    yield hostile_server
    hostile_server.close()


def run_client(url, lines):
    """(seconds, bytes, error, text) by line, and what the clients wrote to stderr."""
    reports, errors = {}, []

    def lane(lane_lines):
        command = [sys.executable, str(TESTS_DIR / "hostile_client.py"), url, KEY, str(TIMEOUT_S)]
        result = subprocess.run(
            command, input="\n".join(lane_lines), capture_output=True, text=True
        )
        errors.append(result.stderr)
        for answer in result.stdout.splitlines():
            line, *report = json.loads(answer)
            reports[line] = report

    threads = [threading.Thread(target=lane, args=(lines[i::LANES],)) for i in range(LANES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reports, "".join(errors)


def test_hostile_answers_fail_in_bounded_time_and_memory(server):
    lines = [f"generate: {name}" for name in TRICKS]
    for i, route in enumerate(("loaded_state", "max_context")):
        lines += [f"{route}: {name}" for name in list(TRICKS)[i::5]]
    reports, errors = run_client(server.url, lines)
    assert errors == ""  # no traceback, no warning
    assert reports.keys() == set(lines)
    for name, (seconds, used, kind, text) in reports.items():
        assert kind == "RequestFailed", (name, kind, text)
        assert seconds <= 2 * TIMEOUT_S, (name, seconds)
        assert used <= MEMORY, (name, used)
        assert len(text) < 700 and text.isprintable(), (name, text)
        lowered = text.lower()
        for form in (KEY, KEY[::-1], KEY[4:12], KEY[-8:], KEY.encode().hex()[:16]):
            assert form.lower() not in lowered, (name, text)
        assert base64.b64encode(KEY.encode()).decode()[:16] not in text, (name, text)


# of each kind one that differs in how it ends: by the clock, a bound, HTTP, JSON, the key
KINDS = (
    "slow body",
    "endless chunks",
    "gzip bomb",
    "nesting 100,000 deep",
    "reset",
    "the key in an error",
)


def test_hostile_answers_are_incidents_and_requests_are_rerouted(tmp_path, monkeypatch):
    """A server named by its URL that always spoils its answers: the other one gives all of them."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    good, upstream = StandIn(CFG), StandIn(CFG)
    hostile = HostileServer(upstream.url)
    engine = open_engine(f"{hostile.url},{good.url}", tmp_path, request_timeout_s=4.0)
    try:
        engine.load(weights(1), 1)
        requested = prompts(3)
        for turn, trick in enumerate(KINDS):
            hostile.armed, hostile.n_tricks, before = trick, 0, len(engine.incidents)
            check_rollouts(
                engine.generate(requested, Sampling(NEW, ()), seed=turn), requested, 1, 1
            )
            assert hostile.n_tricks and len(engine.incidents) > before, trick
        text = "\n".join(engine.incidents)
        assert hostile.url in text and HIDDEN_TEXT in text and KEY not in text
    finally:
        engine.close()
        hostile.close()
        for server in (good, upstream):
            server.crash()


def test_received_bytes_are_bounded_by_the_request():
    """A long answer passes where its tokens explain it, and not where they do not."""
    per_token = max_body_bytes_per_token(CFG)
    text = json.dumps({"choices": ["x" * 4_000_000]}).encode()
    trick = {
        "long": lambda conn, request: conn.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text
        )
    }
    server = HostileServer()
    server.tricks = trick
    backend = HttpBackend(server.url + "/0", timeout_s=5.0, token_bytes=per_token)
    for tokens, passes in ((4_000_000 // per_token, True), (2_000_000 // per_token, False)):
        body = {"token_ids": [], "sampling_params": {"n": 2, "max_tokens": tokens // 2}}
        try:
            assert backend.generate(body)["choices"] and passes
        except Exception as error:
            assert not passes and "a body must have at most" in str(error)
    backend.close()
    server.close()


@pytest.mark.parametrize(
    "text", ["no room for 4096 tokens", "too long", "Internal Server Error", "k3y of the house"]
)
def test_errors_without_the_key_are_shown_unchanged(text):
    assert Key(KEY).redact_text(text) == text
    assert Key("").redact_text(f"Bearer {KEY}") == f"Bearer {KEY}"


def test_a_common_word_as_key_spoils_no_answer():
    answer = json.dumps({"choices": [{"token_ids": [1]}]}).encode()
    assert not Key("token").is_in(answer) and not Key("choices").is_in(answer)
    assert Key("token").is_in(b'"Authorization: Bearer token"')
    assert Key(KEY).is_in(json.dumps({"a": KEY}).replace("k3y", "\\u006b3y").encode())


@pytest.mark.parametrize("start", ["http://me:secret", "http://me:a/secret", "me:secret"])
def test_refusing_a_urls_password_does_not_show_it(start):
    with pytest.raises(Exception, match="must not contain a user name or password") as caught:
        VllmConfig(url=f"{start}@node5:8000")
    assert "secret" not in str(caught.value)
