# SPDX-License-Identifier: Apache-2.0
"""Noise of the router in rollouts: its distribution, its independence, and where it acts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model.moe.router import RouterContext, replay_routing, route_top_k
from jaxmoe.model.moe.router_noise import (
    NOISES,
    gumbel_noise,
    hash_uniform,
    normal_noise,
    route_with_noise,
)

D, E, A = 11, 7, 3
N = 20_000
NOISY = partial(route_with_noise, noise=normal_noise, scale=0.5, seed=3)


def layer_of(rng, scale=1.0):
    return {
        "w_router": jnp.asarray(rng.normal(size=(D, E)) * scale, jnp.float32),
        "b_router": jnp.asarray(rng.normal(size=E) * scale, jnp.float32),
    }


def hidden(n=N, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(1, n, D)), jnp.float32)


def context(step=0, layer=0, exploration=1.0):
    return RouterContext(jnp.int32(layer), jnp.int32(step), jnp.float32(exploration))


@pytest.mark.parametrize(("name", "law"), [("normal", "norm"), ("gumbel", "gumbel_r")])
def test_the_noise_has_its_distribution(name, law):
    from scipy import stats  # a second of a core, which every worker would pay

    values = np.asarray(NOISES[name](hash_uniform(hidden(), E, (0,)))).ravel()
    assert len(values) == N * E
    # A Kolmogorov-Smirnov distance of 140,000 values is above 0.0052 once in a thousand.
    assert stats.kstest(values, getattr(stats, law).cdf).statistic < 0.0052


def test_every_hash_gives_a_finite_number():
    extremes = jnp.asarray([0.5, 2.0**23 - 0.5], jnp.float32) * np.float32(2.0**-23)
    for noise in (normal_noise, gumbel_noise):
        pairs = jnp.stack(jnp.meshgrid(extremes, extremes), axis=-1)
        assert np.isfinite(noise(pairs)).all()
    assert 0.0 < float(extremes[0]) < float(extremes[1]) < 1.0


def test_noise_is_independent_across_tokens_experts_and_steps():
    h_BTD = hidden()
    reference = np.asarray(normal_noise(hash_uniform(h_BTD, E, (5, 2, 3))))[0]
    # The smallest change of one activation.
    nudged_BTD = h_BTD.at[..., 4].set(np.nextafter(h_BTD[..., 4], 9))
    others_noise = {
        "another step": hash_uniform(h_BTD, E, (6, 2, 3)),
        "another layer": hash_uniform(h_BTD, E, (5, 3, 3)),
        "another seed": hash_uniform(h_BTD, E, (5, 2, 4)),
        "another bit": hash_uniform(nudged_BTD, E, (5, 2, 3)),
    }
    bound = 4.5 / np.sqrt(N * E)
    for name, uniform in others_noise.items():
        other = np.asarray(normal_noise(uniform))[0]
        assert abs(np.corrcoef(reference.ravel(), other.ravel())[0, 1]) < bound, name
    between_experts = np.corrcoef(reference.T) - np.eye(E)
    assert np.abs(between_experts).max() < 4.5 / np.sqrt(N)
    assert abs(np.corrcoef(reference[:-1].ravel(), reference[1:].ravel())[0, 1]) < bound


def test_a_tokens_noise_ignores_its_place():
    h_BTD = hidden(12)
    layer, jitted = layer_of(np.random.default_rng(0)), jax.jit(partial(NOISY, active=A))
    batched, _ = jitted(h_BTD, layer, context=context())
    unbatched, _ = jitted(h_BTD.reshape(12, 1, D), layer, context=context())
    np.testing.assert_array_equal(batched[0], unbatched[:, 0])


def test_without_exploration_experts_are_the_top_k():
    h_BTD, layer = hidden(500), layer_of(np.random.default_rng(0))
    expected = route_top_k(h_BTD, layer, active=A)
    indices, weights = NOISY(h_BTD, layer, active=A, context=context(exploration=0.0))
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-6)
    noisy, _ = NOISY(h_BTD, layer, active=A, context=context())
    switched = (np.sort(noisy, -1) != np.sort(expected[0], -1)).any(-1).mean()
    assert 0.1 < switched < 0.9


def test_weights_are_those_of_replaying_the_experts():
    h_BTD, layer = hidden(500), layer_of(np.random.default_rng(0))
    indices, weights = NOISY(h_BTD, layer, active=A, context=context())
    replayed = replay_routing(h_BTD, layer, active=A, indices_BTA=indices)
    np.testing.assert_array_equal(replayed[0], indices)
    np.testing.assert_array_equal(replayed[1], weights)


def test_gumbel_noise_selects_experts_by_probability():
    from scipy import stats

    layer = layer_of(np.random.default_rng(0), scale=0.7)
    single_token = hidden(1)
    # One token's logits, with the noise of many tokens.
    logits_E = np.asarray(single_token @ layer["w_router"] + layer["b_router"][None, None])[0, 0]
    noise = np.asarray(gumbel_noise(hash_uniform(hidden(), E, (1,))))[0]
    counts = np.bincount(np.argmax(logits_E + noise, axis=-1), minlength=E)
    expected = np.exp(logits_E.astype(np.float64))
    expected *= N / expected.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-3
