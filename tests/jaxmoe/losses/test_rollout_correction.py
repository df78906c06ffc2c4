# SPDX-License-Identifier: Apache-2.0
"""Corrections by the names a config gives them: by hand, the peers' published cases, properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.losses import (
    drift_mask,
    geometric_is,
    masked_sum,
    normalize,
    ppo_clip,
    rejection,
    sequence_icepop,
    sequence_is,
    token_icepop,
    token_is,
    token_mean,
    veto,
)
from jaxmoe.losses.ratios import log_ratios
from jaxmoe.losses.rollout_correction import STATISTICS

EPS = float(np.finfo(np.float32).eps)
OLD, ROLLOUT = (-1.0, -1.5, -0.5), (-1.5, -1.0, -1.5)
RHO = np.exp([0.5, -0.5, 1.0])


def row(*values):
    return jnp.asarray([values], jnp.float32)


def true_mask(x):
    return jnp.ones(x.shape, bool)


def ratios(old, rollout, mask=None):
    """log ρ and the mask of one row."""
    old, rollout = row(*old), row(*rollout)
    mask = true_mask(old) if mask is None else jnp.asarray([mask], bool)
    return log_ratios(old, rollout, mask), mask


# --- published: verl, tests/trainer/ppo/test_rollout_corr.py


@pytest.mark.paper
def test_a_rejection_beside_weights_leaves_them_positive():
    # verl tests/trainer/ppo/test_rollout_corr.py, test_mask_mode
    old, rollout = jnp.full((2, 5), -2.0), jnp.asarray([[-1.0] * 5, [-2.5] * 5])
    log_ratio = log_ratios(old, rollout, true_mask(old))
    weights = token_is(log_ratio, high=2.0).weights_BT
    np.testing.assert_allclose(weights, [[0.368] * 5, [1.649] * 5], atol=0.01)
    assert bool((weights > 0).all())
    dropped = rejection(log_ratio, true_mask(old), statistic="token_k1", low=0.5, high=2.0)
    assert dropped.keep_BT.tolist() == [[False] * 5, [True] * 5]
    assert dropped.weights_BT is None


@pytest.mark.paper
def test_icepop_zeroes_without_dropping_tokens():
    # verl tests/trainer/ppo/test_rollout_corr.py,
    # test_exact_icepop_zeroes_weights_without_changing_mask
    ratio = row(0.4, 0.8, 6.0)
    result = token_icepop(log_ratios(jnp.zeros((1, 3)), -jnp.log(ratio), true_mask(ratio)))
    np.testing.assert_allclose(result.weights_BT, row(0.0, 0.8, 0.0), atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(result.ratio_BT, ratio, rtol=8 * EPS)
    assert result.keep_BT is None


# bounds of verl tests/trainer/ppo/test_rollout_corr.py, test_each_supported_rollout_rs_option
VERL = {
    "token_k1": (0.5, 1.5),
    "token_k2": (0.0, 2.0),
    "token_k3": (0.0, 2.0),
    "seq_sum_k1": (0.6, 1.4),
    "seq_sum_k2": (0.0, 2.5),
    "seq_sum_k3": (0.0, 2.5),
    "seq_mean_k1": (0.5, 1.5),
    "seq_mean_k2": (0.0, 2.0),
    "seq_mean_k3": (0.0, 2.0),
    "seq_max_k2": (0.0, 2.0),
    "seq_max_k3": (0.0, 2.0),
}


def statistic64(name, x, mask):
    """The bounded statistic in float64: of ρ itself for k1, in nats for k2 and k3."""
    level, _, kind = name.rpartition("_")
    if kind == "k1" and level != "token":
        total = np.where(mask, x, 0).sum(1, keepdims=True)
        return np.exp(total / (mask.sum(1, keepdims=True) if level == "seq_mean" else 1))
    values = {"k1": np.exp(x), "k2": x**2 / 2, "k3": np.expm1(x) - x}[kind]
    inside = np.where(mask, values, 0)
    return {
        "token": values,
        "seq_sum": inside.sum(1, keepdims=True),
        "seq_mean": inside.sum(1, keepdims=True) / mask.sum(1, keepdims=True),
        "seq_max": inside.max(1, keepdims=True),
    }[level]


@pytest.mark.paper
@pytest.mark.parametrize("statistic", VERL)
def test_verls_statistics_pass_what_is_within_bounds(statistic):
    # verl tests/trainer/ppo/test_rollout_corr.py, test_each_supported_rollout_rs_option: it draws
    # random rows and asserts the shape; here rows of growing mismatch, against float64
    rng = np.random.default_rng(0)
    x = np.float64(np.float32(rng.normal(size=(9, 7)) * np.linspace(0.02, 3.0, 9)[:, None]))
    mask = (rng.random((9, 7)) < 0.7) | (np.arange(7) == 2)
    x[~mask] = 0.0
    low, high = VERL[statistic]
    result = rejection(
        jnp.asarray(x, jnp.float32), jnp.asarray(mask), statistic=statistic, low=low, high=high
    )
    want = statistic64(statistic, x, mask)
    assert abs(want / high - 1).min() > 1e-4  # rounding decides nothing
    want = np.broadcast_to((want >= low) & (want <= high), x.shape)
    assert want.any() and not want.all()
    np.testing.assert_array_equal(jnp.broadcast_to(result.keep_BT, x.shape), want)


def test_the_statistics_are_verls_eleven():
    assert {"_".join(pair) for pair in STATISTICS} == set(VERL)


# --- published: others


@pytest.mark.paper
def test_icepop_weights_multiply_the_clipped_loss():
    # NeMo-RL tests/unit/algorithms/test_loss_functions.py, ClippedPGLossFn with ICE-POP
    logp, advantages = row(-1, -1, -1), row(1.0, -1.0, 2.0)
    mask = true_mask(logp)
    weights = token_icepop(log_ratios(logp, row(-0.5, -3.5, -0.8), mask), low=0.5, high=5.0)[0]
    np.testing.assert_allclose(weights, row(0.60653067, 0.0, 0.81873075), atol=1e-6)
    terms = ppo_clip(logp, logp, advantages, mask)
    loss = masked_sum(terms * weights * token_mean(mask), mask)
    assert float(loss) == pytest.approx(-0.7479974, abs=1e-6)


@pytest.mark.paper
def test_bad_answers_that_the_policy_left_are_dropped():
    # TRL tests/test_grpo_trainer.py, test_get_off_policy_mask
    logp = jnp.asarray([[-2.0] * 4, [-0.5] * 4, [-2.0] * 4])
    advantages = jnp.broadcast_to(jnp.asarray([[1.0], [-1.0], [-1.0]]), logp.shape)
    log_ratio = log_ratios(logp, jnp.zeros_like(logp), true_mask(logp))
    keep = drift_mask(log_ratio, advantages, true_mask(logp), max_drift=1.0).keep_BT
    assert keep.tolist() == [[True] * 4, [True] * 4, [False] * 4]


# --- by hand; SkyRL's and TRL's cases among them


@pytest.mark.paper
def test_each_level_weighs_by_its_capped_ratio():
    # SkyRL tests/train/algorithms/test_off_policy_correction.py, test_compute_tis_ratio_token_level
    # and …_sequence_level: 1.6487, 0.6065 and 2; 2.7183
    log_ratio, mask = ratios(OLD, ROLLOUT)
    e, mean = np.full(3, np.e), np.full(3, np.exp(1 / 3))
    for high in (1.3, 2.0, 3.0):
        for result, ratio in (
            (token_is(log_ratio, high=high), RHO),
            (sequence_is(log_ratio, mask, high=high), e),
            (geometric_is(log_ratio, mask, high=high), mean),
        ):
            np.testing.assert_allclose(result.weights_BT, [np.minimum(ratio, high)], rtol=8 * EPS)
            rows = result.ratio_BT.shape[1] == 1  # of sequences: one each
            np.testing.assert_allclose(result.ratio_BT, [ratio[: 1 if rows else 3]], rtol=8 * EPS)
            assert rows == (result.weights_BT[0, 0] == result.weights_BT[0, 1])
            np.testing.assert_array_equal(result.above_BT, result.ratio_BT > high)
            assert result.keep_BT is None


def test_a_cap_left_out_is_two():
    log_ratio, mask = ratios([1.0, 0.5], [0.0, 0.0])
    for result in (
        token_is(log_ratio),
        sequence_is(log_ratio, mask),
        geometric_is(log_ratio, mask),
    ):
        assert float(result.weights_BT[0, 0]) == 2.0


def test_icepop_keeps_the_ratio_itself_inside_its_bounds():
    log_ratio, mask = ratios(OLD, ROLLOUT)
    result = token_icepop(log_ratio, low=0.7, high=2.0).weights_BT
    np.testing.assert_allclose(result, [[RHO[0], 0.0, 0.0]], rtol=8 * EPS)
    for low, high, weight in ((0.0, 3.0, np.e), (0.0, 2.5, 0.0), (2.8, 3.0, 0.0)):
        result = sequence_icepop(log_ratio, mask, low=low, high=high)
        np.testing.assert_allclose(result.weights_BT, [[weight] * 3], rtol=8 * EPS)
        np.testing.assert_allclose(result.ratio_BT, [[np.e]], rtol=8 * EPS)


@pytest.mark.parametrize("statistic", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_unequal_bounds_are_of_the_ratio_not_inverse(statistic):
    # [0.5, 5] holds 4 and not 1/4; -log ρ tested against [log 0.5, log 5] has it the other way
    log_ratio = jnp.log(jnp.asarray([[4.0], [0.25]]))
    mask = true_mask(log_ratio)
    keep = rejection(log_ratio, mask, statistic=statistic, low=0.5, high=5.0).keep_BT
    assert keep.tolist() == [[True], [False]]
    for result in (
        token_icepop(log_ratio, low=0.5, high=5.0),
        sequence_icepop(log_ratio, mask, low=0.5, high=5.0),
    ):
        np.testing.assert_allclose(result.weights_BT, [[4.0], [0.0]], rtol=8 * EPS)


@pytest.mark.paper
def test_a_masked_token_is_not_in_sequence_weights():
    # SkyRL tests/train/algorithms/test_off_policy_correction.py, test_compute_tis_ratio_with_mask
    log_ratio, mask = ratios(OLD, ROLLOUT, [1, 0, 1])
    np.testing.assert_allclose(sequence_is(log_ratio, mask, high=9.0)[0], [[np.exp(1.5)] * 3])
    result = geometric_is(log_ratio, mask, high=9.0)[0]
    np.testing.assert_allclose(result, [[np.exp(0.75)] * 3], rtol=8 * EPS)


@pytest.mark.paper
@pytest.mark.parametrize(
    ("bounds", "old", "rollout", "is_kept"),
    [
        (("seq_mean_k1", 0.99, 1.01), [-1, -1.1, -1], [-1.1, -1, -1], True),
        (("seq_mean_k1", 0.99, 1.01), [-1, -1.1, -1], [-1.5, -1.5, -1.5], False),
        (("seq_sum_k1", 0.5, 2.0), [-1, -1.1, -1.2], [-1.2, -1.2, -1.2], True),
        (("seq_sum_k1", 0.5, 2.0), [-1, -1.1, -1.2], [-2, -2, -2], False),
    ],
)
def test_sequences_close_to_the_engine_are_retained(bounds, old, rollout, is_kept):
    # SkyRL tests/train/algorithms/test_off_policy_correction.py, test_compute_sequence_mask_…, with
    # tighter bounds for the geometric mean
    (statistic, low, high), (log_ratio, mask) = bounds, ratios(old, rollout)
    keep = rejection(log_ratio, mask, statistic=statistic, low=low, high=high).keep_BT
    assert keep.tolist() == [[is_kept] * keep.shape[1]]


def test_weights_have_no_gradient():
    def weight(old):
        log_ratio = log_ratios(old, row(*ROLLOUT), true_mask(old))
        return jnp.sum(sequence_is(log_ratio, true_mask(old), high=9.0).weights_BT)

    assert not jnp.any(jax.grad(weight)(row(*OLD)))


def test_normalized_weights_average_one_over_the_batch():
    weights, ratio = jnp.asarray([[2.0, 4.0], [0.0, 9.0]]), jnp.asarray([[2.0, 6.0], [3.0, 9.0]])
    mask = jnp.asarray([[True, True], [True, False]])
    result = normalize(weights, ratio, mask)
    np.testing.assert_array_equal(result.weights_BT, weights / 2)  # (2 + 4 + 0) / 3
    assert result.ratio_BT is None  # what is measured is measured before
    assert float(jnp.mean(result.weights_BT[mask])) == 1.0


def test_normalized_sequences_count_once_each_however_long():
    # verl's rollout_is_batch_normalize at rollout_is="sequence": the mean is over sequences
    mask = jnp.asarray([[True] * 4, [True, False, False, False], [False] * 4])
    weights = jnp.broadcast_to(jnp.asarray([[3.0], [1.0], [9.0]]), mask.shape)
    result = normalize(weights, weights[:, :1], mask)
    np.testing.assert_array_equal(result.weights_BT, weights / 2)  # (3 + 1) / 2, not (4·3 + 1) / 5


def test_weights_that_are_all_zero_stay_so():
    zeros = jnp.zeros((2, 3))
    assert not np.asarray(normalize(zeros, zeros, true_mask(zeros)).weights_BT).any()


@pytest.mark.paper
@pytest.mark.parametrize(
    ("log_ratio", "is_kept"),
    [([0, 4.6, 0], True), ([0, 4.7, 0], False), ([0, -6.9, 0], True), ([0, -7.0, 0], False)],
)
def test_one_token_past_either_bound_vetoes_its_sequence(log_ratio, is_kept):
    # SkyRL tests/train/algorithms/test_off_policy_correction.py, test_compute_outlier_token_mask_…,
    # with bounds 1e-3 and 100: log ρ of -6.908 and 4.605
    x = jnp.asarray([log_ratio, [0, 0, 0]], jnp.float32)
    assert veto(x, true_mask(x), low=1e-3, high=100.0).keep_BT.tolist() == [[is_kept], [True]]
    nowhere = jnp.asarray([[True, False, True]] * 2)
    assert veto(x, nowhere, low=1e-3, high=100.0).keep_BT.tolist() == [[True], [True]]


@pytest.mark.paper
def test_drift_is_a_signed_mean_over_true_tokens():
    # padding as in TRL tests/test_grpo_trainer.py, test_get_off_policy_mask_padding
    mask = jnp.asarray([[True, True, False]] * 4)
    log_ratio = jnp.asarray([[-2.0, -1.0, 9.0], [-2.0, 0.1, -99.0], [2.0, 1.0, 0.0], [0.0] * 3])
    keep = drift_mask(log_ratio, jnp.full((4, 3), -1.0), mask, max_drift=1.0).keep_BT
    # 1.5 nats away; 0.95; 1.5 nats nearer; not at all. False tokens are not dropped
    assert keep[:, :2].tolist() == [[False] * 2, [True] * 2, [True] * 2, [True] * 2]
    assert keep[:, 2].all()


def test_drift_drops_only_tokens_of_negative_advantage():
    log_ratio = jnp.full((1, 3), -2.0)
    keep = drift_mask(log_ratio, row(-1.0, 0.0, 1.0), true_mask(log_ratio), max_drift=1.0).keep_BT
    assert keep.tolist() == [[False, True, True]]


@pytest.mark.parametrize("statistic", ["k1", "token_k4", "seq_max_k1", "sum_k1", ""])
def test_another_statistic_is_refused_by_name(statistic):
    log_ratio, mask = ratios(OLD, ROLLOUT)
    with pytest.raises(ValueError, match=f"token_k1, token_k2, .*seq_max_k3; got '{statistic}'"):
        rejection(log_ratio, mask, statistic=statistic, high=2.0)


def test_bounds_out_of_order_are_refused():
    log_ratio, mask = ratios(OLD, ROLLOUT)
    for correction in (
        lambda: rejection(log_ratio, mask, statistic="token_k1", low=2.0, high=0.5),
        lambda: token_icepop(log_ratio, low=2.0, high=0.5),
        lambda: sequence_icepop(log_ratio, mask, low=-0.1),
        lambda: veto(log_ratio, mask, low=2.0, high=0.5),
    ):
        with pytest.raises(ValueError, match="0 <= low <= high"):
            correction()


# --- properties of all of them

RECIPES = {
    "token_is": lambda x, a, m: token_is(x),
    "sequence_is": lambda x, a, m: sequence_is(x, m),
    "geometric_is": lambda x, a, m: geometric_is(x, m),
    "token_icepop": lambda x, a, m: token_icepop(x),
    "sequence_icepop": lambda x, a, m: sequence_icepop(x, m),
    "normalize": lambda x, a, m: normalize(*token_is(x)[:3:2], m),
    "veto": lambda x, a, m: veto(x, m),
    "drift_mask": lambda x, a, m: drift_mask(x, a, m, max_drift=0.1),
} | {
    statistic: lambda x, a, m, statistic=statistic: rejection(
        x, m, statistic=statistic, low=0.0, high=1.2
    )
    for statistic in VERL
}
MASK = np.array([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0]], bool)


@jax.jit
def all_corrections(x, advantages, mask):
    """All recipes on the same batch: one compilation."""
    return {name: recipe(x, advantages, mask) for name, recipe in RECIPES.items()}


def arrays(seed):
    """log ρ, 0 at false tokens, and advantages."""
    rng = np.random.default_rng(seed)
    x, advantages = (jnp.asarray(rng.normal(size=MASK.shape), jnp.float32) for _ in range(2))
    return jnp.where(MASK, x, 0.0), advantages


@given(st.sampled_from([1000.0, -1000.0, np.inf, -np.inf, np.nan]))
def test_what_stands_at_a_false_token_never_matters(value):
    clean = arrays(0)
    want = all_corrections(*clean, MASK)
    for name, result in all_corrections(*(jnp.where(MASK, x, value) for x in clean), MASK).items():
        for actual, expected in zip(result, want[name], strict=True):
            if expected is not None:  # a column, or one a token
                mask = MASK if expected.shape == MASK.shape else np.ones(expected.shape, bool)
                np.testing.assert_array_equal(actual[mask], expected[mask], err_msg=name)


@given(st.sampled_from([1000.0, -1000.0]), st.integers(0, 4))
def test_a_thousand_nats_at_a_token_are_bounded(gap, column):
    # the weights stay bounded, and the rejections drop the token or its row, and no other row
    mask = jnp.asarray(MASK).at[1, column].set(True)
    x = (0.01 * arrays(0)[0]).at[1, column].set(gap)
    for name, result in all_corrections(x, jnp.full(MASK.shape, -1.0), mask).items():
        if result.weights_BT is None:
            keep = np.broadcast_to(result.keep_BT, MASK.shape)
            # drift has one direction, and these bounds of ρ have no lower end
            harmless = gap > 0 if name == "drift_mask" else gap < 0 and name.endswith("k1")
            assert keep[1, column] == harmless and keep[[0, 2, 3]].all(), name
        else:
            assert np.isfinite(result.weights_BT).all() and (result.weights_BT >= 0).all(), name
            assert float(result.weights_BT.max()) <= 2.0, name


@given(st.permutations(range(4)), st.integers(0, 99))
def test_permuted_rows_give_permuted_results(order, seed):
    order, (x, advantages) = np.array(order), arrays(seed)
    want = all_corrections(x, advantages, MASK)
    for name, result in all_corrections(x[order], advantages[order], MASK[order]).items():
        rtol = 8 * EPS if name == "normalize" else 0  # the one sum over rows
        for actual, expected in zip(result, want[name], strict=True):
            if expected is not None:
                np.testing.assert_allclose(actual, expected[order], rtol=rtol, err_msg=name)


def test_a_row_without_true_tokens_weighs_one():
    for name, result in all_corrections(*arrays(0), MASK).items():
        keep, weights = (None if x is None else np.asarray(x)[2] for x in result[1::-1])
        assert keep is None or keep.all(), name
        assert weights is None or name == "normalize" or (weights == 1.0).all(), name
