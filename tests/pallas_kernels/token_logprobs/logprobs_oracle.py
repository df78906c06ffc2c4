# SPDX-License-Identifier: Apache-2.0
"""Values and gradients of token log-probs in float64, of the plain formula, and of a kernel."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.pallas_kernels.three_way import three_way

NAMES = ("logp", "entropy", "dhidden", "dw_head")


def cotangents(n_tokens):
    return tuple(jax.random.normal(jax.random.key(9), (2, n_tokens)))


def oracle(hidden, words, targets, temperature, cotangents):
    """Values and both gradients in float64, from the written-out derivative."""
    f64 = lambda x: np.asarray(x.astype(jnp.float32), np.float64)  # noqa: E731
    hidden, words, (dlogp, dent) = f64(hidden), f64(words), map(f64, cotangents)
    temperature = float(np.float32(temperature))
    rows = np.arange(len(targets)), np.asarray(targets)
    z = hidden @ words / temperature
    log_p = z - z.max(1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(1)
    dz = -p * (dlogp[:, None] + dent[:, None] * (log_p + entropy[:, None]))
    dz[rows] += dlogp
    dz /= temperature
    return log_p[rows], entropy, dz @ words.T, hidden.T @ dz


def naive(hidden, words, targets, temperature, dtype):
    """The formula with logits of `dtype`, differentiated by JAX."""
    z = jnp.dot(hidden, words, preferred_element_type=dtype).astype(jnp.float32) / temperature
    log_p = jax.nn.log_softmax(z, axis=-1)
    logp = jnp.take_along_axis(log_p, targets[:, None], axis=1)[:, 0]
    return logp, -(jnp.exp(log_p) * log_p).sum(1)


def values_and_gradients(f, cotangents, *args):
    def run(cotangents, *args):
        out, pull = jax.vjp(f, *args)
        return *out, *pull(cotangents)

    return jax.jit(run)(cotangents, *args)


def kernel_results(kernel, case, hidden, w_head, targets):
    """Values and gradients of an interpreted kernel."""
    temperature = jnp.float32(case.temperature)
    return values_and_gradients(
        lambda h, w: kernel(h, w, targets, temperature, case.vocab_size, interpret=True),
        cotangents(case.M),
        hidden,
        w_head,
    )


def check_kernel(kernel, case, hidden, w_head, targets, ulps=2.0):
    """Assert the three-way rule for an interpreted kernel, and gradients of 0 past the words.

    The values are held to logits in float32, the gradients to logits and dz in the inputs' dtype.
    """
    dtype, words = hidden.dtype, w_head[:, : case.vocab_size]
    ct, temperature = cotangents(case.M), jnp.float32(case.temperature)
    exact = oracle(hidden, words, targets, temperature, ct)
    values = naive(hidden, words, targets, temperature, jnp.float32)
    plain = values_and_gradients(
        lambda h, w: naive(h, w, targets, temperature, dtype), ct, hidden, words
    )
    results = kernel_results(kernel, case, hidden, w_head, targets)
    assert [x.dtype for x in results] == [jnp.float32, jnp.float32, dtype, dtype]
    assert not np.any(results[3][:, case.vocab_size :])
    results = *results[:3], results[3][:, : case.vocab_size]
    simple = *values, *plain[2:]
    for name, actual, simple_x, expected in zip(NAMES, results, simple, exact, strict=True):
        three_way(actual, simple_x, expected, f"{case.name} {name}", ulps=ulps)
