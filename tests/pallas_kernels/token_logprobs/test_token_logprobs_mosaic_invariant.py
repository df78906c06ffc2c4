# SPDX-License-Identifier: Apache-2.0
"""Batch invariance of log-probs by the GPU and TPU kernels, interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import token_logprobs
from pallas_kernels.token_logprobs import mosaic_invariant
from tests.pallas_kernels.interpreted import INVARIANT, TPU, interpreted

M, D, V, WORDS = 300, 64, 1024, 1000


def inputs():
    hidden, head = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(M, D), (D, V)]))
    targets = jax.random.randint(jax.random.key(2), (M,), 0, WORDS)
    return hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), targets


arrays = pytest.fixture(scope="module")(inputs)


def differing(arrays, impl):
    """Number of results that differ for a batch of 5 tokens with a traced temperature."""
    hidden, head, targets = arrays
    run = partial(token_logprobs, vocab_size=WORDS, impl=impl)
    trainer = jax.jit(partial(run, temperature=0.7))
    engine = jax.jit(lambda h, w, t, temperature: run(h, w, t, temperature=temperature))
    full = [np.asarray(x) for x in trainer(hidden, head, targets)]
    subset = np.array([0, 7, 130, 255, 299])
    few = engine(hidden[subset], head, targets[subset], jnp.float32(0.7))
    pairs = zip(few, full, strict=True)
    return sum(int((np.asarray(a) != b[subset]).sum()) for a, b in pairs), full


@pytest.mark.parametrize("impl", INVARIANT)
def test_a_tokens_bits_ignore_other_tokens(arrays, impl):
    with interpreted(impl):
        n_differing, (logp, entropy) = differing(arrays, impl)
    assert n_differing == 0
    hidden, head, targets = arrays
    expected = token_logprobs(
        hidden.astype(jnp.float32),
        head.astype(jnp.float32),
        targets,
        temperature=0.7,
        vocab_size=WORDS,
        impl="reference",
    )
    np.testing.assert_allclose(logp, expected[0], atol=1e-4)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-4)


@pytest.mark.parametrize("undone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_untiled_merges_change_a_tokens_bits(arrays, undone, monkeypatch):
    """For 8 and 304 tokens XLA for CPU orders sums differently; for 256 and 512 it does not."""
    monkeypatch.setattr(mosaic_invariant, "ROWS", 8)
    if undone:
        monkeypatch.setattr(mosaic_invariant, "map_tiles", lambda fn, rows, **_: fn(rows, ()))
    jax.clear_caches()
    with interpreted(TPU):
        assert (differing(arrays, TPU)[0] > 0) == undone
    jax.clear_caches()


def test_gradients_are_those_of_the_reference(arrays):
    hidden, head = (x.astype(jnp.float32) for x in arrays[:2])
    weights = jax.random.normal(jax.random.key(9), (2, M))

    def total(run, hidden, head):
        results = run(hidden, head, arrays[2], temperature=0.7, vocab_size=WORDS)
        return sum(jnp.sum(x * w) for x, w in zip(results, weights, strict=True))

    with interpreted(TPU):
        run = partial(token_logprobs, impl=TPU)
        actual = jax.grad(partial(total, run), argnums=(0, 1))(hidden, head)
    expected = jax.grad(partial(total, partial(token_logprobs, impl="reference")), argnums=(0, 1))(
        hidden, head
    )
    for a, b in zip(actual, expected, strict=True):
        assert np.abs(a - b).max() < 2e-5 * np.abs(b).max()
