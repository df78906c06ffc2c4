# SPDX-License-Identifier: Apache-2.0
"""A teacher's advantages, and how its weight falls."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.losses import reinforce
from jaxmoe.losses.distillation import annealed_share, teacher_advantages

RNG = np.random.default_rng(0)
ENDS = np.array([7, 3, 5])[:, None]
MASK_BT = (np.arange(7)[None] >= 2) & (np.arange(7)[None] < ENDS) & (np.arange(7)[None] != 4)
OLD_BT, TEACHER_BT = -RNG.exponential(2.0, (2, 3, 7))


def test_advantages_are_log_ratios_on_ragged_masks():
    actual = teacher_advantages(*map(jnp.float32, (OLD_BT, TEACHER_BT)), jnp.asarray(MASK_BT))
    want = np.where(MASK_BT, TEACHER_BT - OLD_BT, 0.0)
    np.testing.assert_allclose(actual, want, rtol=1e-6, atol=4e-7)
    assert (np.asarray(actual)[~MASK_BT] == 0).all()


def test_a_masked_token_may_have_any_log_prob():
    old = jnp.where(MASK_BT, OLD_BT, jnp.nan).astype(jnp.float32)
    actual = teacher_advantages(old, jnp.float32(TEACHER_BT), jnp.asarray(MASK_BT))
    assert np.isfinite(actual).all()


def test_no_gradient_flows_through_the_advantages():
    old, teacher = jnp.float32(OLD_BT), jnp.float32(TEACHER_BT)

    def total(old, teacher):
        return jnp.sum(teacher_advantages(old, teacher, jnp.asarray(MASK_BT)))

    for gradient in jax.grad(total, (0, 1))(old, teacher):
        assert not np.asarray(gradient).any()


def test_the_policy_gradient_is_that_of_minus_kl():
    """All tokens of one state, weighted by their probability: −Σ p·(log q − log p)·∇log p."""
    z_V, q_V = (jnp.asarray(RNG.normal(size=6), jnp.float32) for _ in range(2))
    logq_V = jax.nn.log_softmax(q_V)

    def sampled(z_V):
        logp_V = jax.nn.log_softmax(z_V)
        old = jax.lax.stop_gradient(logp_V)[None]
        mask = jnp.ones((1, 6), bool)
        advantages = teacher_advantages(old, logq_V[None], mask)
        return jnp.sum(jnp.exp(old) * reinforce(logp_V[None], advantages, mask))

    def exact(z_V):
        logp_V = jax.nn.log_softmax(z_V)
        return jnp.sum(jnp.exp(logp_V) * (logp_V - logq_V))

    np.testing.assert_allclose(jax.grad(sampled)(z_V), jax.grad(exact)(z_V), rtol=1e-5, atol=1e-6)


def test_a_teachers_weight_falls_to_zero():
    shares = [float(annealed_share(jnp.int32(step), 4)) for step in range(6)]
    assert shares == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert annealed_share(jnp.int32(5), 0) == 1.0
