# SPDX-License-Identifier: Apache-2.0
"""Functions of one's own that would train something else: refused by name, before a step."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CFG, MODEL, OPS, SGD, make_batch, start

from jaxmoe.config import ConfigError, MeshConfig
from jaxmoe.model import forward, init_params, sequence_logprobs
from jaxmoe.model.check_ops import check_router
from jaxmoe.model.moe.router import replay_routing, route_top_k
from jaxmoe.parallel.ops import sharded_ops
from jaxmoe.parallel.sharding import make_mesh
from jaxmoe.rl.algorithm import Algorithm
from jaxmoe.rl.scorer import Scorer
from jaxmoe.rl.update import jit_step
from pallas_kernels import sink_attention

TOKENS = jnp.asarray(make_batch().tokens_BT)


def swap_experts(h_BTD, layer, *, active, **_):
    return route_top_k(h_BTD, layer, active=active)[::-1]


def one_expert_less(h_BTD, layer, *, active, **_):
    return route_top_k(h_BTD, layer, active=active - 1)


def shift_experts(h_BTD, layer, *, active, **_):
    indices, weights = route_top_k(h_BTD, layer, active=active)
    return indices + 1, weights


def twice_the_same(h_BTD, layer, *, active, **_):
    indices, weights = route_top_k(h_BTD, layer, active=active)
    return jnp.broadcast_to(indices[..., :1], indices.shape), weights


def not_finite(h_BTD, layer, *, active, **_):
    indices, weights = route_top_k(h_BTD, layer, active=active)
    return indices, weights / 0.0


def heads_first(q, k, v, sink, **options):
    o_BTNH, lse = sink_attention(q, k, v, sink, **options)
    return jnp.swapaxes(o_BTNH, 1, 2), lse


def trace_forward(ops):
    return jax.eval_shape(lambda params: forward(params, TOKENS, CFG, ops)[0], MODEL)


@pytest.mark.parametrize("router", [swap_experts, one_expert_less])
def test_a_routers_wrong_shapes_are_named_when_traced(router):
    with pytest.raises(
        ConfigError, match=rf"ops.router: {router.__name__} must return .indices, w"
    ):
        trace_forward(replace(OPS, router=router))


@pytest.mark.parametrize(
    "router, message",
    [
        (shift_experts, "experts from 0 to 4 .* got 1 to 5"),
        (twice_the_same, "2 different experts"),
        (not_finite, "finite weights"),
    ],
)
def test_a_routers_impossible_experts_are_named_before_training(router, message):
    with pytest.raises(ConfigError, match=rf"ops.router: {router.__name__} must return {message}"):
        check_router(router, CFG)
    a, scorer = Algorithm(), Scorer(CFG, replace(OPS, router=router))
    step = jit_step(tx=SGD, algorithm=a, scorer=scorer)
    with pytest.raises(ConfigError, match=router.__name__):
        step(start(a, params=MODEL), make_batch())


def test_routers_that_keep_the_contract_pass():
    def custom_router(h_BTD, layer, *, active, **_):
        return route_top_k(h_BTD, layer, active=active)

    for router in (route_top_k, replay_routing, custom_router, partial(route_top_k)):
        check_router(router, CFG)


def test_a_mesh_router_is_tried_on_one_piece():
    mesh = make_mesh(MeshConfig(fsdp=2))
    check_router(sharded_ops(OPS, mesh, CFG).router, CFG)  # tries one row, which no two share
    for inner in (partial(shift_experts), shift_experts):
        ops = sharded_ops(replace(OPS, router=inner), mesh, CFG)
        with pytest.raises(ConfigError, match="shift_experts must return experts from 0 to 4"):
            check_router(ops.router, CFG)


@pytest.mark.parametrize("mesh", [None, MeshConfig(fsdp=2)])
def test_attention_that_returns_heads_first_is_named(mesh):
    ops = sharded_ops(replace(OPS, attend=heads_first), mesh and make_mesh(mesh), CFG)
    with pytest.raises(ConfigError, match=r"ops.attend: heads_first must return \[B, T, N, H\]"):
        trace_forward(ops)


def test_parameters_of_another_width_are_refused():
    params = init_params(jax.random.key(0), replace(CFG, d_model=32))
    with pytest.raises(ConfigError, match="these params belong to another config"):
        jax.eval_shape(lambda params: forward(params, TOKENS, CFG, OPS)[0], params)


@pytest.mark.parametrize("token", [-1, CFG.vocab_size, 900])
def test_a_token_outside_the_vocabulary_makes_rows_nan(token):
    @jax.jit
    def score_tokens(tokens_BT):
        hidden_BTD, _, _ = forward(MODEL, tokens_BT, CFG, OPS)
        return sequence_logprobs(MODEL, hidden_BTD, tokens_BT, CFG, OPS)[0]

    good, bad = score_tokens(TOKENS), score_tokens(TOKENS.at[2, 7].set(token))
    assert np.isnan(np.asarray(bad[2, 7:])).all()
    np.testing.assert_array_equal(np.delete(bad, 2, 0), np.delete(good, 2, 0))
    last = score_tokens(TOKENS.at[2, -1].set(token))  # which nothing reads, and is predicted
    assert np.isnan(np.asarray(last[2, -1]))
