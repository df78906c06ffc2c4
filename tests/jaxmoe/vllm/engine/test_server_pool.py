# SPDX-License-Identifier: Apache-2.0
"""Servers that come and go: a run goes on while one lives, and who is back has what is current."""

import time
from contextlib import ExitStack

import pytest
from stand_in import StandIn
from vllm_cases import CFG, NEW, ROWS, check_rollouts, open_engine, prompts, weights

from jaxmoe.http_engine import server_pool as module
from jaxmoe.http_engine.replica import Replica
from jaxmoe.http_engine.server_pool import ServerPool
from jaxmoe.records import Sampling
from jaxmoe.vllm.client.http_backend import HttpBackend

FREE, SMALL = Sampling(NEW, ()), Sampling(4, ())


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(module, "MIN_RECONNECT_S", 0.05)
    with ExitStack() as closing:
        servers = [StandIn(CFG, rows=ROWS) for _ in range(2)]
        for server in servers:
            closing.callback(server.crash)
        yield servers


def urls(servers):
    return ",".join(server.url for server in servers)


def wait_until(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_dead_server_leaves_and_rejoins_the_run(two, tmp_path):
    engine = open_engine(urls(two), tmp_path, retries=2)
    engine.load(weights(1), 1)
    two[1].crash()
    for version in (1, 2):
        check_rollouts(engine.generate(prompts(6), SMALL, seed=3), prompts(6), 1, version)
        if version == 1:
            wait_until(lambda: any("is unavailable" in incident for incident in engine.incidents))
            before = len(engine.incidents)
            engine.load(weights(2), 2)  # costs no attempt at the one that is away
            assert len(engine.incidents) == before
    two[1].start()
    wait_until(lambda: "is reconnected, with weights of version 2" in engine.incidents[-1])
    assert two[1].label == two[0].label
    two[1].requests.clear()
    check_rollouts(engine.generate(prompts(6), SMALL, seed=3), prompts(6), 1, 2)
    assert two[1].requests, "it has work again"
    engine.load(weights(3), 3)
    check_rollouts(engine.generate(prompts(6), SMALL, seed=3), prompts(6), 1, 3)
    engine.close()


def test_a_server_with_an_outdated_version_waits(two, tmp_path, monkeypatch):
    engine = open_engine(urls(two), tmp_path, retries=1)
    engine.load(weights(1), 1)
    two[1].crash()
    check_rollouts(engine.generate(prompts(6), SMALL, seed=3), prompts(6), 1, 1)
    wait_until(lambda: any("is unavailable" in incident for incident in engine.incidents))
    bring_back, versions = Replica.reconnect, []

    def slowly(self, target):
        bring_back(self, target)
        if not versions:
            engine.load(weights(2), 2)
        versions.append(target.version)

    monkeypatch.setattr(Replica, "reconnect", slowly)
    two[1].start()
    wait_until(lambda: versions)
    for seed in range(3):
        check_rollouts(engine.generate(prompts(6), SMALL, seed=seed), prompts(6), 1, 2)
    wait_until(lambda: "is reconnected, with weights of version 2" in engine.incidents[-1])
    assert versions == [1, 2]
    engine.close()


def test_requests_of_a_dead_server_wait_for_nothing(two, tmp_path, monkeypatch):
    """Others answer them at once, however long the dead one is tried."""
    engine = open_engine(urls(two), tmp_path, retries=5)  # some six seconds of attempts
    engine.load(weights(1), 1)
    engine.generate(prompts(2), SMALL, seed=3)  # programs are made
    two[0].crash()
    start = time.monotonic()
    check_rollouts(engine.generate(prompts(6), SMALL, seed=3), prompts(6), 1, 1)
    assert time.monotonic() - start < 3
    engine.close()


def test_a_server_that_dies_syncing_is_skipped(two, tmp_path):
    engine = open_engine(urls(two), tmp_path, retries=1)
    engine.load(weights(1), 1)
    two[1].faults.add("update breaks")
    engine.load(weights(2), 2)
    check_rollouts(engine.generate(prompts(4), SMALL, seed=3), prompts(4), 1, 2)
    two[1].faults.clear()
    wait_until(lambda: "is reconnected, with weights of version 2" in engine.incidents[-1])
    engine.close()


def test_an_absent_server_joins_when_it_is_ready(two, tmp_path, capsys):
    two[1].crash()
    engine = open_engine(urls(two), tmp_path)
    assert "begins without it" in capsys.readouterr().err
    engine.load(weights(1), 1)
    check_rollouts(engine.generate(prompts(4), SMALL, seed=3), prompts(4), 1, 1)
    two[1].start()
    wait_until(lambda: engine.incidents and "is reconnected" in engine.incidents[-1])
    assert two[1].label == two[0].label
    engine.close()


def test_a_returning_server_with_less_room_stays_out(two, tmp_path):
    engine = open_engine(urls(two), tmp_path, retries=1)
    engine.load(weights(1), 1)
    two[1].crash()
    check_rollouts(engine.generate(prompts(6), SMALL, seed=3), prompts(6), 1, 1)
    two[1].context = 20
    two[1].start()
    wait_until(lambda: any("--max-model-len is 20" in incident for incident in engine.incidents))
    check_rollouts(engine.generate(prompts(6), SMALL, seed=3), prompts(6), 1, 1)
    engine.close()


def test_longest_requests_go_to_the_least_loaded_server(two, tmp_path):
    engine = open_engine(two[0].url, tmp_path, max_rows=1)  # one at a time
    engine.load(weights(1), 1)
    two[0].requests.clear()
    requested = prompts(6)
    check_rollouts(engine.generate(requested, SMALL, seed=3), requested, 1, 1)
    lengths = [len(body["token_ids"]) for body in two[0].requests]
    assert lengths == sorted((len(p.tokens) for p in requested), reverse=True)
    engine.close()

    replicas = [Replica.__new__(Replica) for _ in range(2)]
    for replica in replicas:
        replica.in_flight, replica.backend = 0, HttpBackend("http://127.0.0.1:1", timeout_s=1.0)
    pool = ServerPool(replicas, [], print)
    acquired = [pool.acquire_replica(size) for size in (100, 40, 30, 20, 20)]
    assert [replicas.index(r) for r in acquired] == [0, 1, 1, 1, 1] and replicas[1].in_flight == 110
    pool.release_replica(replicas[1], 90)
    assert pool.acquire_replica(1) is replicas[1]
