# SPDX-License-Identifier: Apache-2.0
"""The fault table on vLLM itself: each fault several times, at random moments.

JAXMOE_FAULTS=5 kills a server so often; each kill costs a start of vLLM.
"""

import os
import random
import signal
import subprocess
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from proxy import KINDS, Proxy
from stand_in import StandIn
from vllm_cases import CFG, NEW, PROMPT, PYTHON, ROWS, check_rollouts, open_engine, prompts, weights

from jaxmoe.config import VllmConfig
from jaxmoe.records import Sampling
from jaxmoe.vllm.client.sync import transfer_weights
from jaxmoe.vllm.engine.server import Server
from jaxmoe.weight_sync.files import write_files

pytestmark = pytest.mark.vllm
FREE = Sampling(NEW, ())
KILLS = int(os.environ.get("JAXMOE_FAULTS", "1"))
TIMES = 5


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """A server, and a proxy before it: the engine knows neither."""
    work = tmp_path_factory.mktemp("faults")
    server = Server(
        VllmConfig(python=PYTHON), CFG, work=work, number=0, context=PROMPT + NEW, rows=ROWS
    )
    backend = server.start()
    proxy = Proxy(server.url, {server.url: server.key})
    engine = open_engine(proxy.url, work, request_timeout_s=4.0, retries=8)
    engine.load(weights(1), 1)
    yield engine, proxy, server, backend, work
    engine.close()
    proxy.close()
    backend.close()
    server.stop()


def during(fn, rng):
    timer = threading.Timer(rng.uniform(0.0, 0.12), fn)
    timer.start()
    return timer


def alike(clean, out):
    return all(np.array_equal(a.tokens, b.tokens) for a, b in zip(clean, out, strict=True))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow if k == "silent" else ()) for k in KINDS],  # 20 s
)
def test_a_spoilt_answer(vllm, kind):
    engine, proxy, *_ = vllm
    requested, rng = prompts(8), random.Random(kind)
    clean = engine.generate(requested, FREE, seed=7, samples=2)
    for _ in range(TIMES):
        proxy.spoilt.clear()
        proxy.faults = rng.sample([kind, kind, *[None] * 6], 8)
        out = engine.generate(requested, FREE, seed=7, samples=2)
        assert proxy.spoilt == [kind, kind]
        check_rollouts(out, requested, 2, 1)
        assert alike(clean, out)


def test_a_server_that_hangs(vllm):
    engine, _, server, *_ = vllm
    requested, rng = prompts(8), random.Random(1)
    group = server._process.pid
    for _ in range(TIMES):
        timer = during(lambda: os.killpg(group, signal.SIGSTOP), rng)
        wake = threading.Timer(5.0, os.killpg, (group, signal.SIGCONT))
        wake.start()
        check_rollouts(engine.generate(requested, FREE, seed=8, samples=2), requested, 2, 1)
        timer.join()
        wake.join()


def test_a_server_whose_weights_somebody_changed(vllm):
    engine, _, _, backend, work = vllm
    requested, rng = prompts(8), random.Random(2)
    for turn in range(TIMES):
        intruder = write_files(weights(5), CFG, work, dtype="float32", run="intruder", version=turn)

        def intrude(intruder=intruder):
            transfer_weights(backend, intruder, "keep", lambda: None)

        timer = during(intrude, rng)
        out = engine.generate(requested, FREE, seed=9, samples=2)
        timer.join()
        check_rollouts(out, requested, 2, 1)
        check_rollouts(engine.generate(requested, FREE, seed=9, samples=2), requested, 2, 1)
        intruder.close()


def test_a_server_that_comes_back_with_another_model(vllm):
    engine, proxy, server, *_ = vllm
    small = replace(CFG, vocab_size=89, d_model=32, n_q_heads=2, n_kv_heads=1, n_experts=4)
    intruder = StandIn(small)
    requested, rng = prompts(8), random.Random(3)
    for _ in range(TIMES):
        timer = during(lambda: setattr(proxy, "upstream", intruder.url), rng)
        timer_back = threading.Timer(1.0, setattr, (proxy, "upstream", server.url))
        timer_back.start()
        check_rollouts(engine.generate(requested, FREE, seed=10, samples=2), requested, 2, 1)
        timer.join()
        timer_back.join()
    intruder.crash()


@pytest.mark.slow
def test_a_server_that_comes_back_with_old_weights(vllm):
    """Another vLLM takes its place, each time with the weights of the version before."""
    engine, proxy, server, _, work = vllm
    intruder = Server(
        VllmConfig(python=PYTHON), CFG, work=work, number=1, context=PROMPT + NEW, rows=ROWS
    )
    requested, rng = prompts(8), random.Random(5)
    backend = intruder.start()
    proxy.keys[intruder.url] = intruder.key
    try:
        for turn in range(TIMES):
            version = 20 + turn
            engine.load(weights(version), version)
            upstream = server.url if proxy.upstream == intruder.url else intruder.url
            timer = during(lambda upstream=upstream: setattr(proxy, "upstream", upstream), rng)
            check_rollouts(
                engine.generate(requested, FREE, seed=12, samples=2), requested, 2, version
            )
            timer.join()
            check_rollouts(
                engine.generate(requested, FREE, seed=12, samples=2), requested, 2, version
            )
    finally:
        proxy.upstream = server.url
        backend.close()
        intruder.stop()


def children(pid):
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(line) for line in children.split()]


def test_a_killed_server_restarts_with_the_weights(tmp_path):
    """The server itself and the process that computes, in turn; then it is stopped, not killed."""
    engine = open_engine("", tmp_path, launch=1, request_timeout_s=15.0)
    requested, rng = prompts(8), random.Random(4)
    try:
        engine.load(weights(1), 1)
        clean = engine.generate(requested, FREE, seed=11, samples=2)
        for turn in range(KILLS):
            leader = engine._pool.replicas[0]._server._process.pid
            victim = leader if turn % 2 == 0 else children(leader)[-1]
            signal_number = signal.SIGSTOP if turn % 3 == 2 else signal.SIGKILL
            timer = during(
                lambda victim=victim, signal_number=signal_number: os.kill(victim, signal_number),
                rng,
            )
            start = time.monotonic()
            out = engine.generate(requested, FREE, seed=11, samples=2)
            timer.join()
            check_rollouts(out, requested, 2, 1)
            if signal_number == signal.SIGKILL:  # it may have been over before the signal came
                check_rollouts(
                    engine.generate(requested, FREE, seed=11, samples=2), requested, 2, 1
                )
            assert alike(clean, out)
            print(f"{signal_number.name} of {victim - leader}: {time.monotonic() - start:.1f} s")
        engine.load(weights(2), 2)
        check_rollouts(engine.generate(requested, FREE, seed=11, samples=2), requested, 2, 2)
        assert engine.incidents
    finally:
        engine.close()
