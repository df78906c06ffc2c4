# SPDX-License-Identifier: Apache-2.0
"""A vLLM for tests that scores prompts by a formula, over HTTP, and may misbehave.

The shapes are those of vLLM 0.19's /v1/models, /tokenize and /v1/completions.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from jaxmoe.data.tokenizer import ByteTokenizer
from tests.jaxmoe.vllm.quiet_handler import QuietHandler

MODEL = "teacher-model"


def formula(tokens):
    """Log-prob of each token, from the token and the one before it."""
    return [-0.1 - (3 * a + 5 * b) % 7 / 2 for a, b in zip([0, *tokens[:-1]], tokens, strict=True)]


def completion(tokens):
    """The answer to a prompt of tokens."""
    rows = [
        {str(t): {"logprob": p, "rank": 1, "decoded_token": "x"}}
        for t, p in zip(tokens, formula(tokens), strict=True)
    ]
    choice = {
        "index": 0,
        "text": "x",
        "finish_reason": "length",
        "prompt_logprobs": [None, *rows[1:]],
    }
    return {"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice]}


def edit(change):
    """A fault that changes the first choice, or the answer if it returns one."""

    def answer(tokens):
        body = completion(tokens)
        return change(body, body["choices"][0]) or body

    return answer


def replace_last(value):
    def change(body, choice):
        (entry,) = choice["prompt_logprobs"][-1].values()
        entry["logprob"] = value

    return edit(change)


def hang(tokens):
    time.sleep(3.0)
    return completion(tokens)


FAULTS = {
    "above 0": (replace_last(0.5), "must be a log-prob"),
    "NaN": (replace_last(float("nan")), "not a finite number"),
    "missing": (replace_last(-9999.0), "must be a log-prob"),
    "a text": (replace_last("-1.0"), "must be a finite number"),
    "short": (edit(lambda b, c: c["prompt_logprobs"].pop() and None), "must have .* entries"),
    "no log-probs": (
        edit(lambda b, c: c.update(prompt_logprobs=None)),
        "prompt_logprobs must have",
    ),
    "other tokens": (
        edit(
            lambda b, c: c.update(
                prompt_logprobs=[None]
                + [{"9999": {"logprob": -1.0}}] * (len(c["prompt_logprobs"]) - 1)
            )
        ),
        "must have token",
    ),
    "other model": (edit(lambda b, c: b.update(model="another")), "one choice of teacher-model"),
    "no choice": (edit(lambda b, c: b.update(choices=[])), "one choice of teacher-model"),
    "slow": (hang, "no complete response"),
    "error": (lambda tokens: 500, "answered 500"),
}


@contextmanager
def run_teacher(answer=completion, *, tokenize=None, context=100) -> Iterator[str]:
    """Yield the URL of a server whose answer(tokens) is a response's JSON, or a status."""
    encode = tokenize or ByteTokenizer().encode

    class Handler(QuietHandler):
        def reply(self, body):
            status, body = (body, {}) if isinstance(body, int) else (200, body)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.reply({"data": [{"id": MODEL, "max_model_len": context}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                assert body["add_special_tokens"] is False
                self.reply({"tokens": encode(body["prompt"]), "count": 1})
                return
            assert body["prompt_logprobs"] == 0 and body["max_tokens"] == 1
            self.reply(answer(body["prompt"]))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
