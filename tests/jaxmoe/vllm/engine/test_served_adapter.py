# SPDX-License-Identifier: Apache-2.0
"""vLLM samples from adapters over four-bit experts: merged, as whole weights, or as they are."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted import LORA, adapters_of, base_of
from stand_in import StandIn
from vllm_cases import CFG, NEW, OPS, open_engine, prompts

from jaxmoe.config import EngineError
from jaxmoe.http_engine.pooled_engine import TRAINER_LOGPS
from jaxmoe.http_engine.probe import WeightSyncError
from jaxmoe.model.lora import with_adapters
from jaxmoe.records import Sampling
from jaxmoe.vllm.engine.served_adapter import ServedAdapter
from tests.jaxmoe.checkpoint.random_adapters import merge_adapters

PACKABLE = replace(CFG, d_expert=64)


@pytest.mark.slow
def test_merged_weights_arrive_with_the_trainers_log_probs(tmp_path):
    base, adapters = base_of(PACKABLE), adapters_of(PACKABLE)
    merged_params = merge_adapters(base, adapters, LORA.scales, dtype="float32")
    server = StandIn(PACKABLE)
    engine = open_engine(server.url, tmp_path, cfg=PACKABLE, max_rows=8)
    try:
        engine.load(with_adapters(base, adapters, LORA.scales), 1)
        jax.tree.map(
            np.testing.assert_array_equal, server.params, jax.tree.map(np.asarray, merged_params)
        )
        (rollout,) = engine.generate(prompts(1), Sampling(NEW, ()), seed=0)
    finally:
        engine.close()
        server.crash()
    ids = jnp.asarray([[*rollout.prompt.tokens, *rollout.tokens.tolist()]])
    start = len(rollout.prompt.tokens)
    trainer_logp, unadapted = (
        np.asarray(TRAINER_LOGPS(params, ids, cfg=PACKABLE, ops=OPS))[0, start:]
        for params in (with_adapters(base, adapters, LORA.scales), base)
    )
    np.testing.assert_allclose(rollout.rollout_logp, trainer_logp, atol=1e-4)
    assert np.abs(unadapted - trainer_logp).max() > 1e-2


@pytest.fixture
def served(tmp_path):
    """(a stand-in that serves adapters over a base, an engine that sends them to it)."""
    server = StandIn(PACKABLE, base=base_of(PACKABLE))
    given = dict(sent=ServedAdapter(LORA, tmp_path / "base"))
    engine = open_engine(server.url, tmp_path, cfg=PACKABLE, max_rows=8, retries=1, given=given)
    yield server, engine
    engine.close()
    server.crash()
    assert not list((tmp_path / "weights").iterdir())


def test_adapters_are_sent_after_each_matrix_is_tried(served, tmp_path, capsys):
    server, engine = served
    for version in (1, 2):
        larger = jax.tree.map(partial(jnp.multiply, version), adapters_of(PACKABLE))
        params = with_adapters(server.base, larger, LORA.scales)
        engine.load(params, version)
        (rollout,) = engine.generate(prompts(1), Sampling(NEW, ()), seed=0)
        assert (rollout.weight_versions == version).all()
        ids = jnp.asarray([[*rollout.prompt.tokens, *rollout.tokens.tolist()]])
        trainer_logp = np.asarray(TRAINER_LOGPS(params, ids, cfg=PACKABLE, ops=OPS))[
            0, len(rollout.prompt.tokens) :
        ]
        np.testing.assert_allclose(rollout.rollout_logp, trainer_logp, atol=1e-4)
    assert capsys.readouterr().out.count("trying an adapter of each of 12 matrices") == 1
    assert {body["model"] for body in server.requests} == {"jaxmoe_adapter"}
    (folder,) = (tmp_path / "weights").glob("jaxmoe-*/*")
    assert folder.name == "2"  # the others are gone


@pytest.mark.parametrize("name", ["w_o", "w_gate_up"])
def test_a_skipped_matrix_is_named_before_any_sampling(served, name):
    server, engine = served
    server.faults.add(f"skips {name}")
    with pytest.raises(WeightSyncError, match=f"an adapter of model.layers.1.*{name[2:]}"):
        engine.load(with_adapters(server.base, adapters_of(PACKABLE), LORA.scales), 1)
    with pytest.raises(EngineError):
        engine.generate(prompts(1), Sampling(NEW, ()), seed=0)
