# SPDX-License-Identifier: Apache-2.0
"""Another kind of server is one backend file: the pool samples, restores and verifies it as well.

The server is a stand-in over real HTTP, with SGLang's routes and JSON.
"""

import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from jaxmoe.checkpoint.hf import load_params
from jaxmoe.http_engine import server_pool
from jaxmoe.http_engine.backend import Backend
from jaxmoe.http_engine.check_request import RequestLimits
from jaxmoe.http_engine.pooled_engine import PooledEngine
from jaxmoe.http_engine.probe import Probe, WeightSyncError
from jaxmoe.http_engine.replica import Replica
from jaxmoe.records import Sampling
from tests.jaxmoe.http_engine.sglang_backend import SglangBackend
from tests.jaxmoe.vllm.stand_in import Row, StandIn
from tests.jaxmoe.vllm.vllm_cases import CFG, NEW, OPS, PROMPT, check_rollouts, prompts, weights

PATHS = {
    "/generate",
    "/health",
    "/get_server_info",
    "/pause_generation",
    "/update_weights_from_disk",
    "/continue_generation",
}


class SglangStandIn(StandIn):
    """SGLang's routes over this project's own forward."""

    def start(self, folder=None):
        self.paths = set()
        super().start(folder)

    def answer(self, request, body):
        self.paths.add(urlsplit(request.path).path)
        super().answer(request, body)

    def do_get_server_info(self, body, query):
        info = {"instance": self.instance, "weight_version": self.label or "default"}
        return info | {"context_length": self.context, "max_running_requests": 4}

    def do_pause_generation(self, body, query):
        return self.do_pause({}, {"mode": "wait"})

    def do_continue_generation(self, body, query):
        return self.do_resume({}, {})

    def do_update_weights_from_disk(self, body, query):
        assert self.paused
        if "ignores" not in self.faults:
            self.params = load_params(Path(body["model_path"]), self.cfg, "float32")
        self.label = body["weight_version"]
        return {"success": True}

    def do_generate(self, body, query):
        with self.state:
            self.state.wait_for(lambda: not self.paused)
            params, label = self.params, self.label or "default"
        results = []
        for tokens, sampling in zip(body["input_ids"], body["sampling_params"], strict=True):
            row = Row(sampling["sampling_seed"], tokens)
            named = sampling | {
                "max_tokens": sampling["max_new_tokens"],
                "top_k": max(0, sampling["top_k"]),
            }
            while not row.finish:
                self.step(params, label, [row], named, set(sampling["stop_token_ids"]))
            meta = {
                "finish_reason": {"type": row.finish},
                "weight_version": label,
                "output_token_logprobs": [
                    [x, t, None] for x, t in zip(row.logp, row.tokens, strict=True)
                ],
            }
            if body.get("logprob_start_len") == 0:
                entries = zip(self.prompt_logprobs(params, tokens), tokens, strict=True)
                logps = [entry and entry[str(t)]["logprob"] for entry, t in entries]
                meta["input_token_logprobs"] = [
                    [x, t, None] for x, t in zip(logps, tokens, strict=True)
                ]
            results.append({"output_ids": row.tokens, "meta_info": meta})
        return results


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(server_pool, "MIN_RECONNECT_S", 0.05)
    servers = [SglangStandIn(CFG) for _ in range(2)]
    yield servers
    for server in servers:
        server.crash()


@pytest.fixture
def engine(two, tmp_path):
    limits = RequestLimits(PROMPT, NEW, PROMPT + NEW)
    engine = PooledEngine(CFG, OPS, limits=limits, max_rows=4, retries=2, weights_dir=str(tmp_path))
    backends = [SglangBackend(server.url, timeout_s=20.0) for server in two]
    assert all(isinstance(backend, Backend) for backend in backends)
    context = min(backend.max_context() for backend in backends)
    probe = Probe(CFG, bound=1e-4, context=context)
    engine.serve(
        [
            Replica(
                backend,
                cfg=CFG,
                probe=probe,
                retries=2,
                report=engine.incidents.append,
                check=SglangBackend.check_health,
            )
            for backend in backends
        ]
    )
    yield engine
    engine.close()
    assert not list(tmp_path.iterdir())  # weight files are gone


def sample(engine, version, samples=2):
    out = engine.generate(prompts(4), Sampling(NEW, ()), seed=3, samples=samples)
    check_rollouts(out, prompts(4), samples, version)


def wait_for_incident(engine, text):
    deadline = time.monotonic() + 20
    while not any(text in incident for incident in engine.incidents):
        assert time.monotonic() < deadline, engine.incidents
        time.sleep(0.02)


def test_another_server_samples_each_version(two, engine):
    for version in (1, 2):
        engine.load(weights(version), version)
        sample(engine, version)
    assert set().union(*(server.paths for server in two)) <= PATHS and not engine.incidents


def test_another_server_that_dies_comes_back_current(two, engine):
    engine.load(weights(1), 1)
    two[1].crash()
    sample(engine, 1)
    wait_for_incident(engine, "is unavailable")
    engine.load(weights(2), 2)
    sample(engine, 2)
    two[1].start()
    wait_for_incident(engine, "is reconnected, with weights of version 2")
    assert two[1].label == two[0].label
    sample(engine, 2)


def test_another_server_must_hold_what_was_sent(two, engine):
    engine.load(weights(1), 1)
    two[1].faults.add("ignores")
    with pytest.raises(WeightSyncError, match="must agree with the trainer on a probe"):
        engine.load(weights(2), 2)
