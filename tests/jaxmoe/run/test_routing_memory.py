# SPDX-License-Identifier: Apache-2.0
"""What a step keeps of the router is counted: instruments, and logits of the old forward."""

import pytest
from printed_plan import what_runs

from jaxmoe.config import ConfigError
from jaxmoe.config_file import load_config, override
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.run.dry_run import format_plan
from jaxmoe.run.memory import plan_memory
from jaxmoe.run.programs import batch_shapes
from jaxmoe.run.routing_memory import routing_bytes

TINY = load_config("tiny.py")
SEVERAL = ("loss.minibatches=2", "loss.old_logp=recomputed")
RECORD = "router.record=record_router_logits"


def test_a_run_without_them_keeps_nothing():
    assert routing_bytes(TINY) == plan_memory(TINY).routing == 0
    assert routing_bytes(override(TINY, RECORD)) == 0


@pytest.mark.parametrize("mesh", [(), ("mesh.fsdp=2",)])
def test_old_logits_are_counted_for_the_complete_batch(mesh):
    cfg = override(TINY, "loss.objective=rspo", RECORD, *SEVERAL, *mesh)
    batch, _ = batch_shapes(cfg, algorithm_from_config(cfg))
    m, tokens = cfg.model, batch.tokens_BT.size // (2 if mesh else 1)
    assert routing_bytes(cfg) == tokens * m.n_layers * m.n_experts * 4
    plain = override(TINY, RECORD, *SEVERAL, *mesh)
    assert plan_memory(cfg).training - plan_memory(plain).training == routing_bytes(cfg)


def test_instruments_are_counted_and_printed():
    cfg = override(TINY, "router.instruments=True")
    m, tokens = cfg.model, cfg.rollout.sequences_per_step * cfg.context
    # margin, entropy and mass in float32; one byte for each expert of both forwards
    assert routing_bytes(cfg) == tokens * m.n_layers * (12 + 2 * m.experts_per_token)
    assert plan_memory(cfg).training > plan_memory(TINY).training
    assert "\n  routing " in format_plan(cfg) and "\n  routing " not in format_plan(TINY)
    assert what_runs(TINY, "router.instruments=True")["router"] == "instruments"
    with pytest.raises(
        ConfigError, match="needs a model that chooses among experts, got .*=4: all "
    ):
        override(cfg, "model.n_experts=4", "model.experts_per_token=4")
