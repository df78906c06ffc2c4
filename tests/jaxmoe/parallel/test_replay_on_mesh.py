# SPDX-License-Identifier: Apache-2.0
"""Every update on a mesh uses the experts that are replayed."""

from dataclasses import replace
from functools import cache

import bigram
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from expert_switches import SWITCHES

from jaxmoe.config import MeshConfig
from jaxmoe.model import forward, init_params, plain_ops
from jaxmoe.model.router import replay_routing
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import make_mesh, state_shardings
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.batch import shard_rows
from jaxmoe.rl.minibatches import split_minibatches
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.state import Trained, init_state
from jaxmoe.rl.update import jit_step

pytestmark = pytest.mark.slow  # ten seconds each: a step is compiled for each mesh
CFG = replace(bigram.CFG, n_experts=8, vocab_multiple=8)
FOUR_UPDATES = Algorithm(terms=(SWITCHES,), old_logp="recomputed", epochs=2, minibatches=2)
FAST_SGD = optax.sgd(1.0)


@cache
def params():
    return init_params(jax.random.key(0), CFG)


@cache
def own_experts():
    """The experts of a forward on one device, before the updates."""
    batch = jax.tree.map(jnp.asarray, bigram.make_batch())
    recorded = jax.jit(
        lambda policy: forward(
            policy, batch.tokens_BT, CFG, plain_ops(), segment_ids_BT=batch.segment_ids_BT
        )[2]["experts_BTA"]
    )(params())
    return np.moveaxis(np.asarray(recorded), 0, 2)


def count_switches(sizes, replay, batch, expected_BTLA):
    mesh = make_mesh(MeshConfig(**sizes))
    ops = sharded_ops(replace(plain_ops(), router=replay_routing), mesh, CFG)
    state = init_state(Trained(params()), FAST_SGD)
    shardings = state_shardings(state, CFG, mesh)
    scorer = Scorer(CFG, ops, replay=replay)
    step = jit_step(
        tx=FAST_SGD, algorithm=FOUR_UPDATES, scorer=scorer, out_shardings=(shardings, None, None)
    )
    batch = replace(batch, extra={"expected_BTLA": expected_BTLA})
    batch, minibatches = split_minibatches(batch, FOUR_UPDATES, seed=(1,))
    state = jax.device_put(state, shardings)
    return float(step(state, shard_rows(batch, mesh), minibatches)[1]["switches"])


MESHES = [{"fsdp": 2}, {"expert": 2}]


@pytest.mark.parametrize("sizes", MESHES)
def test_r2_keeps_the_experts_of_the_forward_before_the_first_update(sizes):
    assert count_switches(sizes, "R2", bigram.make_batch(), own_experts()) == 0.0


def test_without_r2_the_same_updates_switch_experts():
    assert count_switches({"fsdp": 2}, "", bigram.make_batch(), own_experts()) > 1.0


@pytest.mark.parametrize("sizes", MESHES)
def test_r3_uses_the_experts_of_the_engine_at_every_token_and_layer(sizes):
    batch = bigram.routed_batch()
    assert count_switches(sizes, "R3", batch, batch.routed_experts_BTLA) == 0.0
