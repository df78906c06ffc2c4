# SPDX-License-Identifier: Apache-2.0
"""Mismatch metrics: published figures, exact agreement, and false tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.losses.mismatch import mismatch_metrics, weight_metrics

OLD, ROLLOUT = jnp.asarray([[-1.0, -1.5, -0.5]]), jnp.asarray([[-1.5, -1.0, -1.5]])
ALL = jnp.ones((1, 3), bool)


def test_divergences_of_a_worked_row():
    # verl's definitions on log rho = 0.5, -0.5, 1, worked out by hand
    got = mismatch_metrics(OLD, ROLLOUT, ALL)
    assert float(got["rollout_corr/kl"]) == pytest.approx(-1 / 3, rel=1e-6)
    assert float(got["rollout_corr/k3_kl"]) == pytest.approx(0.3245113, rel=1e-6)
    assert float(got["rollout_corr/chi2_token"]) == pytest.approx(2.4917391, rel=1e-6)
    assert float(got["rollout_corr/chi2_seq"]) == pytest.approx(6.3890561, rel=1e-6)
    assert float(got["rollout_corr/training_ppl"]) == pytest.approx(np.e, rel=1e-6)
    assert float(got["rollout_corr/rollout_ppl"]) == pytest.approx(np.exp(4 / 3), rel=1e-6)
    assert float(got["train_rollout_logprob_abs_diff"]) == pytest.approx(2 / 3, rel=1e-6)
    assert float(got["train_rollout_logprob_abs_diff_max"]) == 1.0


def test_weights_of_the_same_row():
    ratio = jnp.exp(OLD - ROLLOUT)
    raw = weight_metrics(ratio, ratio, ALL)
    assert float(raw["rollout_corr/rollout_is_eff_sample_size"]) == pytest.approx(0.7871289)
    assert float(raw["rollout_corr/rollout_is_ratio_fraction_high"]) == 0.0
    cut = weight_metrics(jnp.minimum(ratio, 2.0), ratio, ALL)
    assert float(cut["rollout_corr/rollout_is_mean"]) == pytest.approx(1.4184173)
    assert float(cut["rollout_corr/rollout_is_eff_sample_size"]) == pytest.approx(0.8517620)
    assert float(cut["rollout_corr/rollout_is_ratio_fraction_high"]) == pytest.approx(1 / 3)
    assert float(cut["rollout_corr/rollout_is_oob_ratio"]) == 0.0


def test_weights_of_icepop_as_verl_asserts_them():
    got = weight_metrics(jnp.asarray([[0.0, 0.8, 0.0]]), jnp.asarray([[0.4, 0.8, 6.0]]), ALL)
    assert float(got["rollout_corr/rollout_is_std"]) == pytest.approx(0.3771236, rel=1e-6)
    assert float(got["rollout_corr/rollout_is_eff_sample_size"]) == pytest.approx(1 / 3)
    assert float(got["rollout_corr/rollout_is_oob_ratio"]) == pytest.approx(2 / 3)


def test_equal_log_probs_give_zero_everywhere_and_ratio_one():
    got = {name: float(x) for name, x in mismatch_metrics(OLD, OLD, ALL).items()}
    zero = {n for n in got if "diff" in n or "kl" in n or "chi2" in n}
    assert len(zero) == 8 and all(got[n] == 0.0 for n in zero)
    assert got["rollout_corr/ppl_ratio"] == 1.0
    assert got["rollout_actor_probs_pearson_corr"] == pytest.approx(1.0, abs=1e-6)


def test_the_correlation_is_numpys():
    rng = np.random.default_rng(0)
    old, rollout = (jnp.asarray(-rng.random((3, 7)) * 3, jnp.float32) for _ in range(2))
    mask = jnp.asarray(rng.random((3, 7)) < 0.6)
    got = mismatch_metrics(old, rollout, mask)["rollout_actor_probs_pearson_corr"]
    p, q = (np.exp(np.asarray(x, np.float64))[np.asarray(mask)] for x in (old, rollout))
    assert float(got) == pytest.approx(np.corrcoef(p, q)[0, 1], abs=1e-5)


@pytest.mark.parametrize("value", [1000.0, -np.inf, np.nan])
def test_false_tokens_and_empty_rows_never_matter(value):
    mask = jnp.asarray([[True, False, True], [False, False, False]])
    rollout = jnp.concatenate([ROLLOUT, ROLLOUT])
    clean = jnp.concatenate([OLD, OLD])
    dirty = jnp.where(mask, clean, value)
    for name, x in mismatch_metrics(clean, rollout, mask).items():
        assert float(x) == float(mismatch_metrics(dirty, rollout, mask)[name]), name
    alone = mismatch_metrics(OLD[:, ::2], ROLLOUT[:, ::2], ALL[:, ::2])
    for name, x in mismatch_metrics(dirty, rollout, mask).items():
        assert float(x) == pytest.approx(float(alone[name]), rel=1e-6), name


def test_no_true_token_is_zeros_and_not_nan():
    nothing = jnp.zeros((1, 3), bool)
    for metrics in (
        mismatch_metrics(OLD, ROLLOUT, nothing),
        weight_metrics(jnp.ones((1, 3)), jnp.ones((1, 3)), nothing),
    ):
        assert all(np.isfinite(float(x)) for x in metrics.values())
