# SPDX-License-Identifier: Apache-2.0
"""Weight syncs that send only what changed, and all of it after any doubt."""

import jax
import numpy as np
import pytest
from stand_in import StandIn
from vllm_cases import CFG, NEW, check_rollouts, open_engine, prompts, weights

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.records import Sampling

FREE = Sampling(NEW, ())


@pytest.fixture
def engine(fresh, tmp_path):
    vllm_engine = open_engine(fresh.url, tmp_path, retries=2, complete_sync_every=4)
    yield vllm_engine
    vllm_engine.close()


def sample(engine, version):
    check_rollouts(engine.generate(prompts(3), FREE, seed=0, samples=2), prompts(3), 2, version)


def folders(tmp_path):
    return sorted(path.parent.name for path in tmp_path.glob("weights/*/*/manifest.json"))


def test_a_server_samples_from_each_changed_version(engine, fresh, tmp_path):
    for version in range(6):
        engine.load(weights(version), version)
        sample(engine, version)
    assert fresh.server.applied == [0, 1, 2, 3, 0, 1]
    assert folders(tmp_path) == ["4", "5"] and not engine.incidents


def damage(tmp_path, version):
    (path,) = tmp_path.glob(f"weights/*/{version}/changes.bin")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_after_damaged_changes_all_weights_are_sent(engine, fresh, tmp_path, monkeypatch):
    engine.load(weights(0), 0)
    load = engine.backends[0].load_weights

    def damage_first(update, *args):
        if len(fresh.server.applied) == 1:
            damage(tmp_path, 1)
        return load(update, *args)

    monkeypatch.setattr(engine.backends[0], "load_weights", damage_first)
    engine.load(weights(1), 1)
    sample(engine, 1)
    assert len(engine.incidents) == 1 and "digest" in engine.incidents[0]
    engine.load(weights(2), 2)
    sample(engine, 2)
    assert fresh.server.applied == [0, 1, 0, 1]


@pytest.mark.parametrize("fault", ["torn", "other weights", "half sent", "update breaks"])
def test_a_server_with_other_weights_gets_them_all(engine, fresh, monkeypatch, fault):
    """A fault that passes: it is seen before a token is sampled."""
    engine.load(weights(0), 0)
    load = engine.backends[0].load_weights

    def fail_with_changes(update, *args):
        fresh.server.faults = {fault} if update.update_info["changes"] else set()
        return load(update, *args)

    monkeypatch.setattr(engine.backends[0], "load_weights", fail_with_changes)
    engine.load(weights(1), 1)
    sample(engine, 1)
    assert fresh.server.applied[-1] == 0 and len(engine.incidents) == 1


def test_a_new_server_process_reads_all_files(engine, fresh):
    for version in (0, 1):
        engine.load(weights(version), version)
    fresh.server.crash()
    fresh.server.start()
    sample(engine, 1)
    assert fresh.server.applied == [1]  # from the complete file on
    engine.load(weights(2), 2)
    sample(engine, 2)


def test_two_servers_have_equal_weights(tmp_path):
    servers = [StandIn(CFG), StandIn(CFG)]
    engine = open_engine(
        ",".join(server.url for server in servers), tmp_path, complete_sync_every=3
    )
    for version in range(5):
        engine.load(weights(version), version)
        sample(engine, version)
    assert [server.applied for server in servers] == [[0, 1, 2, 0, 1]] * 2
    received = servers[0].received
    assert received and servers[1].received == received
    engine.close()
    for server in servers:
        server.crash()


def test_most_bytes_are_not_sent(engine):
    engine.load(weights(0), 0)
    assert engine.sent_frac == 1.0
    rng = np.random.default_rng(0)
    few = jax.tree.map(
        lambda x: np.where(rng.random(x.shape) < 0.01, x + np.float32(0.5), x), weights(0)
    )
    engine.load(few, 1)
    assert 0 < engine.sent_frac < 0.04


@pytest.mark.parametrize(
    "options",
    [
        ("rollout.vllm.launch=0",),
        ("rollout.vllm.transport=nccl",),
        ("rollout.vllm.url=", "rollout.vllm.launch=0"),
    ],
)
def test_changes_need_servers_and_files(options):
    with pytest.raises(ConfigError, match="complete_sync_every=1"):
        override(load_config("tiny_vllm.py"), "rollout.vllm.complete_sync_every=8", *options)
