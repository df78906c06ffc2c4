# SPDX-License-Identifier: Apache-2.0
"""The fault table: whatever goes wrong, no prompt is lost or doubled and no token is of weights
that were not verified. Here over the stand-in; test_faults_of_vllm.py does it to vLLM.
"""

import random
import threading
import time

import numpy as np
import pytest
from proxy import KINDS
from vllm_cases import NEW, check_rollouts, open_engine, prompts, trainer, weights

from jaxmoe.config import EngineError
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.replica import Replica
from jaxmoe.records import Prompt, Rollout, Sampling, StopReason

FREE = Sampling(NEW, ())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_spoilt_answer_is_asked_for_again(fresh, tmp_path, kind):
    engine = open_engine(fresh.url, tmp_path, request_timeout_s=2.0)
    engine.load(weights(1), 1)
    requested = prompts(4)
    clean = engine.generate(requested, FREE, seed=3, samples=2)
    rng = random.Random(kind)
    fresh.proxy.faults = rng.sample([kind, kind, None, None], 4)
    out = engine.generate(requested, FREE, seed=3, samples=2)
    assert fresh.proxy.spoilt == [kind, kind]
    check_rollouts(out, requested, 2, 1)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(clean, out, strict=True))
    assert engine.incidents
    engine.close()


def test_permanent_failures_end_with_their_reason(fresh, tmp_path):
    engine = open_engine(fresh.url, tmp_path, retries=2)
    engine.load(weights(1), 1)
    fresh.proxy.faults = ["500"] * 1000
    start = time.monotonic()
    with pytest.raises(EngineError, match="(?s)was not answered.*answered 500.*tried 3 times"):
        engine.generate(prompts(3), FREE, seed=0)
    assert time.monotonic() - start < 10
    assert len(fresh.proxy.spoilt) <= 9  # bounded: three requests, three times
    fresh.proxy.faults = []
    check_rollouts(engine.generate(prompts(3), FREE, seed=0), prompts(3), 1, 1)
    engine.close()


def comes_back(server, restart, folder):
    """End the server in the middle of its work; another one takes its replica."""
    server.crash()
    time.sleep(0.1)
    server.start(folder if restart == "old weights" else None)


@pytest.mark.slow
@pytest.mark.parametrize("restart", ["random weights", "old weights"])
def test_a_restarted_server_gets_the_weights(fresh, tmp_path, restart):
    engine = open_engine(fresh.url, tmp_path, request_timeout_s=10.0)
    engine.load(weights(1), 1)
    old = tmp_path / "old"
    folder = next((tmp_path / "weights").glob("jaxmoe-*/1"))
    old.mkdir()
    for file in folder.iterdir():
        (old / file.name).write_bytes(file.read_bytes())
    engine.load(weights(2), 2)
    rng, requested = random.Random(restart), prompts(6)
    for turn in range(2):
        fresh.server.delay = 0.003
        timer = threading.Timer(rng.uniform(0.02, 0.15), comes_back, (fresh.server, restart, old))
        timer.start()
        check_rollouts(engine.generate(requested, FREE, seed=turn, samples=2), requested, 2, 2)
        timer.join()
        check_rollouts(engine.generate(requested, FREE, seed=turn, samples=2), requested, 2, 2)
    assert engine.incidents
    engine.close()


def test_a_restart_between_two_calls_is_noticed(fresh, tmp_path):
    engine = open_engine(fresh.url, tmp_path)
    engine.load(weights(1), 1)
    comes_back(fresh.server, "random weights", None)
    check_rollouts(engine.generate(prompts(2), FREE, seed=0), prompts(2), 1, 1)
    comes_back(fresh.server, "random weights", None)
    np.testing.assert_allclose(
        engine.score([[1, 2, 3]])[0], scores(weights(1), [1, 2, 3]), atol=5e-5
    )
    comes_back(fresh.server, "random weights", None)
    engine.load(weights(2), 2)
    check_rollouts(engine.generate(prompts(2), FREE, seed=0), prompts(2), 1, 2)
    engine.close()


def test_a_server_with_an_older_version_is_noticed(fresh, tmp_path):
    """Its label is one of ours and was verified, and yet it is not what is current."""
    engine, server = open_engine(fresh.url, tmp_path), fresh.server
    engine.load(weights(1), 1)
    older = server.params, server.label
    engine.load(weights(2), 2)
    server.params, server.label = older
    server.spoken = server.label
    check_rollouts(engine.generate(prompts(3), FREE, seed=0), prompts(3), 1, 2)
    assert "when 2 was current" in "".join(engine.incidents)
    engine.close()


def scores(params, tokens):
    ids = np.asarray(tokens[1:], np.int32)
    fake = Rollout(Prompt(0, "", (tokens[0],), None), ids, ids, StopReason.MAX_TOKENS, ids)
    return np.concatenate([[0], trainer(params, fake)])


def test_an_absent_server_is_dropped_for_all_requests(fresh, tmp_path, monkeypatch):
    engine = open_engine(fresh.url, tmp_path, retries=1)
    engine.load(weights(1), 1)
    versions, sync_weights = [], Replica.sync_weights

    def counted(self, *args, **options):
        versions.append(args)
        return sync_weights(self, *args, **options)

    monkeypatch.setattr(Replica, "sync_weights", counted)
    fresh.server.crash()
    with pytest.raises(EngineError, match="could not be synced, tried 2 times"):
        engine.generate(prompts(12), FREE, seed=0)
    with pytest.raises(EngineError, match="could not be synced, tried 2 times"):
        engine.generate(prompts(12), FREE, seed=0)
    assert len(versions) == 1
    fresh.server.start()
    engine.load(weights(2), 2)  # whoever syncs anew finds out anew
    check_rollouts(engine.generate(prompts(3), FREE, seed=0), prompts(3), 1, 2)
    engine.close()


def test_responses_from_before_a_broken_sync_are_refused(fresh, tmp_path):
    engine = open_engine(fresh.url, tmp_path)
    engine.load(weights(1), 1)
    (replica,) = engine._pool.replicas
    count = replica._verified_state(engine._pool.target)
    replica._check_unchanged(count)
    replica._invalidate_weights()
    replica.recover(replica.generation, engine._pool.target)  # the same version is verified again
    with pytest.raises(RequestFailed, match="changed its weights during the request"):
        replica._check_unchanged(count)
    replica._check_unchanged(replica._verified_state(engine._pool.target))
    engine.close()


def test_closing_ends_what_waits(fresh, tmp_path):
    engine = open_engine(fresh.url, tmp_path, request_timeout_s=100.0)
    engine.load(weights(1), 1)
    fresh.proxy.faults = ["silent"] * 50
    failures = []

    def sample():
        try:
            engine.generate(prompts(2), FREE, seed=0)
        except EngineError as error:
            failures.append(str(error))

    thread = threading.Thread(target=sample)
    thread.start()
    time.sleep(0.1)
    engine.close()
    thread.join(10)
    assert not thread.is_alive() and "closed" in failures[0]
