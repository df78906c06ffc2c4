# SPDX-License-Identifier: Apache-2.0
"""Which tokens may be sampled, how often, and with what log-prob."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxmoe.rollout.sampling import (
    IMPOSSIBLE_LOGIT,
    apply_top_k_top_p,
    log_kept_mass,
    sample_by_race,
    sample_exponentials,
    sample_tokens,
    split_into_blocks,
)

V = 13
WORDS = 201_088  # GPT-OSS's vocabulary: rounding that 13 words never show decides there
sample, take_best = (jax.jit(partial(sample_tokens, greedy=greedy)) for greedy in (False, True))
races = jax.jit(
    lambda keys, *row: lax.map(lambda key: sample_by_race(key, *row), keys, batch_size=256)
)
PROBS = np.array([0.02, 0.3, 0.01, 0.2, 0.05, 0.15, 0.03, 0.08, 0.04, 0.06, 0.02, 0.03, 0.01])
LOGITS = jnp.log(jnp.asarray(PROBS, jnp.float32))[None]


def retained_tokens(logits):
    return set(np.flatnonzero(np.asarray(logits)[0] > -1e20))


@pytest.mark.parametrize(
    "k, want", [(1, {1}), (3, {1, 3, 5}), (0, set(range(V))), (V, set(range(V)))]
)
def test_top_k_keeps_exactly_the_most_likely(k, want):
    assert retained_tokens(apply_top_k_top_p(LOGITS, top_k=k, top_p=1.0)) == want


@pytest.mark.parametrize(
    "p, want",
    [
        (0.01, {1}),
        (0.29, {1}),
        (0.31, {1, 3}),
        (0.64, {1, 3, 5}),
        (0.66, {1, 3, 5, 7}),
        (1.0, set(range(V))),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(p, want):
    assert retained_tokens(apply_top_k_top_p(LOGITS, top_k=0, top_p=p)) == want


def test_the_nucleus_is_within_the_top_k():
    # of 0.3, 0.2, 0.15 the first two hold 0.769: they reach 0.7 here, and did not before top-k
    assert retained_tokens(apply_top_k_top_p(LOGITS, top_k=3, top_p=0.7)) == {1, 3}
    assert retained_tokens(apply_top_k_top_p(LOGITS, top_k=0, top_p=0.7)) == {1, 3, 5, 7}


@given(st.integers(0, 10**6), st.integers(1, V), st.floats(0.05, 0.95))
def test_retained_tokens_have_their_logits_unchanged(seed, k, p):
    logits = jnp.asarray(np.random.default_rng(seed).normal(0, 2, (1, V)), jnp.float32)
    cut = apply_top_k_top_p(logits, top_k=k, top_p=p)
    ids = sorted(retained_tokens(cut))
    assert 1 <= len(ids) <= k
    np.testing.assert_array_equal(np.asarray(cut)[0, ids], np.asarray(logits)[0, ids])
    assert int(jnp.argmax(logits)) in ids


@given(st.integers(0, 10**6), st.integers(0, V), st.floats(0.05, 1.0))
def test_the_kept_mass_is_of_the_kept_tokens(seed, k, p):
    logits = jnp.asarray(np.random.default_rng(seed).normal(0, 4, (1, V)), jnp.float32)
    cut = apply_top_k_top_p(logits, top_k=k, top_p=p)
    probs = np.exp(np.asarray(logits, np.float64)[0])
    want = np.log(probs[sorted(retained_tokens(cut))].sum() / probs.sum())
    log_mass = float(log_kept_mass(cut, logits)[0])
    assert log_mass <= 0.0 and abs(log_mass - want) <= V * np.finfo(np.float32).eps * max(
        1.0, -want
    )


def test_no_truncation_has_a_mass_of_one():
    for offset in (-300.0, 0.0, 300.0):
        assert float(log_kept_mass(LOGITS + offset, LOGITS + offset)[0]) == 0.0


def counts_of(logits_V, n, *, seed=0):
    """Counts of each word in n samples."""
    logits_1V = jnp.asarray(logits_V, jnp.float32)[None]
    logits_NS = split_into_blocks(logits_1V)[0]
    sums_N = jnp.sum(jnp.exp(logits_NS - logits_1V.max()), axis=1)
    keys = jax.random.split(jax.random.key(seed), n)
    return np.bincount(np.asarray(races(keys, logits_NS, sums_N)), minlength=len(logits_V))


def test_a_row_is_a_race_among_its_blocks():
    logits = jnp.asarray(np.random.default_rng(7).normal(0, 2, 300), jnp.float32)
    keys = jax.random.split(jax.random.key(8), 512)
    token_B, _ = sample(jnp.broadcast_to(logits, (512, 300)), jnp.copy(keys))
    counts = np.bincount(np.asarray(token_B), minlength=300)
    np.testing.assert_array_equal(counts, counts_of(logits, 512, seed=8))


def chi_square(counts, want):
    return ((counts - want) ** 2 / want).sum()


def test_sampled_frequencies_are_the_probabilities():
    n = 20_000
    cut = apply_top_k_top_p(LOGITS, top_k=6, top_p=1.0)[0]
    ids = sorted(retained_tokens(cut[None]))
    counts = counts_of(cut, n)
    assert counts.sum() == counts[ids].sum()
    want = n * PROBS[ids] / PROBS[ids].sum()
    assert chi_square(counts[ids], want) < 20.5  # 5 degrees of freedom: passed once in 1000


@pytest.mark.parametrize("words", [1, 127, 128, 129, 300])
def test_every_word_can_be_sampled_wherever_it_stands(words):
    counts = counts_of(np.zeros(words), 40 * words)
    # as likely as each other; for 299 degrees of freedom, and fewer, passed once in 1000
    assert chi_square(counts, 40.0) < 1.25 * words + 20


def test_rare_words_are_sampled_at_their_reported_rate():
    # One likely word, and 201,087 of half a step of jax.random.uniform each. An inverse CDF with 23
    # random bits gives half of them twice their share, and never the others.
    rounding = 2.0**-24
    probs = np.full(WORDS, rounding)
    probs[0] = 1 - rounding * (WORDS - 1)
    n = 8192
    counts = counts_of(np.log(probs), n)
    grid = np.floor(np.cumsum(probs) * 2**23).astype(int)
    unreached = np.flatnonzero(np.diff(grid, prepend=0) == 0)[1:]
    assert 0.4 < len(unreached) / WORDS < 0.6
    for words in (unreached, np.setdiff1d(np.arange(1, WORDS), unreached)):
        want = n * probs[words].sum()  # about 49
        assert abs(counts[words].sum() - want) < 4 * np.sqrt(want)


def test_the_smallest_exponentials_have_their_rate():
    # words of probability p win where their exponential is about p: so small ones must be right
    rng = np.random.default_rng(0)
    high = rng.integers(0, 2**32, 4000, dtype=np.uint64) >> rng.integers(0, 33, 4000, np.uint64)
    high = np.append(high, [0, 0, 2**32 - 1])
    low = rng.integers(0, 2**32, len(high), dtype=np.uint64)
    low[-3:] = 0, 2**32 - 1, 2**32 - 1
    actual = sample_exponentials(jnp.asarray(np.stack([high, low], 1).astype(np.uint32)))
    u = (high.astype(np.float64) * 2.0**32 + low + 0.5) * 2.0**-64
    want = -np.log1p(-np.minimum(u, 1 - 2.0**-24))
    # near 1 the float32 u is a step of 2^-24 away at most, which is all that 1 − u has left
    slack = 3e-7 * want + 2.0**-24 / (1 - np.minimum(u, 1 - 2.0**-24)) * (u > 0.5)
    assert (np.abs(np.asarray(actual, np.float64) - want) <= slack).all()
    assert float(actual.min()) == 2.0**-65 and float(actual.max()) < 16.7


@given(st.integers(0, 10**6), st.integers(1, 700), st.integers(0, 40), st.floats(0.05, 1.0))
@settings(max_examples=60)
def test_what_was_excluded_is_never_sampled(seed, words, k, p):
    rng = np.random.default_rng(seed)
    logits = np.full(
        700, IMPOSSIBLE_LOGIT, np.float32
    )  # one shape for all, and blocks without any word
    logits[rng.choice(700, words, replace=False)] = rng.normal(0, 30, words)
    cut = apply_top_k_top_p(jnp.asarray(logits)[None], top_k=k, top_p=p)
    rows = jnp.broadcast_to(cut, (64, 700))
    token_B, logp_B = sample(rows, jax.random.split(jax.random.key(seed), 64))
    assert set(np.asarray(token_B).tolist()) <= retained_tokens(cut)
    assert (np.asarray(logp_B) > -100).all()


def test_real_vocabulary_log_probs_match_float64():
    logits = np.random.default_rng(3).normal(0, 6, WORDS).astype(np.float32)
    rows = jnp.broadcast_to(jnp.asarray(logits), (64, WORDS))
    token_B, logp_B = sample(rows, jax.random.split(jax.random.key(4), 64))
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    np.testing.assert_allclose(logp_B, exact[np.asarray(token_B)], atol=4e-6)


def test_a_rows_token_ignores_other_rows():
    logits = jnp.asarray(np.random.default_rng(5).normal(0, 2, (6, 300)), jnp.float32)

    def keys_B():
        return jax.random.split(jax.random.key(6), 6)

    batch_tokens, _ = sample(logits, keys_B())
    for row in range(6):
        row_tokens, _ = sample(logits[row : row + 1], keys_B()[row : row + 1])
        assert int(row_tokens[0]) == int(batch_tokens[row])


def test_greedy_takes_the_most_likely_whatever_the_key():
    keys_B = jax.random.split(jax.random.key(0), 3)
    tokens, logp = take_best(jnp.broadcast_to(LOGITS, (3, V)), keys_B)
    np.testing.assert_array_equal(tokens, [1, 1, 1])
    np.testing.assert_allclose(logp, np.log(0.3), rtol=1e-6)
