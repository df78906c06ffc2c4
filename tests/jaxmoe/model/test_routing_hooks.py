# SPDX-License-Identifier: Apache-2.0
"""What a forward takes instead of its own router, and what it may keep of it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.model import forward, plain_ops
from jaxmoe.model.moe.router import record_experts, replay_routing, route_top_k, router_logits
from jaxmoe.model.params import map_specs
from tests.jaxmoe.small_models import SEVEN_EXPERTS as SMALL

OPS = plain_ops()
CFG = replace(SMALL, n_layers=4)
TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, 97, (2, 13)), jnp.int32)


def make_params():
    rng = np.random.default_rng(0)
    return map_specs(lambda s: jnp.asarray(0.3 * rng.normal(size=s.shape), jnp.float32), CFG)


@partial(jax.jit, static_argnames=("router", "record"))
def run_forward(params, replayed_experts=None, router=route_top_k, record=record_experts):
    ops = replace(OPS, router=router, record=record)
    if replayed_experts is not None:
        replayed_experts = jnp.moveaxis(replayed_experts, 0, 2)
    hidden, _, recorded = forward(params, TOKENS, CFG, ops, routed_experts_BTLA=replayed_experts)
    return hidden, recorded["experts_BTA"] if record is record_experts else recorded


def test_replaying_its_own_experts_changes_nothing():
    p = make_params()
    hidden, chosen = run_forward(p)
    replayed_twice, replayed = run_forward(p, chosen, router=replay_routing)
    np.testing.assert_array_equal(chosen, replayed)
    np.testing.assert_allclose(
        replayed_twice, hidden, rtol=0, atol=1e-5 * float(jnp.abs(hidden).max())
    )
    left_alone, expected = run_forward(p, jnp.full_like(chosen, -1), router=replay_routing)
    np.testing.assert_array_equal(expected, chosen)
    np.testing.assert_array_equal(left_alone, replayed_twice)


def test_each_layer_gets_the_experts_given_for_it():
    p, (hidden, chosen) = make_params(), run_forward(make_params())
    replayed_experts = np.asarray(chosen).copy()
    replayed_experts[2, 1, 5] = [6, 0, 1, 2]
    rerouted, used = run_forward(p, jnp.asarray(replayed_experts), router=replay_routing)
    np.testing.assert_array_equal(used, replayed_experts)
    moved = np.abs(np.asarray(rerouted - hidden)).max(axis=-1)
    assert moved[1, 5] > 1e-3 and moved[0].max() < 1e-4 and moved[1, :5].max() < 1e-4


def test_replayed_weights_are_the_softmax_over_given_experts():
    p = {name: x[0] for name, x in make_params()["layers"]["full"].items()}
    h = jnp.asarray(np.random.default_rng(3).normal(size=(1, 29, 48)), jnp.float32)
    replayed_experts = (
        jnp.tile(jnp.asarray([[[2, 0, 5, 1]]], jnp.int32), (1, 29, 1)).at[0, 3].set(-1)
    )
    indices, weights = replay_routing(h, p, active=4, indices_BTA=replayed_experts)
    expected, own_weights = route_top_k(h, p, active=4)
    np.testing.assert_array_equal(indices[0, 3], expected[0, 3])
    np.testing.assert_allclose(weights[0, 3], own_weights[0, 3], rtol=1e-6)
    logits = np.asarray(router_logits(h, p), np.float64)[0, 0, [2, 0, 5, 1]]
    want = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(weights[0, 0], want, rtol=1e-5)


def test_gradients_of_replayed_weights_match_float64_differences():
    rng = np.random.default_rng(5)
    tokens, width, n_experts, active = 7, 10, 6, 3
    values = {
        "h": rng.normal(size=(tokens, width)),
        "w_router": rng.normal(size=(width, n_experts)),
        "b_router": rng.normal(size=n_experts),
    }
    experts = rng.random((tokens, n_experts)).argsort(-1)[:, :active]
    experts_MA = np.where(np.arange(tokens)[:, None] == 2, -1, experts)  # token 2 is unknown
    effect_ME = rng.normal(size=(tokens, n_experts))  # of each expert's output on the loss

    def loss64(x):
        logits = x["h"] @ x["w_router"] + x["b_router"]
        used = np.where(experts_MA < 0, np.argsort(-logits, -1)[:, :active], experts_MA)
        top = np.take_along_axis(logits, used, -1)
        weights = np.exp(top) / np.exp(top).sum(-1, keepdims=True)
        return (weights * np.take_along_axis(effect_ME, used, -1)).sum()

    def loss32(x):
        layer = {"w_router": x["w_router"], "b_router": x["b_router"]}
        used, weights = replay_routing(
            x["h"][None], layer, active=active, indices_BTA=jnp.asarray(experts_MA)[None]
        )
        effects = jnp.take_along_axis(jnp.asarray(effect_ME, jnp.float32)[None], used, -1)
        return jnp.sum(weights * effects)

    gradients = jax.grad(loss32)({name: jnp.asarray(x, jnp.float32) for name, x in values.items()})
    for name, x in values.items():
        expected = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            step = np.zeros_like(x)
            step[index] = 1e-6
            change = loss64(values | {name: x + step}) - loss64(values | {name: x - step})
            expected[index] = change / 2e-6
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_record_is_kept_of_every_layer():
    def record_layer(h_BTD, layer, indices_BTA, weights_BTA):
        return {"weights": weights_BTA, "most": jnp.max(router_logits(h_BTD, layer), axis=-1)}

    _, recorded = run_forward(make_params(), record=record_layer)
    assert recorded["weights"].shape == (4, 2, 13, 4) and recorded["most"].shape == (4, 2, 13)
    np.testing.assert_allclose(recorded["weights"].sum(axis=-1), 1.0, atol=1e-6)
