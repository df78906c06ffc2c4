# SPDX-License-Identifier: Apache-2.0
"""A client of hostile.py in a process of its own, whose memory can be measured.

`python hostile_client.py URL KEY TIMEOUT_S`, lines of "ROUTE: TRICK" on standard input.
"""

import json
import sys
import time

from hostile import TRICKS

from jaxmoe.config import ModelConfig
from jaxmoe.vllm.client.http_backend import HttpBackend
from jaxmoe.vllm.client.responses import ExpectedResponse, parse_completions


def peak_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux tells the peak of a process")


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def queued_seconds():
    """Seconds for which this thread has waited for a processor so far."""
    return int(open("/proc/thread-self/schedstat").read().split()[1]) / 1e9


def main():
    """One line of JSON for each trick: seconds, bytes above the start, error, its text.

    Seconds in the queue for a processor do not count.
    """
    cfg = ModelConfig(
        vocab_size=97,
        d_model=64,
        n_layers=2,
        n_q_heads=4,
        n_kv_heads=2,
        head_dim=32,
        n_experts=6,
        experts_per_token=2,
        d_expert=32,
        sliding_window=9,
        dtype="float32",
    )
    url, key, timeout_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    body = {"token_ids": [3, 4], "sampling_params": {"n": 1, "max_tokens": 1}}
    for line in sys.stdin.read().splitlines():
        route, name = line.split(": ", 1)
        backend = HttpBackend(
            url + "/" + str(list(TRICKS).index(name)), timeout_s=timeout_s, key=key
        )
        forget_peak()
        before, kind, text = peak_bytes(), "", ""
        start, queued = time.monotonic(), queued_seconds()
        try:
            if route == "generate":
                expected = ExpectedResponse(2, 1, 1, frozenset())
                parse_completions(backend.generate(body), expected, cfg)
            elif route == "loaded_state":
                backend.loaded_state()
            else:
                backend.max_context()
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        seconds = time.monotonic() - start - (queued_seconds() - queued)
        backend.close()
        report = [line, seconds, peak_bytes() - before, kind, text]
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
