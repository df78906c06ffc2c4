# SPDX-License-Identifier: Apache-2.0
"""Logits of listed words and of all others against float64: values, gradients, blocks, borders."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_logprobs import listed, listed_logits, token_logprobs, xla
from tests.pallas_kernels.three_way import three_way

NAMES = ("words", "rest", "dhidden", "dw_head")
WIDTH, MASKED = 13, -1e30


@pytest.fixture
def small_blocks(monkeypatch):
    """Two blocks of tokens and two of words, which overlap, at small sizes."""
    monkeypatch.setattr(xla, "TOKEN_BLOCK", 128)
    monkeypatch.setattr(listed, "VOCAB_BLOCK", 256)


def compiled(vocab_size):
    def run(hidden, w_head, ids, temperature, cotangents):
        options = {"temperature": temperature, "vocab_size": vocab_size}
        out, pull = jax.vjp(lambda h, w: listed_logits(h, w, ids, **options), hidden, w_head)
        return *out, *pull(cotangents)

    return jax.jit(run)


def draw_lists(tokens, words, count, seed=0):
    """Different words at each token; in some rows the last entries are none."""
    dice = np.random.default_rng(seed)
    ids = dice.random((tokens, words)).argsort(axis=1)[:, :count].astype(np.int32)
    ids[::3, count // 2 :] = -1
    return ids


def operands(tokens, columns, ids, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (tokens, WIDTH)).astype(dtype)
    w_head = jax.random.normal(keys[1], (WIDTH, columns)).astype(dtype)
    cotangents = jax.random.normal(keys[2], ids.shape), jax.random.normal(keys[3], (tokens,))
    return hidden, w_head, jnp.asarray(ids), cotangents


def oracle(hidden, w_head, ids, cotangents, temperature, vocab_size):
    """Values and gradients in float64, word by word."""
    hidden, w_head = (np.asarray(x.astype(jnp.float32), np.float64) for x in (hidden, w_head))
    ids, (dwords, drest) = np.asarray(ids), (np.asarray(x, np.float64) for x in cotangents)
    z = hidden @ w_head[:, :vocab_size] / temperature
    words, rest, dz = np.full(ids.shape, MASKED), np.zeros(len(z)), np.zeros(z.shape)
    for m, row in enumerate(ids):
        others = np.setdiff1d(np.arange(vocab_size), row)
        peak = z[m, others].max()
        rest[m] = peak + np.log(np.exp(z[m, others] - peak).sum())
        dz[m, others] = drest[m] * np.exp(z[m, others] - rest[m])
        for k in np.flatnonzero(row >= 0):
            words[m, k], dz[m, row[k]] = z[m, row[k]], dwords[m, k]
    dz, dw = dz / temperature, np.zeros(w_head.shape)
    dw[:, :vocab_size] = hidden.T @ dz
    return words, rest, dz @ w_head[:, :vocab_size].T, dw


def naive(hidden, w_head, ids, cotangents, temperature, vocab_size, dtype):
    """The formula with all logits, differentiated by JAX."""

    def fn(hidden, w_head):
        z = jnp.dot(hidden, w_head[:, :vocab_size], preferred_element_type=dtype)
        z = z.astype(jnp.float32) / temperature
        is_listed = (ids[:, :, None] == jnp.arange(vocab_size)[None, None, :]).any(axis=1)
        words = jnp.take_along_axis(z, jnp.maximum(ids, 0), axis=1)
        rest = jax.nn.logsumexp(jnp.where(is_listed, -jnp.inf, z), axis=1)
        return jnp.where(ids >= 0, words, MASKED), rest

    def run(hidden, w_head):
        out, pull = jax.vjp(fn, hidden, w_head)
        return *out, *pull(cotangents)

    return jax.jit(run)(hidden, w_head)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "columns", "vocab_size", "count", "temperature"),
    [
        (5, 11, 11, 10, 1.0),  # all words but one
        (6, 37, 29, 3, 0.7),  # columns past the words
        (150, 410, 400, 7, 1.0),
        (4, 201_216, 201_088, 20, 1.0),  # the real vocabulary, 786 blocks
    ],
)
def test_listed_logits_are_those_of_float64(
    tokens, columns, vocab_size, count, temperature, dtype, small_blocks
):
    ids = draw_lists(tokens, vocab_size, count)
    ids[1, 0] = vocab_size - 1 if vocab_size - 1 not in ids[1] else ids[1, 0]
    if tokens == 150:  # the first and last words of the two blocks, which share 112
        ids[1, :4], ids[2, :4] = (0, 255, 256, 399), (143, 144, 145, 254)
    hidden, w_head, ids, cotangents = operands(tokens, columns, ids, dtype)
    actual = compiled(vocab_size)(hidden, w_head, ids, jnp.float32(temperature), cotangents)
    sizes = cotangents, temperature, vocab_size
    exact = oracle(hidden, w_head, ids, *sizes)
    simple = naive(hidden, w_head, ids, *sizes, dtype)
    assert [x.dtype for x in actual] == [jnp.float32, jnp.float32, dtype, dtype]
    for name, x, simple_x, expected in zip(NAMES, actual, simple, exact, strict=True):
        masked = expected == MASKED
        assert (np.asarray(x)[masked] == np.float32(MASKED)).all()
        x, simple_x = (jnp.where(masked, 0, y) for y in (x, simple_x))
        three_way(x, simple_x, np.where(masked, 0.0, expected), name, ulps=4.0)


def test_large_logits_keep_the_rest_exact(small_blocks):
    """A word 400 nats above all others: 1 minus its probability would be 0 in float32."""
    hidden, w_head = jnp.ones((2, WIDTH)), jnp.zeros((WIDTH, 300)).at[:, 290].set(400 / WIDTH)
    ids = jnp.array([[290, 7], [7, -1]], jnp.int32)
    cotangents = jnp.ones((2, 2)), jnp.ones(2)
    words, rest, dhidden, dw = compiled(300)(hidden, w_head, ids, jnp.float32(1.0), cotangents)
    np.testing.assert_allclose(words, [[400, 0], [0, MASKED]], rtol=1e-6)
    np.testing.assert_allclose(rest, [np.log(298), 400], rtol=1e-6)
    # The second token has all of the rest at its likeliest word.
    np.testing.assert_allclose(dw[:, 290], 2.0, rtol=1e-6)
    np.testing.assert_allclose(dw[:, 8], 1 / 298, rtol=1e-6)
    np.testing.assert_allclose(dhidden, 400 / WIDTH, rtol=1e-6)


def test_softmax_of_the_outcomes_has_the_log_probs():
    hidden, w_head, ids, _ = operands(6, 29, draw_lists(6, 29, 4))
    words, rest = jax.jit(listed_logits)(hidden, w_head, ids)
    logp = words[:, 0] - jnp.logaddexp(jax.nn.logsumexp(words, axis=1), rest)
    want, _ = token_logprobs(hidden, w_head, ids[:, 0], impl="xla")
    np.testing.assert_allclose(logp, want, rtol=1e-5, atol=1e-6)


def test_no_token_has_no_logits():
    hidden, w_head, ids, cotangents = operands(0, 29, draw_lists(0, 29, 4))
    words, rest, dhidden, dw = compiled(29)(hidden, w_head, ids, jnp.float32(1.0), cotangents)
    assert words.shape == (0, 4) and rest.shape == (0,) and dhidden.shape == hidden.shape
    assert not dw.any()


def test_a_list_of_other_tokens_is_refused():
    hidden, w_head, ids, _ = operands(6, 29, draw_lists(6, 29, 4))
    with pytest.raises(ValueError, match="one id for each of the 6 rows"):
        inspect.unwrap(listed_logits)(hidden, w_head, ids[:5])


def test_the_real_vocabulary_takes_the_memory_of_logprobs():
    tokens, width, columns, count = 8192, 2880, 201_216, 20

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def listed_loss(hidden, w_head, ids):
        return sum(map(jnp.sum, listed_logits(hidden, w_head, ids)))

    def logprob_loss(hidden, w_head, targets):
        return sum(map(jnp.sum, token_logprobs(hidden, w_head, targets, impl="xla")))

    student = shape(tokens, width), shape(width, columns)
    of_lists, of_targets = (
        jax.jit(jax.grad(fn, (0, 1)))
        .lower(*student, shape(*sizes, dtype=jnp.int32))
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for fn, sizes in ((listed_loss, (tokens, count)), (logprob_loss, (tokens,)))
    )
    print(f"{of_lists / of_targets:.2f}x: {of_lists / 1e6:.0f} of {of_targets / 1e6:.0f} MB")
    assert of_lists <= 1.2 * of_targets
