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


def lists(tokens, top_k):
    """The likeliest words at each token, likeliest first, and their log-probs: a half, a quarter,
    …; none is a token of the prompt, but for the likeliest at even tokens."""
    ids = [[t if i % 2 == 0 else 200, *range(201, 200 + top_k)] for i, t in enumerate(tokens)]
    return ids, [[-0.7 * (k + 1) for k in range(top_k)] for _ in tokens]


def list_completion(tokens, top_k):
    """The answer to a prompt of tokens with the likeliest words at each."""
    body = completion(tokens)
    rows = body["choices"][0]["prompt_logprobs"]
    for t, row, ids, logps in list(zip(tokens, rows, *lists(tokens, top_k), strict=True))[1:]:
        # vLLM writes the prompt's token first, with its rank; among the likeliest it is theirs.
        row[str(t)]["rank"] = 40
        row.update(
            (str(word), {"logprob": logp, "rank": k, "decoded_token": "x"})
            for k, (word, logp) in enumerate(zip(ids, logps, strict=True), start=1)
        )
    return body


def edit_last_list(change):
    """A fault of the entry of the second likeliest word at the last token, or of its row."""

    def answer(tokens, top_k):
        body = list_completion(tokens, top_k)
        row = body["choices"][0]["prompt_logprobs"][-1]
        change(row, row["201"])
        return body

    return answer


LIST_FAULTS = {
    "a word less": (lambda row, entry: row.pop("201"), "by rank"),
    "a word more": (lambda row, entry: row.update({"7": {"logprob": -9, "rank": 50}}), "by rank"),
    "two of a rank": (lambda row, entry: entry.update(rank=1), "by rank"),
    "no rank": (lambda row, entry: entry.update(rank=None), "a rank and a log-prob"),
    "rank true": (lambda row, entry: entry.update(rank=True), "by rank"),
    "rank 0": (lambda row, entry: entry.update(rank=0), "by rank"),
    "outside": (lambda row, entry: row.update({"258": row.pop("201")}), "ids below 258"),
    "negative": (lambda row, entry: row.update({"-1": row.pop("201")}), "ids below 258"),
    "a text": (lambda row, entry: row.update({"a": row.pop("201")}), "an id, a rank"),
    "twice": (lambda row, entry: row.update({"0202": row.pop("201")}), "ids below 258"),
    "long": (lambda row, entry: row.update({"9" * 5000: entry}), "an id, a rank"),
    "no entry": (lambda row, entry: row.update({"201": -1.0}), "an id, a rank"),
    "above 0": (lambda row, entry: entry.update(logprob=0.5), "must be a log-prob"),
    "NaN": (lambda row, entry: entry.update(logprob=float("nan")), "not a finite number"),
    "missing": (lambda row, entry: entry.update(logprob=-9999.0), "must be a log-prob"),
    "rising": (lambda row, entry: entry.update(logprob=-0.1), "falling log-probs"),
    "too much": (
        lambda row, entry: [x.update(logprob=-0.7) for x in row.values()],
        "add up to at most 1",
    ),
}
LIST_FAULTS = {name: (edit_last_list(f), message) for name, (f, message) in LIST_FAULTS.items()}


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
def run_teacher(answer=completion, *, tokenize=None, context=100, top_k=0) -> Iterator[str]:
    """Yield the URL of a server whose answer(tokens), or answer(tokens, top_k) if it lists words,
    is a response's JSON, or a status."""
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
            assert body["prompt_logprobs"] == top_k and body["max_tokens"] == 1
            self.reply(answer(body["prompt"], *([top_k] if top_k else [])))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
