# SPDX-License-Identifier: Apache-2.0
"""The engine of several processes, here threads over stand-ins: one speaks, all know the same."""

from contextlib import closing

import jax
import numpy as np
import pytest
from board import as_processes
from stand_in import StandIn
from vllm_cases import CFG, NEW, check_rollouts, open_shared, prompts, weights

from jaxmoe.config import ConfigError, EngineError
from jaxmoe.records import Sampling
from jaxmoe.vllm.client.http_backend import HttpBackend
from jaxmoe.vllm.engine.vllm_engine import VllmEngine

FREE = Sampling(NEW, ())


def change_some(version):
    """Weights of which a hundredth differs from the version before."""
    rng, params = np.random.default_rng(0), weights(0)
    for _ in range(version):
        params = jax.tree.map(
            lambda x: np.where(rng.random(x.shape) < 0.01, x + np.float32(0.5), x), params
        )
    return params


def test_all_processes_have_the_answers_of_one(stand_in, tmp_path):
    def process(channel):
        with closing(open_shared(channel, stand_in.url, tmp_path)) as engine:
            engine.load(weights(1), 1)
            first = engine.generate(prompts(3), FREE, seed=4, samples=2)
            engine.load(weights(2), 2)
            if channel.number == 0:  # older versions are removed
                (folder,) = (tmp_path / "weights").glob("jaxmoe-*[!k]")
                assert [path.name for path in folder.iterdir()] == ["2"]
            return first, engine.generate(prompts(3), FREE, seed=4, samples=2), engine.incidents

    results = as_processes(3, process)
    for first, second, incidents in results:
        check_rollouts(first, prompts(3), 2, 1)
        check_rollouts(second, prompts(3), 2, 2)
        assert incidents == []
        for first_rollout, second_rollout in zip(results[0][1], second, strict=True):
            assert np.array_equal(first_rollout.tokens, second_rollout.tokens)
    assert not list((tmp_path / "weights").iterdir())


def test_a_restarted_server_gets_weights_from_process_0(fresh, tmp_path):
    """Between two calls, without any other process: what it needs was made at load."""

    def process(channel):
        with closing(open_shared(channel, fresh.url, tmp_path)) as engine:
            engine.load(weights(1), 1)
            if channel.number == 0:
                fresh.server.crash()
                fresh.server.start()
            return engine.generate(prompts(2), FREE, seed=4), engine.incidents

    results = as_processes(2, process)
    for out, incidents in results:
        check_rollouts(out, prompts(2), 1, 1)
        assert incidents and incidents == results[0][1]


@pytest.mark.parametrize("fault", ["other weights", "torn"])
def test_unexpected_weights_of_a_server_end_all_processes(fresh, tmp_path, fault):
    fresh.server.faults.add(fault)

    def process(channel):
        with closing(open_shared(channel, fresh.url, tmp_path)) as engine:
            engine.load(weights(1), 1)

    for error in as_processes(2, process):
        assert isinstance(error, EngineError), error
        assert (
            "probe of" in str(error)
            if fault == "other weights"
            else "other than sent" in str(error)
        )


def test_most_syncs_of_several_processes_are_changes(fresh, tmp_path):
    def process(channel):
        fracs = []
        with closing(open_shared(channel, fresh.url, tmp_path, complete_sync_every=3)) as engine:
            for version in range(5):
                params = change_some(version)
                engine.load(params, version)
                fracs.append(engine.sent_frac)
                rollouts = engine.generate(prompts(2), FREE, seed=version)
                check_rollouts(rollouts, prompts(2), 1, version, params)
        return fracs, engine.incidents

    first, second = as_processes(2, process)
    assert first == second and first[1] == []
    fracs = first[0]
    assert fresh.server.applied == [0, 1, 2, 0, 1]
    assert [frac == 1.0 for frac in fracs] == [True, False, False, True, False]
    assert all(0 < frac < 0.05 for frac in fracs if frac < 1.0)
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_after_damaged_changes_all_weights_are_sent(fresh, tmp_path, monkeypatch, is_on_disk):
    """The first process sends what both wrote, or both write again; the next sync has changes."""
    real = HttpBackend.load_weights

    def damage_once(backend, update, *args):
        if not update.update_info["changes"]:
            return real(backend, update, *args)
        (path,) = tmp_path.glob(f"weights/*/{update.manifest['version']}/changes-00002.bin")
        data = path.read_bytes()
        if update.manifest["version"] == 1:
            half = len(data) // 2
            path.write_bytes(data[:half] + bytes([data[half] ^ 4]) + data[half + 1 :])
        try:
            return real(backend, update, *args)
        finally:
            if not is_on_disk:
                path.write_bytes(data)

    monkeypatch.setattr(HttpBackend, "load_weights", damage_once)

    def process(channel):
        named = dict(complete_sync_every=8, retries=1)
        with closing(open_shared(channel, fresh.url, tmp_path, **named)) as engine:
            for version in range(3):
                params = change_some(version)
                engine.load(params, version)
                rollouts = engine.generate(prompts(2), FREE, seed=version)
                check_rollouts(rollouts, prompts(2), 1, version, params)
        return engine.incidents

    first, second = as_processes(2, process)
    assert first == second and "digest" in first[0]
    assert fresh.server.applied[0] == 0 and fresh.server.applied[-2:] == [0, 1]


def test_nobody_there_is_everybodys_one_line(tmp_path):
    server = StandIn(CFG)
    server.crash()

    def process(channel):
        return open_shared(channel, server.url, tmp_path)

    for error in as_processes(2, process):
        assert isinstance(error, ConfigError) and "must name running vLLM servers" in str(error)


def test_the_first_process_alone_has_the_engine(stand_in, tmp_path, monkeypatch):
    results, init = [], VllmEngine.__init__

    def counted(self, *args, **named):
        results.append(named["run"])
        init(self, *args, **named)

    monkeypatch.setattr(VllmEngine, "__init__", counted)

    def process(channel):
        with closing(open_shared(channel, stand_in.url, tmp_path)) as engine:
            return engine._run

    assert as_processes(3, process) == 3 * results
