# SPDX-License-Identifier: Apache-2.0
"""A weight sync counts when the engine shows the weights; whatever it holds instead is refused."""

import gc
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from stand_in import StandIn
from vllm_cases import CFG, NEW, OPS, PROMPT, check_rollouts, open_engine, prompts, trainer, weights

from jaxmoe.config import ConfigError, EngineError, VllmConfig
from jaxmoe.config_file import load_config, override
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.probe import WeightSyncError
from jaxmoe.records import Sampling
from jaxmoe.vllm.client.routes import VllmRoutes
from jaxmoe.vllm.client.sync import _stale_tensors, read_workers, transfer_weights
from jaxmoe.vllm.engine import transport
from jaxmoe.vllm.engine import vllm_engine as engine_module
from jaxmoe.vllm.engine.transport import run_concurrently
from jaxmoe.vllm.engine.vllm_engine import VllmEngine
from jaxmoe.vllm.plugin.names import vllm_parameter_name
from jaxmoe.weight_sync.files import SHARED_MEMORY, write_files
from jaxmoe.weight_sync.update import WeightUpdate, compute_manifest

FREE = Sampling(NEW, ())


@pytest.fixture
def engine(fresh, tmp_path):
    vllm_engine = open_engine(fresh.url, tmp_path, retries=1)
    yield vllm_engine
    vllm_engine.close()


MESSAGES = {
    "half sent": "1 missing",
    "torn": "1 other than sent",
    "stale": r"1 received but not in the live model \(model.layers.0.self_attn.sinks\)",
    "keeps its cache": "did not empty its prefix cache",
    "ignores": "must agree with the trainer on a probe",
    "other weights": "must agree with the trainer on a probe",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", MESSAGES)
def test_sampling_from_unexpected_weights_is_refused(engine, fresh, fault):
    engine.load(weights(0), 1)
    fresh.server.faults.add(fault)
    with pytest.raises(WeightSyncError, match=MESSAGES[fault]):
        engine.load(weights(1), 2)
    fresh.server.faults.clear()
    for r in engine.generate(prompts(1), FREE, seed=0):  # it syncs again by itself
        assert (r.weight_versions == 2).all()
        np.testing.assert_allclose(r.rollout_logp, trainer(weights(1), r), atol=5e-5)


def test_a_failing_update_is_retried_then_refused(engine, fresh):
    fresh.server.faults.add("update breaks")
    with pytest.raises(EngineError, match="(?s)version 1 could not be synced.*no room"):
        engine.load(weights(0), 1)
    fresh.server.faults.clear()
    engine.load(weights(0), 1)
    assert (engine.generate(prompts(1), FREE, seed=0)[0].weight_versions == 1).all()


def test_a_partial_update_under_its_label_is_refused(engine, fresh):
    engine.load(weights(0), 1)
    fresh.server.faults.add("update breaks")
    with pytest.raises(EngineError, match="could not be synced"):
        engine.load(weights(1), 2)
    assert fresh.server.spoken.endswith(":1")  # what the server says of its ruins
    with pytest.raises(EngineError, match="could not be synced"):
        engine.generate(prompts(1), FREE, seed=0)


def test_the_probe_costs_two_requests_within_its_bound(fresh, tmp_path):
    engine = open_engine(fresh.url, tmp_path, probe_abs_diff=50.0)
    fresh.server.faults.add("other weights")
    engine.load(weights(0), 1)
    assert len(fresh.server.requests) == 2
    engine.close()


@pytest.fixture(params=["disk", "memory"])
def directory(request, tmp_path):
    if request.param == "disk":
        yield tmp_path / "weights"
    elif not SHARED_MEMORY.is_dir():
        pytest.skip(f"there is no {SHARED_MEMORY} on this machine")
    else:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory_folder:
            yield Path(memory_folder)


@pytest.mark.slow
def test_weight_files_are_gone_in_the_end(fresh, tmp_path, directory):
    engine = open_engine(fresh.url, tmp_path, weights_dir=str(directory))
    maps, mapped = Path("/proc/self/maps"), []
    for version in range(1, 7):  # the last but one stays, for the next to be written over
        engine.load(weights(version), version)
        check_rollouts(engine.generate(prompts(2), FREE, seed=0), prompts(2), 1, version)
        assert len(list(directory.glob("jaxmoe-*/*"))) == min(version, 2)
        mapped.append(maps.read_text().count(str(directory)) if maps.exists() else 0)
    assert mapped == ([0, 0, 1, 2, 2, 2] if directory.is_relative_to(SHARED_MEMORY) else 6 * [0])
    engine.close()
    assert not list(directory.iterdir())
    gc.collect()
    assert not maps.exists() or str(directory) not in maps.read_text()
    engine.close()


def test_before_load_nothing_is_sampled(engine):
    with pytest.raises(ValueError, match="call load"):
        engine.generate(prompts(1), FREE, seed=0)
    with pytest.raises(ValueError, match="call load"):
        engine.score([[1, 2]])


def test_a_server_with_too_little_context_is_refused(stand_in, tmp_path):
    with pytest.raises(ConfigError, match=r"\(57\) tokens, its --max-model-len is 40"):
        VllmEngine(
            CFG,
            OPS,
            VllmConfig(url=stand_in.url),
            work=tmp_path,
            max_prompt_tokens=PROMPT,
            max_new_tokens=36,
            max_rows=4,
        )


def test_a_url_without_a_server_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="rollout.vllm.url must name running vLLM servers"):
        open_engine("http://127.0.0.1:9", tmp_path)


GUARDED_PREFIXES = ("/v1", "/v2", "/inference", "/cohere")  # what vLLM's --api-key guards


@pytest.mark.parametrize("key, guards", [("", "/"), ("k", GUARDED_PREFIXES), ("k", "/")])
def test_an_unprotected_server_is_reported_and_remotely_refused(
    tmp_path, capsys, monkeypatch, key, guards
):
    monkeypatch.setenv("JAXMOE_VLLM_API_KEY", key)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = StandIn(CFG, key=key, guards=guards)
    open_engine(server.url, tmp_path).close()
    err = capsys.readouterr().err
    # The same, but no address of this machine.
    remote_url = server.url.replace("127.0.0.1", "0.0.0.0")
    if guards == "/" and key:
        assert err == ""
        open_engine(remote_url, tmp_path).close()
    else:
        assert err.startswith(f"! {server.url} takes commands without a key: ")
        assert (
            err.count("\n") == 1
            and "--middleware jaxmoe.vllm.plugin.auth_middleware.AuthMiddleware" in err
        )
        with pytest.raises(
            ConfigError, match=f"url: {remote_url} takes commands without a key: .* same"
        ):
            open_engine(remote_url, tmp_path)
        assert capsys.readouterr().err == ""
    server.crash()


def test_raw_log_probs_of_a_server_are_refused(tmp_path):
    server = StandIn(CFG, logprobs_mode="raw_logprobs")
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs, it has raw_logp"):
        open_engine(server.url, tmp_path)
    server.crash()


SINKS, BIAS = "model.layers.0.self_attn.sinks", "model.layers.0.mlp.experts.down_proj_bias"


@pytest.mark.parametrize(
    ("stale_by_worker", "stale"),
    [
        ([[SINKS]], [SINKS]),
        ([[SINKS], []], []),  # the heads that changed are the second worker's
        ([[SINKS, BIAS], [BIAS]], [BIAS]),
        ([[SINKS], None], [SINKS]),  # the second has no such layer
        ([[], []], []),
    ],
)
def test_one_updated_worker_of_several_is_enough(stale_by_worker, stale):
    loaded = [
        {"stale": [], "unreadable": [vllm_parameter_name(SINKS), vllm_parameter_name(BIAS)]}
        if names is None
        else {"stale": names, "unreadable": []}
        for names in stale_by_worker
    ]
    assert _stale_tensors(loaded) == stale


CALLS = [name for name in vars(VllmRoutes) if not name.startswith("_")]


def test_replicas_within_a_server_are_refused_with_advice():
    backend = SimpleNamespace(**dict.fromkeys(CALLS, lambda: [{"replicas": 2}]), name="it")
    with pytest.raises(ConfigError, match="data parallelism.*Start several servers"):
        read_workers(backend)


def test_speculative_decoding_is_refused_with_advice():
    loaded = [{"instance": "a", "drafts": None}]
    backend = SimpleNamespace(**dict.fromkeys(CALLS, lambda: loaded), name="it")
    assert read_workers(backend).names == ["a"]
    loaded[0]["drafts"] = "ngram"
    with pytest.raises(ConfigError, match="has 'ngram'.*without --speculative-config"):
        read_workers(backend)


@pytest.mark.parametrize("option", ["--speculative-config '{}'", "--spec_method ngram", "-sc x"])
def test_draft_options_are_refused_before_a_start(option):
    with pytest.raises(ConfigError, match="rollout.vllm.args must not have -.*Leave it out"):
        override(load_config("tiny_vllm.py"), f"rollout.vllm.args={option}")


def test_ruins_are_invalidated_before_they_are_sampled_from():
    calls = []

    def call(name, *args):
        calls.append(name)
        if name == "send_update":
            raise RequestFailed("no room")
        return [{"instance": "a"}]

    breaking = SimpleNamespace(name="it", **{name: partial(call, name) for name in CALLS})
    update = WeightUpdate({"run": "r", "version": 1, "tensors": {}}, {"path": "p"})
    with pytest.raises(RequestFailed, match="no room"):
        transfer_weights(breaking, update, "keep", lambda: calls.append("invalidate"), ["a"])
    assert calls == ["pause", "start_update", "send_update", "invalidate", "resume"]


def test_a_failed_sends_reason_outranks_the_engines_timeout():
    def send():
        raise MemoryError("no room on the trainer's side")

    with pytest.raises(
        RequestFailed, match="no room on the trainer's side; waited in vain"
    ) as error:
        with run_concurrently(send):
            time.sleep(0.1)
            raise RequestFailed("waited in vain")
    assert isinstance(error.value.__cause__, MemoryError)


def test_a_successful_send_raises_the_engines_error():
    with pytest.raises(RequestFailed, match="^waited in vain$"):
        with run_concurrently(lambda: None):
            raise RequestFailed("waited in vain")


def test_digests_are_summed_once_for_all_servers(tmp_path, monkeypatch):
    """Over a transport that is made for each server anew; files stand for what it moves."""
    summed, manifests = [], []

    def count_once(*args, **named):
        summed.append(named["version"])
        return compute_manifest(*args, **named)

    def share(params, cfg, *, manifest, **named):
        manifests.append(manifest)
        update = write_files(params, cfg, tmp_path / str(len(manifests)), **named)
        assert update.manifest == manifest
        return update

    monkeypatch.setattr(engine_module, "compute_manifest", count_once)
    monkeypatch.setattr(transport, "share_ipc_handles", share)
    servers = [StandIn(CFG) for _ in range(3)]
    engine = open_engine(",".join(s.url for s in servers), tmp_path, transport="ipc")
    for version in (1, 2):
        engine.load(weights(version), version)
    assert summed == [1, 2] and len(manifests) == 6
    engine.close()
    for server in servers:
        server.crash()
