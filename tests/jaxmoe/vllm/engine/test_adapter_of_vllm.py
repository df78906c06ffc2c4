# SPDX-License-Identifier: Apache-2.0
"""Adapters in a real vLLM, over a base that it loads by itself; on a CPU those of attention."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import base_of
from vllm_cases import CFG, NEW, OPS, open_engine, prompts

from jaxmoe.checkpoint.hf import load_params, save_params
from jaxmoe.config import EngineError, LoraConfig
from jaxmoe.http_engine.backend import RequestFailed
from jaxmoe.http_engine.pooled_engine import TRAINER_LOGPS
from jaxmoe.http_engine.probe import WeightSyncError
from jaxmoe.model.config import tiny
from jaxmoe.model.lora import init_adapters, with_adapters
from jaxmoe.observe.metrics import read_metrics
from jaxmoe.records import Sampling
from jaxmoe.vllm.engine.served_adapter import ServedAdapter
from jaxmoe.vllm.plugin.names import ADAPTER_ID
from jaxmoe.weight_sync.adapter_files import write_adapter
from tests.jaxmoe.commands import arguments, train_here

pytestmark = pytest.mark.vllm

SMALL = replace(CFG, d_expert=64)
LORA = LoraConfig(attention_rank=3, attention_alpha=6.0)


def adapters(seed):
    adapters = init_adapters(jax.random.key(seed), SMALL, LORA)
    return jax.tree.map(
        lambda x: x + 0.3 * jax.random.normal(jax.random.key(seed), x.shape), adapters
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder of a checkpoint in four bits, the same as the forward reads it)."""
    folder = tmp_path_factory.mktemp("base") / "packed"
    save_params(base_of(SMALL), SMALL, folder, dtype="mxfp4")  # what is not packed is rounded
    return folder, jax.device_put(load_params(folder, SMALL, "as_read", experts="packed"))


def opened(base, work, launch):
    options = dict(launch=launch, lora="adapter", retries=1, request_timeout_s=30.0)
    given = dict(sent=ServedAdapter(LORA, base[0]))
    return open_engine("", work, cfg=SMALL, given=given, **options)


@pytest.fixture(scope="module")
def inside(base, tmp_path_factory):
    """(one in this process, in which every matrix was tried; its folder)."""
    work = tmp_path_factory.mktemp("inside")
    engine = opened(base, work, 0)
    engine.load(with_adapters(base[1], adapters(0), LORA.scales), 0)
    yield engine, work
    engine.close()


def gap(rollout, params):
    ids = jnp.asarray([[*rollout.prompt.tokens, *rollout.tokens.tolist()]])
    trainer_logp = np.asarray(TRAINER_LOGPS(params, ids, cfg=SMALL, ops=OPS))[
        0, len(rollout.prompt.tokens) :
    ]
    return np.abs(rollout.rollout_logp - trainer_logp).max()


def check_versions(engine, base, work):
    sampling = Sampling(NEW, ())
    for version in (1, 2, 3):
        params = with_adapters(base[1], adapters(version % 2), LORA.scales)
        engine.load(params, version)
        for rollout in engine.generate(prompts(3), sampling, seed=version, samples=2):
            assert (rollout.weight_versions == version).all()
            assert gap(rollout, params) < 5e-5
        assert gap(rollout, base[1]) > 0.1  # what the adapter moves
    (folder,) = (work / "weights").glob("jaxmoe-*/3")
    assert not (folder.parent / "2").exists()
    sent = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"an adapter is {sent} bytes")
    assert sent < 40_000


def test_each_version_in_this_process_is_the_trainers(inside, base):
    check_versions(inside[0], base, inside[1])


def test_each_version_of_a_server_is_the_trainers(base, tmp_path):
    engine = opened(base, tmp_path, 1)
    try:
        check_versions(engine, base, tmp_path)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_restarted_server_gets_its_adapter(base, tmp_path):
    engine = opened(base, tmp_path, 1)
    (replica,) = engine._pool.replicas

    def kill():
        os.killpg(replica._server._process.pid, signal.SIGKILL)

    def lose():  # as vLLM does it, under the label that it has
        replica.backend.start_update()
        replica.backend.finish_update(engine._pool.target.label)

    try:
        params = with_adapters(base[1], adapters(1), LORA.scales)
        engine.load(params, 1)
        for break_it in (kill, lose):
            break_it()
            for rollout in engine.generate(prompts(3), Sampling(NEW, ()), seed=1, samples=2):
                assert (rollout.weight_versions == 1).all() and gap(rollout, params) < 5e-5
            print(break_it.__name__, engine.incidents)
    finally:
        engine.close()


def test_a_matrix_that_vllm_ignores_is_named(inside):
    """One layer's adapter buffers are cleared after they are filled."""
    engine, _ = inside
    backend = engine.backends[0]

    def break_one(worker):
        layer = dict(worker.model_runner.get_model().named_modules())["model.layers.1.attn.o_proj"]
        stock = layer.set_lora

        def forgets(index, lora_a, lora_b):
            stock(index, lora_a, lora_b)
            layer.lora_b_stacked[0].zero_()

        layer.set_lora = forgets

    def mend(worker):
        del dict(worker.model_runner.get_model().named_modules())[
            "model.layers.1.attn.o_proj"
        ].set_lora

    backend._call_llm(lambda: backend._llm.collective_rpc(break_one))
    try:
        with pytest.raises(WeightSyncError, match="an adapter of model.layers.1.self_attn.o_proj"):
            engine._try_out(backend)
    finally:
        backend._call_llm(lambda: backend._llm.collective_rpc(mend))
    engine._try_out(backend)


def test_a_damaged_adapter_is_refused_before_any_change(inside, tmp_path):
    engine, _ = inside
    with write_adapter(adapters(2), SMALL, LORA, tmp_path, run="r", version=9) as update:
        folder = Path(update.update_info["adapter"])
        (file,) = folder.glob("*.safetensors")
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 4
        file.write_bytes(raw)
        with pytest.raises(RequestFailed, match="must have digest"):
            engine.backends[0].load_adapter(str(folder))
    label = engine.backends[0].loaded_state()[0]["label"]
    assert label is not None and not label.startswith("r:")


def test_a_lost_adapter_is_not_replaced_by_base(inside, base):
    engine, _ = inside
    engine.load(with_adapters(base[1], adapters(1), LORA.scales), 4)
    backend = engine.backends[0]

    def lose(worker):
        return worker.remove_lora(ADAPTER_ID)

    backend._call_llm(lambda: backend._llm.collective_rpc(lose))
    assert backend.loaded_state()[0]["label"] is None
    with pytest.raises(EngineError):
        engine.generate(prompts(1), Sampling(NEW, ()), seed=0)


@pytest.mark.slow  # two commands; the tests above have its engine
def test_a_run_trains_and_resumes_vllms_adapter(tmp_path):
    cfg = tiny(n_q_heads=4, n_kv_heads=2, head_dim=32, d_model=64, d_expert=64, n_experts=4)
    save_params(base_of(cfg), cfg, tmp_path / "base", dtype="mxfp4")
    settings = (
        f"model.d_model=64 model.d_expert=64 model.n_experts=4 warmup.steps=0 optim.lr=0.01 "
        f"init.checkpoint={tmp_path / 'base'} lora.attention_rank=4 rollout.vllm.launch=0 "
        f"rollout.vllm.lora=adapter rollout.vllm.weights_dir={tmp_path / 'weights'} "
        "data.train_rows=64 data.held_out_rows=6 rollout.sequences_per_step=8 "
        "rollout.samples_per_prompt=4 loss.entropy_coef=0.01 save.every_steps=1"
    ).split()
    for steps in ("steps=1", "steps=3"):
        words = arguments(tmp_path / "run", *settings, steps, config="tiny_vllm.py")
        assert train_here(words) == 0
    rows = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "policy/ratio_max" in r]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["train_rollout_logprob_abs_diff_max"] < 5e-5 for row in rows)
    assert rows[0]["grad/norm"] > 0
    assert not list((tmp_path / "weights").iterdir())
