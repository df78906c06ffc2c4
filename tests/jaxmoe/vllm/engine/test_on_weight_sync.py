# SPDX-License-Identifier: Apache-2.0
"""Weights change in one thread while another samples: each token carries what it was drawn with."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from vllm_cases import NEW, check_rollouts, open_engine, prompts, trainer, weights

from jaxmoe.http_engine import replica
from jaxmoe.http_engine.backend import RequestFailed, SampleRequest
from jaxmoe.records import Sampling
from jaxmoe.vllm.client.backend import request_body

FREE = Sampling(NEW, ())


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_sync_in_the_middle_of_responses(opened, mode):
    engine = opened(mode)
    engine.load(weights(1), 1)
    engine.generate(prompts(2), FREE, seed=0)  # compiled, warm
    batches, turns, met = [], 0, False
    while turns < 3 or (turns < 12 and not met and mode != "wait"):  # until one is met by a sync
        new, version = weights(2 + turns), 2 + turns
        thread = threading.Thread(
            target=lambda t=turns: batches.extend(
                engine.generate(prompts(6), FREE, seed=t, samples=2)
            )
        )
        thread.start()
        time.sleep(0.03 * (1 + turns % 3))
        engine.load(new, version)
        thread.join()
        turns += 1
        met = any(len(set(r.weight_versions.tolist())) > 1 for r in batches)
    assert len(batches) == 12 * turns and engine.incidents == []
    mixed = 0
    for r in batches:
        versions = r.weight_versions
        assert len(versions) == len(r.tokens) == NEW and (np.diff(versions) >= 0).all()
        mixed += len(set(versions.tolist())) > 1
        for version in set(versions.tolist()):  # the trainer of that version agrees with it
            of_version = versions == version
            expected = trainer(weights(int(version)), r)[of_version]
            np.testing.assert_allclose(r.rollout_logp[of_version], expected, atol=1e-4)
        if r.routed_experts is not None:
            assert len(r.routed_experts) == len(r.prompt.tokens) + NEW - 1
    assert mixed == 0 if mode == "wait" else mixed > 0


def test_samples_after_a_sync_use_only_new_weights(opened):
    engine = opened("keep")
    for version in range(1, 6):
        engine.load(weights(version), version)
        for r in engine.generate(prompts(3), Sampling(3, ()), seed=version):
            assert (r.weight_versions == version).all()


@pytest.mark.vllm
@pytest.mark.parametrize("begun", [True, False])
def test_in_process_requests_without_a_reader_are_ended(tmp_path, begun):
    engine = open_engine("", tmp_path, launch=0)
    engine.load(weights(1), 1)
    (backend,) = engine.backends
    body = request_body(SampleRequest([1, 2, 3], 3, NEW, 0, FREE))
    backend._timeout_s = 0.5
    if not begun:
        backend.pause("keep")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(backend.generate, body)
        while begun and not backend._in_flight:
            time.sleep(0.001)
        if begun:
            backend.pause("keep")
        with pytest.raises(RequestFailed, match="did not answer within 0.5 s"):
            answer.result()
    assert not backend._call_llm(lambda: list(backend._in_flight))
    backend.resume()
    assert not backend._call_llm(lambda: list(backend._in_flight))
    assert not backend._llm.llm_engine.has_unfinished_requests()
    backend._timeout_s = 20.0
    check_rollouts(engine.generate(prompts(2), FREE, seed=0), prompts(2), 1, 1)
    engine.close()


def test_waits_between_attempts_are_bounded(monkeypatch):
    waits = []
    monkeypatch.setattr(replica.time, "sleep", waits.append)
    for attempt in (0, 3, 1100):
        replica.sleep_backoff(attempt)
    assert waits[0] < 0.2 and 0.4 <= waits[1] <= 1.2 and waits[2] <= 1.5 * replica.MAX_BACKOFF_S
