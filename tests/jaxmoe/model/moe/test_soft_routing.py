# SPDX-License-Identifier: Apache-2.0
"""Routers that give every expert a gradient, against top-k and against float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import forward, plain_ops, sequence_logprobs
from jaxmoe.model.moe.router import RouterContext, route_top_k
from jaxmoe.model.moe.soft_routing import route_annealed, route_softly, route_straight_through
from jaxmoe.model.ops import invariant_ops
from tests.jaxmoe.random_weights import noisy_params
from tests.jaxmoe.small_models import SEVEN_EXPERTS as SMALL

B, T, D, E, A = 2, 5, 11, 7, 3
CFG = replace(SMALL, n_experts=8, experts_per_token=3, vocab_multiple=64)
STEPS = 4
ANNEALED = partial(route_annealed, steps=STEPS)
ROUTERS = {"soft": route_softly, "annealed": ANNEALED, "straight-through": route_straight_through}


def random_layer(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "w_router": jnp.asarray(rng.normal(size=(D, E)), jnp.float32),
        "b_router": jnp.asarray(rng.normal(size=E), jnp.float32),
    }


def hidden(seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, D)), jnp.float32)


def context(step):
    return RouterContext(jnp.int32(0), jnp.int32(step), jnp.float32(0))


def logits64(h_BTD, layer):
    return np.asarray(h_BTD, np.float64) @ np.asarray(layer["w_router"], np.float64) + np.asarray(
        layer["b_router"], np.float64
    )


def softmax64(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def by_expert(indices, weights):
    """Weights in the order of the experts."""
    out = np.zeros((B, T, E))
    np.put_along_axis(out, np.asarray(indices), np.asarray(weights, np.float64), axis=-1)
    return out


def select(router, step=0):
    options = {"context": context(step)} if router is ANNEALED else {}
    return partial(router, active=A, **options)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_first_experts_are_top_ks_in_order(name):
    h_BTD, layer = hidden(), random_layer()
    top_k, _ = route_top_k(h_BTD, layer, active=A)
    indices, _ = select(ROUTERS[name])(h_BTD, layer)
    assert indices.shape == (B, T, E)
    np.testing.assert_array_equal(indices[..., :A], top_k)
    np.testing.assert_array_equal(np.sort(indices, -1), np.broadcast_to(np.arange(E), (B, T, E)))


def test_soft_weights_are_the_softmax_over_all_experts():
    h_BTD, layer = hidden(), random_layer()
    weights = by_expert(*route_softly(h_BTD, layer, active=A))
    np.testing.assert_allclose(weights, softmax64(logits64(h_BTD, layer)), rtol=3e-6)


def test_annealing_reaches_top_k_in_one_compilation():
    h_BTD, layer = hidden(), random_layer()
    routed = jax.jit(
        lambda step: ANNEALED(h_BTD, layer, active=A, context=context(0).replace(step=step))
    )
    top_k, hard = jax.jit(partial(route_top_k, active=A))(h_BTD, layer)
    shares = []
    for step in range(STEPS + 3):
        indices, weights = routed(jnp.int32(step))
        shares.append(float(weights[..., A:].sum()))
        share = max(0.0, 1 - step / STEPS)
        mass = softmax64(logits64(h_BTD, layer))
        selected = np.zeros((B, T, E), bool)
        np.put_along_axis(selected, np.asarray(top_k), True, axis=-1)
        expected = np.where(selected, mass, share * mass)
        expected /= expected.sum(-1, keepdims=True)
        np.testing.assert_allclose(by_expert(indices, weights), expected, rtol=5e-6)
    for step in (STEPS, STEPS + 2, 10**6):
        _, weights = routed(jnp.int32(step))
        # XLA may fuse a program of its own differently, by one rounding; see the invariant forward.
        np.testing.assert_allclose(weights[..., :A], hard, rtol=3e-6)
        assert not weights[..., A:].any()
    assert all(x > y for x, y in zip(shares[:STEPS], shares[1:], strict=False))
    assert routed._cache_size() == 1


@pytest.mark.parametrize("steps", [0, -3])
def test_annealing_over_no_steps_is_refused(steps):
    with pytest.raises(ValueError, match="steps must be positive"):
        route_annealed(hidden(), random_layer(), active=A, context=context(0), steps=steps)


def total(router, h_BTD, layer, values_E):
    """A function of the routing that depends on every weight: Σ w_e · value_e."""
    indices, weights = router(h_BTD, layer)
    return jnp.sum(weights * values_E[indices])


@pytest.mark.parametrize(
    ("name", "step"), [("soft", 0), ("annealed", 0), ("annealed", 1), ("annealed", STEPS)]
)
def test_gradients_agree_with_central_differences_in_float64(name, step):
    h_BTD, layer = hidden(), random_layer()
    values_E = np.random.default_rng(5).normal(size=E)
    gradient = jax.grad(
        lambda w: total(
            select(ROUTERS[name], step),
            h_BTD,
            layer | {"w_router": w},
            jnp.asarray(values_E, jnp.float32),
        )
    )(layer["w_router"])
    share = 1.0 if name == "soft" else max(0.0, 1 - step / STEPS)
    top = np.argsort(-logits64(h_BTD, layer), axis=-1)[..., :A]

    def value(w):
        logits = logits64(h_BTD, layer | {"w_router": w})
        selected = np.zeros_like(logits, bool)
        np.put_along_axis(selected, top, True, axis=-1)
        mass = softmax64(logits) * np.where(selected, 1.0, share)
        return float(((mass / mass.sum(-1, keepdims=True)) * values_E).sum())

    w, eps = np.asarray(layer["w_router"], np.float64), 1e-5
    for i, j in np.ndindex(4, E):
        shift = np.zeros_like(w)
        shift[i, j] = eps
        expected = (value(w + shift) - value(w - shift)) / (2 * eps)
        assert float(gradient[i, j]) == pytest.approx(expected, rel=1e-3, abs=2e-5)


def test_straight_through_has_top_k_values_soft_gradients():
    h_BTD, layer = hidden(), random_layer()
    values_E = jnp.asarray(np.random.default_rng(5).normal(size=E), jnp.float32)
    _, hard = jax.jit(partial(route_top_k, active=A))(h_BTD, layer)
    _, weights = jax.jit(partial(route_straight_through, active=A))(h_BTD, layer)
    np.testing.assert_allclose(weights[..., :A], hard, rtol=1e-6)
    assert not weights[..., A:].any()
    grads = {
        name: jax.grad(
            lambda b, name=name: total(
                select(ROUTERS[name]), h_BTD, layer | {"b_router": b}, values_E
            )
        )(layer["b_router"])
        for name in ("soft", "straight-through")
    }
    np.testing.assert_array_equal(grads["soft"], grads["straight-through"])
    # Top-k gives no gradient to an expert that no token selects.
    bias = layer["b_router"].at[2].set(-50.0)
    top_k = jax.grad(
        lambda b: total(partial(route_top_k, active=A), h_BTD, layer | {"b_router": b}, values_E)
    )(bias)
    assert float(top_k[2]) == 0.0


def test_straight_through_replays_known_experts_only():
    h_BTD, layer = hidden(), random_layer()
    top_k, _ = route_top_k(h_BTD, layer, active=A)
    replayed = (top_k + 2) % E
    replayed = replayed.at[0, 0].set(-1)
    indices, weights = route_straight_through(h_BTD, layer, active=A, indices_BTA=replayed)
    expected = np.where(np.asarray(replayed) < 0, top_k, replayed)
    np.testing.assert_array_equal(np.sort(indices[..., :A], -1), np.sort(expected, -1))
    logits = np.take_along_axis(logits64(h_BTD, layer), np.asarray(indices[..., :A]), -1)
    np.testing.assert_allclose(weights[..., :A], softmax64(logits), rtol=3e-6)
    assert not weights[..., A:].any()


TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, 97, (4, 12)), jnp.int32)


@partial(jax.jit, static_argnames=("ops",))
def logp_of(params, step, ops):
    out, _, recorded = forward(params, TOKENS, CFG, ops, step=step)
    return sequence_logprobs(params, out, TOKENS, CFG, ops)[0], recorded["experts_BTA"]


@pytest.mark.slow
def test_hard_weights_preserve_the_invariant_forward_bitwise():
    params = jax.jit(lambda: noisy_params(CFG))()
    expected, experts = logp_of(params, jnp.int32(0), invariant_ops(plain_ops()))
    for router, step in ((route_straight_through, 0), (ANNEALED, STEPS), (ANNEALED, 0)):
        ops = invariant_ops(replace(plain_ops(), router=router))
        logp, recorded = logp_of(params, jnp.int32(step), ops)
        # Recorded are the top-k, not all experts.
        assert recorded.shape == experts.shape
        is_soft = router is ANNEALED and step == 0
        assert np.array_equal(logp, expected) != is_soft
        if not is_soft:
            np.testing.assert_array_equal(recorded, experts)
