# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant log-probs: values and gradients of the plain ones, equal bits in any batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import token_logprobs

invariant = partial(token_logprobs, impl="xla_invariant")
M, D, V = 45, 24, 61
HIDDEN, HEAD = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((M, D), (D, V + 3))))
TARGETS = jnp.arange(M) % V


def total(hidden, head, fn):
    logp, entropy = fn(hidden, head, TARGETS, temperature=0.7, vocab_size=V)
    return jnp.sum(logp * jnp.cos(jnp.arange(M))) + jnp.sum(entropy**2)


def test_values_and_gradients_equal_the_plain_ones():
    actual, want = (
        jax.jit(jax.value_and_grad(partial(total, fn=fn), (0, 1)))(HIDDEN, HEAD)
        for fn in (invariant, token_logprobs)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, want)


def test_constant_and_traced_temperatures_have_equal_bits():
    expected = jax.jit(partial(invariant, temperature=0.7, vocab_size=V))(HIDDEN, HEAD, TARGETS)
    single = jax.jit(
        lambda h, t, temperature: invariant(h, HEAD, t, temperature=temperature, vocab_size=V)
    )(HIDDEN[9:10], TARGETS[9:10], jnp.float32(0.7))
    assert np.array_equal(single[0][0], expected[0][9]) and np.array_equal(
        single[1][0], expected[1][9]
    )


def test_a_gradient_beside_it_changes_no_bit():
    """The sums that the gradient asks for would be compiled with the others, or without."""
    run = partial(invariant, temperature=0.7, vocab_size=V)
    plain = jax.jit(run)(HIDDEN, HEAD, TARGETS)[0]

    def loss(hidden):
        logp, _ = run(hidden, HEAD, TARGETS)
        return jnp.sum(logp), logp

    assert np.array_equal(jax.jit(jax.grad(loss, has_aux=True))(HIDDEN)[1], plain)
