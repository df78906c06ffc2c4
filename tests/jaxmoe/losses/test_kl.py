# SPDX-License-Identifier: Apache-2.0
"""Estimators of KL: by hand, in expectation over a whole vocabulary, and at their edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jaxmoe.losses import (
    explained_variance,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_importance,
    kl_k3_with_k2_gradient,
    ppo_clip,
)
from jaxmoe.losses.ratios import k3_from_log_ratio

EPS = float(np.finfo(np.float32).eps)


def value_and_gradient(logp, logq):
    p, q = jnp.asarray([logp], jnp.float32), jnp.asarray([logq], jnp.float32)
    return np.asarray(kl_k1(p, q))[0], np.asarray(kl_k3(p, q))[0]


def test_hand_worked_pair():
    # p = 0.5, q = 0.25: k1 = ln 2, k3 = 0.5 - 1 + ln 2
    k1, k3 = value_and_gradient([np.log(0.5)], [np.log(0.25)])
    np.testing.assert_allclose(k1, [np.log(2)], rtol=4 * EPS)
    np.testing.assert_allclose(k3, [np.log(2) - 0.5], atol=4 * EPS)


def test_both_average_to_the_true_divergence():
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(97)) / 2 + 1 / 194 for _ in range(2))  # no token at the bound
    want = np.sum(p * np.log(p / q))
    for estimate in value_and_gradient(np.log(p), np.log(q)):
        # each token's error is a few ulp of its log-probs, which are below 20
        assert abs(np.sum(p * estimate) - want) <= 20 * 4 * EPS


@given(st.floats(-50, 0, width=32), st.floats(-50, 0, width=32))
def test_k3_is_never_negative_and_zero_between_equals(a, b):
    assert value_and_gradient([a], [b])[1][0] >= 0
    assert value_and_gradient([a], [a])[1][0] == 0


def test_close_pairs_keep_their_digits():
    # d²/2 for log-ratio d: exp(d) - 1 - d would cancel to nothing in float32
    d = float(np.float32(1e-3))
    want = np.expm1(d) - d
    assert abs(value_and_gradient([0.0], [d])[1][0] - want) <= 2 * EPS * d


@pytest.mark.paper
def test_k3_with_k2_gradient_has_value_and_slope():
    # verl tests/trainer/ppo/test_core_algos_on_cpu.py asserts the same of its "k3+"
    logp, logq = jnp.asarray([[-1.0, -0.2]]), jnp.asarray([[-1.5, -2.2]])

    def total(estimate):
        return jax.value_and_grad(lambda x: estimate(x, logq).sum())(logp)

    value, grad = total(kl_k3_with_k2_gradient)
    np.testing.assert_allclose(value, total(kl_k3)[0], rtol=2 * EPS)
    np.testing.assert_allclose(grad, total(kl_k2)[1], rtol=2 * EPS)
    np.testing.assert_allclose(grad, logp - logq, rtol=2 * EPS)
    assert float(jnp.abs(grad - total(kl_k3)[1]).max()) > 0.1


@pytest.mark.paper
def test_k3_is_held_at_ten_as_verls_is():
    # verl verl/trainer/ppo/core_algos.py, kl_penalty_forward: the input at 20, the output at 10
    logq = jnp.asarray([[2.5, 3.0, 25.0, -9.0, -12.0]])
    value, pull = jax.vjp(lambda x: kl_k3(x, logq), jnp.zeros_like(logq))
    want = [np.exp(2.5) - 3.5, 10.0, 10.0, np.exp(-9.0) + 8, 10.0]
    np.testing.assert_allclose(value[0], want, rtol=8 * EPS)
    assert (np.asarray(pull(jnp.ones_like(logq))[0])[0] != 0).tolist() == [
        True,
        False,
        False,
        True,
        False,
    ]
    np.testing.assert_allclose(
        k3_from_log_ratio(logq)[0, 1], np.exp(3.0) - 4, rtol=8 * EPS
    )  # a measurement


def test_half_precision_is_widened_before_it_is_subtracted():
    logp, logq = (jnp.asarray([[x]], jnp.bfloat16) for x in (-8.0, -8.0625))
    assert float(kl_k1(logp, logq)[0, 0]) == 0.0625
    # -8 - 0.0546875 has no bfloat16: subtracting there would round to another token's ratio
    old, unit = jnp.asarray([[0.0546875]], jnp.bfloat16), jnp.ones((1, 1))
    terms = ppo_clip(logp, old, unit, jnp.ones((1, 1), bool), clip_low=1.0)
    assert float(terms[0, 0]) == pytest.approx(-np.exp(-8.0546875), rel=4 * EPS)
    large = jnp.asarray([[8.0, 0.03125]], jnp.bfloat16)
    values, mask = jnp.asarray([[0.0546875, 0.0]], jnp.bfloat16), jnp.ones((1, 2), bool)
    error = np.float64(large) - np.float64(values)
    want = 1 - error.var() / np.float64(large).var()
    assert float(explained_variance(values, large, mask)) == pytest.approx(want, rel=64 * EPS)


def test_ratio_weighted_k3_has_the_divergences_gradient():
    # exactly, by enumeration of a vocabulary; the tokens are another policy's
    dice = np.random.default_rng(1)
    logits, q, mu = (jnp.asarray(dice.normal(size=11) / 2, jnp.float32) for _ in range(3))
    logq, log_mu = jax.nn.log_softmax(q)[None], jax.nn.log_softmax(mu)[None]

    def true(x):
        logp = jax.nn.log_softmax(x)[None]
        return jnp.sum(jnp.exp(logp) * (logp - logq))

    def drawn(x, estimate, old=log_mu):
        logp = jax.nn.log_softmax(x)[None]
        return jnp.sum(jnp.exp(old) * estimate(logp, logq, old))

    want = jax.value_and_grad(true)(logits)
    for old in (log_mu, jax.nn.log_softmax(logits)[None]):  # off-policy; and where the ratio is 1
        actual = jax.value_and_grad(lambda x, o=old: drawn(x, kl_k3_importance, o))(logits)
        np.testing.assert_allclose(actual[0], want[0], rtol=1e-5)
        np.testing.assert_allclose(actual[1], want[1], atol=1e-6)
        bare = jax.grad(lambda x, o=old: drawn(x, lambda p, q, _: kl_k3(p, q), o))(logits)
        assert np.abs(bare - want[1]).max() > 0.01


def test_misshaped_arrays_are_errors_in_tests():
    """By tests/conftest.py; users have the messages of test_same_shape.py."""
    with pytest.raises(TypeCheckError):
        kl_k1(jnp.ones((3, 5)), jnp.ones((3, 4)))
