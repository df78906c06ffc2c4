# SPDX-License-Identifier: Apache-2.0
"""Divergences over listed words and the rest: by hand, as bounds, with a rest of nearly 0."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.losses.distillation import MIN_TAIL, NO_WORD, listed_divergences

VOCAB, K = 7, 3


def log_softmax(z):
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def kl(logp, logq):
    """KL(p‖q) of two vectors, in float64."""
    return float(np.sum(np.exp(logp) * (logp - logq)))


def split(z, ids):
    """Logits of the listed words, and the log-sum-exp of the others."""
    others = np.delete(z, ids)
    peak = others.max()
    return z[ids], peak + np.log(np.exp(others - peak).sum())


def merged(logp, ids):
    """Log-probs of the listed words and of all others as one."""
    return np.append(logp[ids], np.log(np.exp(np.delete(logp, ids)).sum()))


@jax.jit
def compute(words_BTK, rest_BT, logq_BTK):
    """Both divergences and the gradients of each by the logits and the rest."""
    out, pull = jax.vjp(lambda w, r: listed_divergences(w, r, logq_BTK), words_BTK, rest_BT)
    one, zero = jnp.ones_like(rest_BT), jnp.zeros_like(rest_BT)
    return out, pull((one, zero)), pull((zero, one))


def run(z, logq, ids, padding=0):
    """`compute` of one token."""
    words, rest = split(z, ids)
    words, logq_K = (np.append(x, np.full(padding, NO_WORD)) for x in (words, logq[ids]))
    return compute(*(jnp.float32(x) for x in (words[None, None], [[rest]], logq_K[None, None])))


def draw(seed, scale=2.0, words=VOCAB):
    dice = np.random.default_rng(seed)
    z, logq = scale * dice.normal(size=words), log_softmax(scale * dice.normal(size=words))
    return z, logq, np.argsort(-logq)


def test_divergences_are_those_of_the_merged_outcomes():
    z, logq, order = draw(0)
    ids = order[:K]
    (reverse, forward), dreverse, dforward = run(z, logq, ids)
    logp_O, logq_O = merged(log_softmax(z), ids), merged(logq, ids)
    np.testing.assert_allclose(reverse, kl(logp_O, logq_O), rtol=2e-6)
    np.testing.assert_allclose(forward, kl(logq_O, logp_O), rtol=2e-6)
    p, q, gap = np.exp(logp_O), np.exp(logq_O), logp_O - logq_O
    for (dwords, drest), want in ((dreverse, p * (gap - (p * gap).sum())), (dforward, p - q)):
        got = np.append(dwords, drest)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_all_words_but_one_are_the_vocabulary():
    z, logq, order = draw(1)
    (reverse, forward), dreverse, dforward = run(z, logq, order[:-1])
    logp = log_softmax(z)
    np.testing.assert_allclose(reverse, kl(logp, logq), rtol=1e-5)
    np.testing.assert_allclose(forward, kl(logq, logp), rtol=1e-5)
    p, q = np.exp(logp[order]), np.exp(logq[order])
    gap = (logp - logq)[order]
    for (dwords, drest), want in ((dreverse, p * (gap - (p * gap).sum())), (dforward, p - q)):
        np.testing.assert_allclose(np.append(dwords, drest), want, rtol=1e-4, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**30), st.sampled_from([0.1, 1.0, 5.0]))
def test_divergences_never_exceed_the_vocabularys(seed, scale):
    z, logq, order = draw(seed, scale)
    logp = log_softmax(z)
    (reverse, forward), *_ = run(z, logq, order[:K])
    assert 0 <= float(reverse[0, 0]) <= kl(logp, logq) * (1 + 1e-5) + 1e-5
    assert 0 <= float(forward[0, 0]) <= kl(logq, logp) * (1 + 1e-5) + 1e-5


def test_an_entry_without_a_word_counts_as_nothing():
    z, logq, order = draw(2)
    plain, padded = run(z, logq, order[:K]), run(z, logq, order[:K], padding=2)
    for a, b in zip(plain[0], padded[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    for (dwords, drest), (dpadded, drest_padded) in zip(plain[1:], padded[1:], strict=True):
        np.testing.assert_allclose(dpadded[..., :K], dwords, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(drest_padded, drest, rtol=1e-6, atol=1e-7)
        assert not np.asarray(dpadded[..., K:]).any()


def test_a_list_without_words_has_divergence_zero():
    z, logq, _ = draw(3)
    (reverse, forward), *gradients = run(z, logq, np.zeros(0, int), padding=K)
    assert float(reverse[0, 0]) == 0 == float(forward[0, 0])
    assert not any(np.asarray(x).any() for pair in gradients for x in pair)


def test_an_equal_teacher_has_divergence_zero():
    z, _, _ = draw(4)
    logq = log_softmax(z)
    (reverse, forward), *gradients = run(z, logq, np.argsort(-logq)[:K])
    assert 0 <= float(reverse[0, 0]) < 3e-7 and 0 <= float(forward[0, 0]) < 3e-7
    assert max(np.abs(x).max() for pair in gradients for x in pair) < 3e-7


def test_peaked_distributions_have_finite_gradients():
    """The likeliest word has 1 − 1e-7 or more of the teacher, of the policy, or of both."""
    flat, peaked = np.zeros(VOCAB), np.array([0.0, *(VOCAB - 1) * [np.log(1e-7 / (VOCAB - 1))]])
    beyond = np.array([0.0, *(VOCAB - 1) * [-400.0]])
    for z, q in (
        (flat, peaked),
        (peaked, flat),
        (peaked, peaked),
        (beyond, beyond),
        (flat, beyond),
    ):
        logq = log_softmax(q)
        (reverse, forward), dreverse, dforward = run(z, logq, np.argsort(-logq)[:K])
        numbers = [reverse, forward, *dreverse, *dforward]
        assert all(np.isfinite(x).all() for x in numbers)
        # Each of them is a probability times a log-ratio, which MIN_TAIL bounds.
        limit = 1 + max(float(-logq.min()), -np.log(MIN_TAIL))
        assert max(np.abs(x).max() for x in (*dreverse, *dforward)) <= limit
    # The rest of a peaked teacher is MIN_TAIL at most too small, and a bound still.
    (reverse, _), *_ = run(flat, log_softmax(beyond), np.arange(K))
    assert float(reverse[0, 0]) <= kl(log_softmax(flat), log_softmax(beyond))


def test_no_gradient_flows_to_the_list():
    z, logq, order = draw(5)
    words, rest = split(z, order[:K])
    arrays = [jnp.float32(x) for x in (words[None, None], [[rest]], logq[order[:K]][None, None])]
    gradient = jax.grad(lambda q: sum(map(jnp.sum, listed_divergences(*arrays[:2], q))))(arrays[2])
    assert not np.asarray(gradient).any()
