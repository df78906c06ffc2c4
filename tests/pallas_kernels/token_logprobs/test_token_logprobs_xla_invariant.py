# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant log-probs: equal bits of a row alone, traced or in a gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import token_logprobs

invariant = partial(token_logprobs, impl="xla_invariant")
M, D, V = 45, 24, 61
HIDDEN, HEAD = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(((M, D), (D, V + 3))))
TARGETS = jnp.arange(M) % V


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
