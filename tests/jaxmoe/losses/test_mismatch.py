# SPDX-License-Identifier: Apache-2.0
"""Mismatch metrics: published figures, exact agreement, and false tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.losses import mismatch, sequence_is, token_is

mismatch_metrics, ratio_quantiles, weight_metrics = map(
    jax.jit, (mismatch.mismatch_metrics, mismatch.ratio_quantiles, mismatch.weight_metrics)
)
EPS = float(np.finfo(np.float32).eps)
OLD, ROLLOUT = jnp.asarray([[-1.0, -1.5, -0.5]]), jnp.asarray([[-1.5, -1.0, -1.5]])
ALL = jnp.ones((1, 3), bool)


def test_divergences_of_a_worked_row():
    # verl's definitions on log rho = 0.5, -0.5, 1, worked out by hand
    metrics = mismatch_metrics(OLD, ROLLOUT, ALL)
    assert float(metrics["rollout_corr/kl"]) == pytest.approx(-1 / 3, rel=1e-6)
    assert float(metrics["rollout_corr/k3_kl"]) == pytest.approx(0.3245113, rel=1e-6)
    assert float(metrics["rollout_corr/chi2_token"]) == pytest.approx(2.4917391, rel=1e-6)
    assert float(metrics["rollout_corr/chi2_seq"]) == pytest.approx(6.3890561, rel=1e-6)
    assert float(metrics["rollout_corr/training_ppl"]) == pytest.approx(np.e, rel=1e-6)
    assert float(metrics["rollout_corr/rollout_ppl"]) == pytest.approx(np.exp(4 / 3), rel=1e-6)
    assert float(metrics["train_rollout_logprob_abs_diff"]) == pytest.approx(2 / 3, rel=1e-6)
    assert float(metrics["train_rollout_logprob_abs_diff_max"]) == 1.0


def test_weights_of_the_same_row():
    ratio = jnp.exp(OLD - ROLLOUT)
    raw = weight_metrics(ratio, ratio, ratio > 9, ALL)
    assert float(raw["rollout_corr/rollout_is_eff_sample_size"]) == pytest.approx(0.7871289)
    assert float(raw["rollout_corr/rollout_is_ratio_fraction_high"]) == 0.0
    cut = weight_metrics(jnp.minimum(ratio, 2.0), ratio, ratio > 2, ALL)
    assert float(cut["rollout_corr/rollout_is_mean"]) == pytest.approx(1.4184173)
    assert float(cut["rollout_corr/rollout_is_eff_sample_size"]) == pytest.approx(0.8517620)
    assert float(cut["rollout_corr/rollout_is_ratio_fraction_high"]) == pytest.approx(1 / 3)
    assert float(cut["rollout_corr/rollout_is_oob_ratio"]) == 0.0


@pytest.mark.paper
def test_weights_of_icepop_as_verl_asserts_them():
    # verl tests/trainer/ppo/test_rollout_corr.py, test_exact_icepop_zeroes_weights_…
    ratio = jnp.asarray([[0.4, 0.8, 6.0]])
    metrics = weight_metrics(jnp.asarray([[0.0, 0.8, 0.0]]), ratio, ratio > 5, ALL)
    # verl counts what is above the bound whether it is cut or made 0; 0.4 is below
    assert float(metrics["rollout_corr/rollout_is_ratio_fraction_high"]) == pytest.approx(1 / 3)
    assert float(metrics["rollout_corr/rollout_is_std"]) == pytest.approx(0.3771236, rel=1e-6)
    assert float(metrics["rollout_corr/rollout_is_eff_sample_size"]) == pytest.approx(1 / 3)
    assert float(metrics["rollout_corr/rollout_is_oob_ratio"]) == pytest.approx(2 / 3)


def test_sequence_weights_are_counted_as_in_verl():
    # compute_is_metrics, worked by hand: products of ratios 8, 1/2 and 1 on 4, 1 and 1 tokens, cut
    # at 2; shares, extremes and seq_… are of sequences, mean and deviation of tokens
    mask = jnp.asarray([[True] * 4, [True] + [False] * 3, [True] + [False] * 3, [False] * 4])
    log_ratio = jnp.where(mask, jnp.log(jnp.asarray([[8**0.25], [0.5], [1.0], [1.0]])), 0.0)
    did = sequence_is(log_ratio, mask, high=2.0)
    metrics = weight_metrics(did.weights_BT, did.ratio_BT, did.above_BT, mask)
    want = {
        "mean": (4 * 2 + 0.5 + 1) / 6,
        "seq_mean": (2 + 0.5 + 1) / 3,
        "ratio_fraction_high": 1 / 3,
        "max": 8.0,
        "min": 0.5,
        "seq_max": 2.0,
        "seq_min": 0.5,
        "oob_ratio": 0.0,
    }
    for name, value in want.items():
        assert float(metrics[f"rollout_corr/rollout_is_{name}"]) == pytest.approx(
            value, rel=1e-5
        ), name
    # of tokens the extremes are those of the weights, as compute_is_metrics has them
    correction = token_is(log_ratio, high=1.5)
    metrics = weight_metrics(correction.weights_BT, correction.ratio_BT, correction.above_BT, mask)
    assert float(metrics["rollout_corr/rollout_is_max"]) == 1.5
    assert float(metrics["rollout_corr/rollout_is_ratio_fraction_high"]) == pytest.approx(4 / 6)


def test_equal_log_probs_give_zero_and_ratio_one():
    metrics = {name: float(x) for name, x in mismatch_metrics(OLD, OLD, ALL).items()}
    zero = {n for n in metrics if "diff" in n or "kl" in n or "chi2" in n}
    assert len(zero) == 8 and all(metrics[n] == 0.0 for n in zero)
    assert metrics["rollout_corr/ppl_ratio"] == 1.0
    assert metrics["rollout_actor_probs_pearson_corr"] == pytest.approx(1.0, abs=1e-6)


def test_the_correlation_is_numpys():
    rng = np.random.default_rng(0)
    old, rollout = (jnp.asarray(-rng.random((3, 7)) * 3, jnp.float32) for _ in range(2))
    mask = jnp.asarray(rng.random((3, 7)) < 0.6)
    metrics = mismatch_metrics(old, rollout, mask)["rollout_actor_probs_pearson_corr"]
    p, q = (np.exp(np.asarray(x, np.float64))[np.asarray(mask)] for x in (old, rollout))
    assert float(metrics) == pytest.approx(np.corrcoef(p, q)[0, 1], abs=1e-5)


@pytest.mark.parametrize("value", [1000.0, -np.inf, np.nan])
def test_false_tokens_and_empty_rows_never_matter(value):
    mask = jnp.asarray([[True, False, True], [False, False, False]])
    rollout = jnp.concatenate([ROLLOUT, ROLLOUT])
    clean = jnp.concatenate([OLD, OLD])
    dirty = jnp.where(mask, clean, value)
    for name, x in mismatch_metrics(clean, rollout, mask).items():
        assert float(x) == float(mismatch_metrics(dirty, rollout, mask)[name]), name
    subset = mismatch_metrics(OLD[:, ::2], ROLLOUT[:, ::2], ALL[:, ::2])
    for name, x in mismatch_metrics(dirty, rollout, mask).items():
        assert float(x) == pytest.approx(float(subset[name]), rel=1e-6), name


def test_no_true_token_is_zeros_and_not_nan():
    nothing = jnp.zeros((1, 3), bool)
    for metrics in (
        mismatch_metrics(OLD, ROLLOUT, nothing),
        weight_metrics(jnp.ones((1, 3)), jnp.ones((1, 3)), nothing, nothing),
    ):
        assert all(np.isfinite(float(x)) for x in metrics.values())


@pytest.mark.parametrize("tokens", [1, 4, 7, 40, 201])
def test_quantiles_of_the_ratio_are_numpys_nearest_ranks(tokens):
    rng = np.random.default_rng(tokens)
    old, rollout = (jnp.asarray(-rng.random((3, 101)) * 3, jnp.float32) for _ in range(2))
    mask = np.zeros(303, bool)
    mask[rng.permutation(303)[:tokens]] = True
    mask = mask.reshape(3, 101)
    dirty = jnp.where(mask, old, np.nan)  # and what stands at false tokens never matters
    metrics = ratio_quantiles(dirty - rollout, jnp.asarray(mask))
    assert list(metrics) == [f"rollout_corr/ratio_{p}" for p in ("p01", "p50", "p99")]
    for quantile, q in zip(metrics.values(), (0.01, 0.5, 0.99), strict=True):
        gap = np.asarray(old - rollout)[mask]
        want = np.exp(np.quantile(np.float64(gap), q, method="nearest"))
        assert float(quantile) == pytest.approx(want, rel=8 * EPS), q


def test_quantiles_without_a_true_token_are_one():
    metrics = ratio_quantiles(OLD - ROLLOUT, jnp.zeros((1, 3), bool))
    assert [float(x) for x in metrics.values()] == [1.0] * 3


def test_a_thousand_nats_leave_the_quantiles_finite():
    metrics = ratio_quantiles(jnp.asarray([[1000.0, 0.0, -1000.0]]), ALL)
    low, middle, high = (float(x) for x in metrics.values())
    assert 0 < low < middle == 1.0 < high < np.inf
