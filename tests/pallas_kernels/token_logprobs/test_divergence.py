# SPDX-License-Identifier: Apache-2.0
"""Divergences over the vocabulary against float64, their exact zeros, and their memory."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_logprobs import divergence, token_logprobs, vocabulary_divergences, xla
from tests.pallas_kernels.three_way import three_way

NAMES = ("reverse", "forward", "dhidden", "dw_head")
WIDTH, TEACHER_WIDTH = 13, 7


@pytest.fixture
def small_blocks(monkeypatch):
    """Two blocks of tokens and two of words, which overlap, at small sizes."""
    monkeypatch.setattr(xla, "TOKEN_BLOCK", 128)
    monkeypatch.setattr(divergence, "COLUMNS", 256)


def compiled(vocab_size):
    def run(cotangents, hidden, w_head, *rest):
        def fn(hidden, w_head):
            return vocabulary_divergences(
                hidden, w_head, *rest[:2], temperature=rest[2], vocab_size=vocab_size
            )

        out, pull = jax.vjp(fn, hidden, w_head)
        return *out, *pull(cotangents)

    return jax.jit(run)


def operands(tokens, columns, dtype=jnp.float32, scale=1.0, seed=0):
    keys = iter(jax.random.split(jax.random.key(seed), 5))
    shapes = (tokens, WIDTH), (WIDTH, columns), (tokens, TEACHER_WIDTH), (TEACHER_WIDTH, columns)
    arrays = [scale * jax.random.normal(next(keys), shape) for shape in shapes]
    return [x.astype(dtype) for x in arrays], tuple(jax.random.normal(next(keys), (2, tokens)))


def oracle(arrays, temperature, vocab_size, cotangents):
    """Values and gradients in float64, from the written-out derivative."""
    hidden, w_head, teacher, head = (np.asarray(x.astype(jnp.float32), np.float64) for x in arrays)
    dreverse, dforward = (np.asarray(x, np.float64)[:, None] for x in cotangents)

    def log_softmax(z):
        z = z - z.max(1, keepdims=True)
        return z - np.log(np.exp(z).sum(1, keepdims=True))

    logp = log_softmax(hidden @ w_head[:, :vocab_size] / temperature)
    logq = log_softmax(teacher @ head[:, :vocab_size] / temperature)
    p, q = np.exp(logp), np.exp(logq)
    reverse, forward = (p * (logp - logq)).sum(1), (q * (logq - logp)).sum(1)
    dz = dreverse * p * (logp - logq - reverse[:, None]) + dforward * (p - q)
    dz /= temperature
    dw = np.zeros(w_head.shape)
    dw[:, :vocab_size] = hidden.T @ dz
    return reverse, forward, dz @ w_head[:, :vocab_size].T, dw


def naive(arrays, temperature, vocab_size, cotangents, dtype):
    """The formula with all logits, differentiated by JAX."""

    def fn(hidden, w_head):
        logp, logq = (
            jax.nn.log_softmax(
                jnp.dot(h, w[:, :vocab_size], preferred_element_type=dtype).astype(jnp.float32)
                / temperature
            )
            for h, w in ((hidden, w_head), arrays[2:])
        )
        return (jnp.exp(logp) * (logp - logq)).sum(1), (jnp.exp(logq) * (logq - logp)).sum(1)

    def run(hidden, w_head):
        out, pull = jax.vjp(fn, hidden, w_head)
        return *out, *pull(cotangents)

    return jax.jit(run)(*arrays[:2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "columns", "vocab_size", "temperature", "scale"),
    [
        (5, 11, 11, 1.0, 1.0),
        (6, 37, 29, 0.7, 3.0),  # columns past the words
        (150, 310, 300, 1.3, 1.0),
    ],
)
def test_values_and_gradients_are_those_of_float64(
    tokens, columns, vocab_size, temperature, scale, dtype, small_blocks
):
    arrays, cotangents = operands(tokens, columns, dtype, scale)
    actual = compiled(vocab_size)(cotangents, *arrays, jnp.float32(temperature))
    exact = oracle(arrays, temperature, vocab_size, cotangents)
    simple = naive(arrays, temperature, vocab_size, cotangents, dtype)
    assert [x.dtype for x in actual] == [jnp.float32, jnp.float32, dtype, dtype]
    for name, x, simple_x, expected in zip(NAMES, actual, simple, exact, strict=True):
        three_way(x, simple_x, expected, name, ulps=4.0)


@pytest.mark.slow  # a padded vocabulary of few entries has the same terms
def test_the_real_vocabulary_has_the_values_of_float64():
    arrays, cotangents = operands(5, 201_216, scale=2.0)
    actual = compiled(201_088)(cotangents, *arrays, jnp.float32(1.0))
    exact = oracle(arrays, 1.0, 201_088, cotangents)
    simple = naive(arrays, 1.0, 201_088, cotangents, jnp.float32)
    for name, x, simple_x, expected in zip(NAMES, actual, simple, exact, strict=True):
        three_way(x, simple_x, expected, name, ulps=4.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("columns", [37, 300])
def test_a_teacher_like_the_student_gives_exact_zeros(columns, dtype, small_blocks):
    (hidden, w_head, *_), cotangents = operands(150, columns, dtype, 2.0)
    results = compiled(columns)(cotangents, hidden, w_head, hidden, w_head, jnp.float32(0.9))
    assert not any(np.any(np.asarray(x.astype(jnp.float32))) for x in results)


def test_no_gradient_flows_to_the_teacher():
    (hidden, w_head, *teacher), _ = operands(5, 11)

    def total(*teacher):
        return sum(map(jnp.sum, vocabulary_divergences(hidden, w_head, *teacher)))

    assert not any(np.any(x) for x in jax.grad(total, (0, 1))(*teacher))


def test_far_logits_give_finite_divergences():
    (hidden, w_head, teacher, head), cotangents = operands(6, 37, scale=60.0)
    results = compiled(37)(cotangents, hidden, w_head, teacher, head, jnp.float32(1.0))
    assert all(np.isfinite(x).all() for x in results) and float(results[0].max()) > 1e3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: jnp.zeros((4, TEACHER_WIDTH))}, "hidden states of the same 5 tokens"),
        ({3: jnp.zeros((TEACHER_WIDTH, 10))}, "with 11 words or more"),
        ({3: jnp.zeros((WIDTH, 11))}, "a head of their width"),
        ({1: jnp.zeros((TEACHER_WIDTH, 11))}, "hidden must have 7 columns"),
    ],
)
def test_a_teacher_of_other_sizes_is_refused(change, message):
    arrays, _ = operands(5, 11)
    for place, array in change.items():
        arrays[place] = array
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(vocabulary_divergences)(*arrays)  # without the tests' check of shapes


def temporaries(fn, *shapes):
    return jax.jit(fn).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def test_real_vocabulary_takes_the_memory_of_logprobs():
    tokens, width, columns = 8192, 2880, 201_216

    # In float32: a CPU converts bfloat16 heads as one, each model's.
    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def divergence_loss(hidden, w_head, teacher, head):
        return sum(map(jnp.sum, vocabulary_divergences(hidden, w_head, teacher, head)))

    def logprob_loss(hidden, w_head, targets):
        return sum(map(jnp.sum, token_logprobs(hidden, w_head, targets, impl="xla")))

    student = shape(tokens, width), shape(width, columns)
    divergences = temporaries(jax.grad(divergence_loss, (0, 1)), *student, *student)
    logprobs = temporaries(jax.grad(logprob_loss, (0, 1)), *student, shape(tokens, dtype=jnp.int32))
    print(f"{divergences / logprobs:.2f}x: {divergences / 1e6:.0f} of {logprobs / 1e6:.0f} MB")
    assert divergences <= 1.2 * logprobs
