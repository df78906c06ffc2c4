# SPDX-License-Identifier: Apache-2.0
"""Which tokens may be drawn, how often, and with what log-prob."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.rollout.sampling import draw, keep_top, log_kept_mass

V = 13
PROBS = np.array([0.02, 0.3, 0.01, 0.2, 0.05, 0.15, 0.03, 0.08, 0.04, 0.06, 0.02, 0.03, 0.01])
LOGITS = jnp.log(jnp.asarray(PROBS, jnp.float32))[None]


def kept(logits):
    return set(np.flatnonzero(np.asarray(logits)[0] > -1e20))


@pytest.mark.parametrize(
    "k, want", [(1, {1}), (3, {1, 3, 5}), (0, set(range(V))), (V, set(range(V)))]
)
def test_top_k_keeps_exactly_the_most_likely(k, want):
    assert kept(keep_top(LOGITS, top_k=k, top_p=1.0)) == want


@pytest.mark.parametrize("p, want", [(0.01, {1}), (0.29, {1}), (0.31, {1, 3}), (0.64, {1, 3, 5}),
                                     (0.66, {1, 3, 5, 7}), (1.0, set(range(V)))])  # fmt: skip
def test_top_p_keeps_the_fewest_that_reach_p(p, want):
    assert kept(keep_top(LOGITS, top_k=0, top_p=p)) == want


def test_the_nucleus_is_that_of_the_top_k_alone():
    # of 0.3, 0.2, 0.15 the first two hold 0.769: they reach 0.7 here, and did not before top-k
    assert kept(keep_top(LOGITS, top_k=3, top_p=0.7)) == {1, 3}
    assert kept(keep_top(LOGITS, top_k=0, top_p=0.7)) == {1, 3, 5, 7}


@given(st.integers(0, 10**6), st.integers(1, V), st.floats(0.05, 0.95))
def test_what_is_kept_is_as_likely_as_before_among_itself(seed, k, p):
    logits = jnp.asarray(np.random.default_rng(seed).normal(0, 2, (1, V)), jnp.float32)
    cut = keep_top(logits, top_k=k, top_p=p)
    ids = sorted(kept(cut))
    assert 1 <= len(ids) <= k
    np.testing.assert_array_equal(np.asarray(cut)[0, ids], np.asarray(logits)[0, ids])
    assert int(jnp.argmax(logits)) in ids


@given(st.integers(0, 10**6), st.integers(0, V), st.floats(0.05, 1.0))
def test_the_mass_that_was_kept_is_that_of_the_kept_tokens(seed, k, p):
    logits = jnp.asarray(np.random.default_rng(seed).normal(0, 4, (1, V)), jnp.float32)
    cut = keep_top(logits, top_k=k, top_p=p)
    probs = np.exp(np.asarray(logits, np.float64)[0])
    want = np.log(probs[sorted(kept(cut))].sum() / probs.sum())
    found = float(log_kept_mass(cut, logits)[0])
    assert found <= 0.0 and abs(found - want) <= V * np.finfo(np.float32).eps * max(1.0, -want)


def test_nothing_cut_off_keeps_a_mass_of_exactly_one():
    for offset in (-300.0, 0.0, 300.0):
        assert float(log_kept_mass(LOGITS + offset, LOGITS + offset)[0]) == 0.0


def test_drawn_frequencies_are_the_probabilities():
    n = 20_000
    cut = keep_top(LOGITS, top_k=6, top_p=1.0)
    rows = jnp.broadcast_to(cut, (n, V))
    uniform = jax.random.uniform(jax.random.key(0), (n,))
    tokens, _ = draw(rows, uniform, greedy=False)
    ids = sorted(kept(cut))
    want = n * PROBS[ids] / PROBS[ids].sum()
    counts = np.bincount(np.asarray(tokens), minlength=V)
    assert counts.sum() == counts[ids].sum()
    chi2 = ((counts[ids] - want) ** 2 / want).sum()
    assert chi2 < 20.5  # 5 degrees of freedom: passed once in 1000


def test_the_log_prob_is_of_the_processed_distribution_and_sums_to_one():
    cut = keep_top(LOGITS, top_k=6, top_p=0.8)
    ids = sorted(kept(cut))
    uniform = (jnp.arange(4000, dtype=jnp.float32) + 0.5) / 4000
    tokens, logp = draw(jnp.broadcast_to(cut, (4000, V)), uniform, greedy=False)
    found = dict(zip(np.asarray(tokens).tolist(), np.asarray(logp).tolist(), strict=True))
    assert set(found) == set(ids)
    assert abs(sum(np.exp(list(found.values()))) - 1) < 1e-6
    for i in ids:
        assert abs(np.exp(found[i]) - PROBS[i] / PROBS[ids].sum()) < 1e-6


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-24])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(u):
    logits = jnp.asarray([[-1e30, 0.0, 1.0, -1e30]], jnp.float32)
    token, logp = draw(logits, jnp.full(1, u, jnp.float32), greedy=False)
    assert int(token[0]) == (1 if u == 0 else 2)
    assert np.isfinite(float(logp[0]))


def test_greedy_takes_the_most_likely_whatever_is_drawn():
    uniform = jnp.asarray([0.0, 0.5, 0.999], jnp.float32)
    tokens, logp = draw(jnp.broadcast_to(LOGITS, (3, V)), uniform, greedy=True)
    np.testing.assert_array_equal(tokens, [1, 1, 1])
    np.testing.assert_allclose(logp, np.log(0.3), rtol=1e-6)
