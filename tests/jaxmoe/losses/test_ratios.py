# SPDX-License-Identifier: Apache-2.0
"""Importance weights and rejection: the peers' own published cases, and their edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.losses import kl
from jaxmoe.losses import ratios as c
from tests.jaxmoe.losses.ratio_rows import OLD, ROLLOUT, ratios, row, true_mask

EPS = float(np.finfo(np.float32).eps)


# --- published: SkyRL, tests/train/algorithms/test_off_policy_correction.py


@pytest.mark.paper
def test_token_weights_are_truncated_at_the_cap():
    # SkyRL: test_compute_tis_ratio_token_level
    log_ratio, _ = ratios(OLD, ROLLOUT)
    weights = c.truncate_ratio(c.token_ratio(log_ratio), high=2.0)
    np.testing.assert_allclose(weights, row(1.6487, 0.6065, 2.0), rtol=1e-4)


@pytest.mark.paper
def test_a_sequence_weight_is_its_tokens_product():
    # SkyRL: test_compute_tis_ratio_sequence_level
    log_ratio, mask = ratios(OLD, ROLLOUT)
    np.testing.assert_allclose(c.sequence_ratio(log_ratio, mask), [[2.7183] * 3], rtol=1e-4)


@pytest.mark.paper
def test_a_sequence_weight_is_truncated_at_the_cap():
    # SkyRL: test_compute_tis_ratio_sequence_level_with_cap
    log_ratio, mask = ratios([-1, -1, -1], [-2, -2, -2])
    weights = c.truncate_ratio(c.sequence_ratio(log_ratio, mask), high=5.0)
    np.testing.assert_array_equal(weights, [[5.0] * 3])


@pytest.mark.paper
def test_a_masked_token_is_not_in_the_product():
    # SkyRL: test_compute_tis_ratio_with_mask
    log_ratio, mask = ratios(OLD, ROLLOUT, [1, 0, 1])
    np.testing.assert_allclose(c.sequence_ratio(log_ratio, mask), [[4.4817] * 3], rtol=1e-4)


@pytest.mark.paper
@pytest.mark.parametrize(
    ("rollout", "is_kept"), [([-1.1, -1, -1], True), ([-1.5, -1.5, -1.5], False)]
)
def test_the_geometric_mean_keeps_what_is_close(rollout, is_kept):
    # SkyRL: test_compute_sequence_mask_geometric and …_rejects, with tighter bounds
    log_ratio, mask = ratios([-1, -1.1, -1], rollout)
    keep = c.within_bounds(c.geometric_ratio(log_ratio, mask), low=0.99, high=1.01)
    assert keep.tolist() == [[is_kept] * 3]


@pytest.mark.paper
@pytest.mark.parametrize(
    ("rollout", "is_kept"), [([-1.2, -1.2, -1.2], True), ([-2, -2, -2], False)]
)
def test_the_product_keeps_what_is_close(rollout, is_kept):
    # SkyRL: test_compute_sequence_mask_product and …_rejects_by_seq_ratio
    log_ratio, mask = ratios([-1, -1.1, -1.2], rollout)
    keep = c.within_bounds(c.sequence_ratio(log_ratio, mask), low=0.5, high=2.0)
    assert keep.tolist() == [[is_kept] * 3]


@pytest.mark.paper
@pytest.mark.parametrize(
    ("old", "rollout", "mask", "is_kept"),
    [
        ([-1, -1, -1], [-1, -1, -6], [1, 1, 1], False),  # e^5 > 100
        ([-1, -1, -1], [-1, -1, -6], [1, 1, 0], True),
        ([-1, -1, -11], [-1, -1, -1], [1, 1, 1], False),  # e^-10 < 1e-4
        ([-1, -1, -1], [-1, -1, -1], [1, 1, 1], True),
    ],
)
def test_one_catastrophic_token_rejects_its_sequence(old, rollout, mask, is_kept):
    # SkyRL: test_compute_outlier_token_mask_…
    log_ratio, mask = ratios(old, rollout, mask)
    assert c.outlier_keep_mask(log_ratio, mask, low=1e-4, high=100.0).tolist() == [[is_kept]]


def test_an_outlier_at_a_false_token_vetoes_nothing():
    assert c.outlier_keep_mask(row(0.0, 50.0), jnp.asarray([[True, False]])).tolist() == [[True]]


# --- published: verl, tests/trainer/ppo/test_rollout_corr.py


@pytest.mark.paper
def test_rejection_by_token_bounds_leaves_the_weights_positive():
    # verl: test_mask_mode
    old = jnp.full((2, 5), -2.0)
    rollout = jnp.asarray([[-1.0] * 5, [-2.5] * 5])
    log_ratio = c.log_ratios(old, rollout, true_mask(old))
    weights = c.truncate_ratio(c.token_ratio(log_ratio), high=2.0)
    np.testing.assert_allclose(weights, [[0.368] * 5, [1.649] * 5], atol=0.01)
    keep = c.within_bounds(c.token_ratio(log_ratio), low=0.5, high=2.0)
    assert keep.tolist() == [[False] * 5, [True] * 5]


@pytest.mark.paper
def test_icepop_zeroes_only_weights_out_of_bounds():
    # verl: test_exact_icepop_zeroes_weights_without_changing_mask
    ratio = row(0.4, 0.8, 6.0)
    log_ratio = c.log_ratios(jnp.zeros((1, 3)), -jnp.log(ratio), true_mask(ratio))
    inside = c.within_bounds(c.token_ratio(log_ratio), low=0.5, high=5.0)
    weights = jnp.where(inside, c.token_ratio(log_ratio), 0.0)
    np.testing.assert_allclose(weights, row(0.0, 0.8, 0.0), atol=1e-6)


@pytest.mark.paper
def test_icepop_weights_multiply_the_policy_gradient():
    # NeMo-RL tests/unit/algorithms/test_loss_functions.py, ClippedPGLossFn with ICE-POP
    log_ratio, mask = ratios([-1, -1, -1], [-0.5, -3.5, -0.8])
    inside = c.within_bounds(c.token_ratio(log_ratio), low=0.5, high=5.0)
    weights = jnp.where(inside, c.token_ratio(log_ratio), 0.0)
    np.testing.assert_allclose(weights, row(0.60653067, 0.0, 0.81873075), atol=1e-6)
    loss = jnp.mean(weights * -row(1.0, -1.0, 2.0))
    assert float(loss) == pytest.approx(-0.7479974, abs=1e-6)


# --- published: TRL, tests/test_grpo_trainer.py


@pytest.mark.paper
def test_drifted_rows_of_negative_advantage_are_dropped():
    # TRL: test_get_off_policy_mask
    logp = jnp.asarray([[-2.0] * 4, [-0.5] * 4, [-2.0] * 4])
    advantages = jnp.broadcast_to(jnp.asarray([[1.0], [-1.0], [-1.0]]), logp.shape)
    keep = c.drift_keep_mask(logp, jnp.zeros_like(logp), advantages, true_mask(logp), max_drift=1.0)
    assert keep.tolist() == [[True] * 4, [True] * 4, [False] * 4]


@pytest.mark.paper
def test_padding_has_no_part_in_the_drift():
    # TRL: test_get_off_policy_mask_padding
    mask = jnp.asarray([[True, True, False, False]])
    for logp, is_kept in ((-2.0, False), (-0.5, True)):
        logp, advantages = row(logp, logp, -1e4, 1e4), jnp.full((1, 4), -1.0)
        keep = c.drift_keep_mask(logp, jnp.zeros((1, 4)), advantages, mask, max_drift=1.0)
        assert keep.tolist() == [[is_kept, is_kept, True, True]]


# --- our own


def test_unequal_bounds_are_of_the_ratio_not_inverse():
    # [0.5, 5] holds 4 and not 1/4; tested as -log rho against [log 0.5, log 5] it would not
    log_ratio, mask = ratios([0.0, 0.0], [-np.log(4), np.log(4)])
    assert c.within_bounds(c.token_ratio(log_ratio), low=0.5, high=5.0).tolist() == [[True, False]]


def test_statistics_of_a_sequence_by_hand():
    log_ratio, mask = ratios(OLD, ROLLOUT, [1, 1, 0])  # 0.5, -0.5
    np.testing.assert_allclose(c.k2_from_log_ratio(log_ratio), row(0.125, 0.125, 0.0), rtol=EPS)
    k3 = [np.exp(0.5) - 1.5, np.exp(-0.5) - 0.5, 0.0]
    actual = kl.k3_from_log_ratio(log_ratio)
    np.testing.assert_allclose(actual, [k3], rtol=8 * EPS)
    np.testing.assert_allclose(c.sequence_sum(actual, mask), [[sum(k3)]], rtol=8 * EPS)
    np.testing.assert_allclose(
        c.sequence_mean(c.k2_from_log_ratio(log_ratio), mask), [[0.125]], rtol=EPS
    )
    np.testing.assert_allclose(c.sequence_max(actual, mask), [[k3[0]]], rtol=8 * EPS)


def test_normalized_weights_average_one_over_the_true_tokens():
    weights, mask = row(2.0, 4.0, 100.0), jnp.asarray([[True, True, False]])
    scaled = weights * c.unit_mean_scale(weights, mask)
    np.testing.assert_allclose(scaled[0, :2], [2 / 3, 4 / 3], rtol=EPS)
    assert float(c.unit_mean_scale(jnp.zeros((1, 3)), mask)) == 1.0


@pytest.mark.parametrize("bad", [(-0.1, 2.0), (2.0, 0.5)])
def test_impossible_bounds_are_refused(bad):
    with pytest.raises(ValueError, match="0 <= low <= high"):
        c.within_bounds(row(1.0), low=bad[0], high=bad[1])


@given(st.sampled_from([1000.0, -1000.0, np.inf, -np.inf, np.nan]))
def test_what_stands_at_a_false_token_never_matters(value):
    clean, mask = ratios(OLD, ROLLOUT, [1, 0, 1])
    dirty, _ = ratios((OLD[0], value, OLD[2]), ROLLOUT, [1, 0, 1])
    np.testing.assert_array_equal(clean, dirty)
    for level in (c.sequence_ratio, c.geometric_ratio):
        np.testing.assert_array_equal(level(clean, mask), level(dirty, mask))


@given(st.sampled_from([1000.0, -1000.0]))
def test_a_thousand_nats_stay_finite(gap):
    log_ratio, mask = ratios([gap, 0.0], [0.0, 0.0])
    for ratio in (
        c.token_ratio(log_ratio),
        c.sequence_ratio(log_ratio, mask),
        c.geometric_ratio(log_ratio, mask),
        c.k2_from_log_ratio(log_ratio),
        kl.k3_from_log_ratio(log_ratio),
    ):
        assert bool(jnp.isfinite(ratio).all())


def test_a_row_without_true_tokens_has_ratio_one():
    log_ratio, mask = ratios(OLD, ROLLOUT, [0, 0, 0])
    assert c.sequence_ratio(log_ratio, mask).tolist() == [[1.0] * 3]
    assert c.geometric_ratio(log_ratio, mask).tolist() == [[1.0] * 3]
    assert c.outlier_keep_mask(log_ratio, mask).tolist() == [[True]]


def test_weights_have_no_gradient():
    def weight(old):
        log_ratio = c.log_ratios(old, row(*ROLLOUT), true_mask(old))
        return jnp.sum(c.sequence_ratio(log_ratio, true_mask(old)))

    assert not jnp.any(jax.grad(weight)(row(*OLD)))
