# SPDX-License-Identifier: Apache-2.0
"""Every objective: the peers' published cases, gradients by finite differences, and its edges."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.losses import (
    cispo,
    cross_entropy,
    dppo_tv,
    grpo_loss,
    gspo,
    masked_sum,
    ppo_clip,
    reinforce,
    sapo,
    seq_mean_token_mean,
    seq_mean_token_sum_norm,
    token_mean,
)

EPS = float(np.finfo(np.float32).eps)


def row(*values):
    return jnp.asarray([values], jnp.float32)


def true_mask(x):
    return jnp.ones(x.shape, bool)


# --- published: SkyRL, tests/train/algorithms/test_losses.py; ratios 0.5, 1, 10
A, OLD, LOGP = row(1, -1, -4), row(-1, -1, -3), row(-1.69315, -1, -0.69741)


@pytest.mark.paper
def test_dual_clip_bounds_the_loss_of_bad_tokens():
    # SkyRL tests/train/algorithms/test_losses.py
    terms = ppo_clip(LOGP, OLD, A, true_mask(A), dual_clip=3.0)
    np.testing.assert_allclose(terms, row(-0.5, 1, 12), atol=1e-4)
    assert float(terms.sum()) == pytest.approx(12.5, abs=1e-4)
    np.testing.assert_allclose(ppo_clip(LOGP, OLD, A, true_mask(A)), row(-0.5, 1, 40), rtol=1e-4)


@pytest.mark.paper
def test_cispo_weighs_by_the_clipped_ratio():
    # SkyRL tests/train/algorithms/test_losses.py
    terms = cispo(LOGP, OLD, A, true_mask(A), clip_low=0.2, clip_high=0.2)
    assert float(terms.sum()) == pytest.approx(-2.9930, abs=1e-4)


@pytest.mark.paper
@pytest.mark.parametrize(
    ("logp", "advantages", "keeps_gradient"),
    [([-0.3, -2.0, -0.9], [1, -1, 1], [False, False, True]), ([-2.0, -0.3], [1, -1], [True, True])],
)
def test_dppo_drops_tokens_that_went_far_enough(logp, advantages, keeps_gradient):
    # SkyRL tests/train/algorithms/test_losses.py
    logp, advantages = row(*logp), row(*advantages)
    old = jnp.full(logp.shape, -1.0)

    def loss(x):
        return dppo_tv(x, old, advantages, true_mask(logp), delta=0.2).sum()

    assert (jax.grad(loss)(logp) != 0).tolist() == [keeps_gradient]


@pytest.mark.paper
def test_gspo_ratios_vary_less_than_tokens_do():
    # SkyRL tests/train/algorithms/test_losses.py
    rng = np.random.default_rng(0)
    logp, old = (jnp.asarray(-rng.random((4, 11)), jnp.float32) for _ in range(2))
    advantages = jnp.ones_like(logp)
    sequence = gspo(logp, old, advantages, true_mask(logp), clip_low=9.0, clip_high=9.0)
    token = ppo_clip(logp, old, advantages, true_mask(logp), clip_low=9.0, clip_high=9.0)
    assert float(sequence.var()) < 0.2 * float(token.var())
    np.testing.assert_allclose(sequence, sequence[:, :1] + jnp.zeros_like(logp), rtol=4 * EPS)


# --- gradients: against central differences of a float64 loss written anew


def ratio64(logp, old):
    return np.exp(logp - old)


def clip64(r, a, low, high):
    return -np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)


def loss64(name, logp, old, a, mean_ratio):
    """`held` is where stop_gradient freezes the log-probs."""
    r, r0 = ratio64(logp, old), ratio64(mean_ratio, old)
    if name == "clipped":
        plain = clip64(r, a, 0.2, 0.28)
        return np.where(a < 0, np.minimum(plain, -3.0 * a), plain)
    if name == "gspo":
        s = np.exp((mean_ratio - old).mean(1, keepdims=True) + logp - mean_ratio)
        return clip64(s, a, 0.1, 0.15)
    if name == "cispo":
        return -np.clip(r0, 0.8, 1.3) * a * logp
    if name == "sapo":
        tau = np.where(a > 0, 1.0, 1.05)
        return -(4 / tau) / (1 + np.exp(-tau * (r - 1))) * a
    if name == "dppo":
        d = np.exp(mean_ratio) - np.exp(old)
        return np.where(((d > 0.2) & (a > 0)) | ((d < -0.2) & (a < 0)), 0.0, -r * a)
    return -a * logp


OBJECTIVES = {
    "clipped": lambda n, o, a, m: ppo_clip(n, o, a, m, clip_high=0.28, dual_clip=3.0),
    "gspo": lambda n, o, a, m: gspo(n, o, a, m, clip_low=0.1, clip_high=0.15),
    "cispo": lambda n, o, a, m: cispo(n, o, a, m, clip_low=0.2, clip_high=0.3),
    "sapo": sapo,
    "dppo": lambda n, o, a, m: dppo_tv(n, o, a, m, delta=0.2),
    "reinforce": lambda n, o, a, m: reinforce(n, a, m),
}


@partial(jax.jit, static_argnums=0)
def run_objective(name, logp, old, a, mask):
    """The sum over true tokens and its gradient."""
    return jax.value_and_grad(lambda x: masked_sum(OBJECTIVES[name](x, old, a, mask), mask))(logp)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_and_gradients_are_those_of_float64_differences(name):
    rng = np.random.default_rng(0)
    logp, old = (np.float64(np.float32(-2 * rng.random((5, 7)))) for _ in range(2))
    a = np.float64(np.float32(rng.normal(size=(5, 7)) * 2))
    arrays = [x.astype(np.float32) for x in (logp, old, a)]
    value, grad = run_objective(name, *arrays, np.ones(logp.shape, bool))
    h = 1e-6
    up, down = (loss64(name, logp + d, old, a, logp) for d in (h, -h))
    want = (up - down) / (2 * h)  # every term depends on its own token alone
    # ulps: exp of a log-ratio up to 2 carries 2 of its own beside the products' few
    scale = np.abs(a) * np.exp(np.abs(logp - old)) + 1
    assert np.all(np.abs(np.asarray(grad) - want) <= (16 * EPS + 1e-8) * scale)
    total = loss64(name, logp, old, a, logp)
    assert abs(float(value) - total.sum()) <= 32 * EPS * np.abs(total).sum()


# --- what must not matter, and where everything meets


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("value", [1000.0, -np.inf, np.nan])
def test_false_tokens_never_matter_and_nothing_turns_nan(name, value):
    mask = np.asarray([[True, False, True]])
    clean, dirty = (
        run_objective(name, *(np.where(mask, x, np.float32(y)) for x in (LOGP, OLD, A)), mask)
        for y in (0.0, value)
    )
    assert float(clean[0]) == float(dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("value", [1000.0, np.nan])
def test_values_under_zero_advantage_break_nothing(name, value):
    mask, a = np.ones((2, 3), bool), np.float32([[1.0, 0.0, -2.0], [0.0, 0.0, 0.0]])
    if name == "gspo":  # its ratio is the row's: there it is rows of advantage 0
        a[0, 1] = 3.0
    old, dirty = (np.where(a == 0, np.float32(x), np.float32(-1.0)) for x in (0.0, value))
    for logp, old_logp in ((dirty, old), (old, dirty)):
        loss, grad = run_objective(name, logp, old_logp, a, mask)
        assert np.isfinite(float(loss)) and np.isfinite(grad).all()
        assert (np.asarray(grad) != 0).tolist() == (np.asarray(a) != 0).tolist()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("gap", [1000.0, -1000.0])
def test_a_thousand_nats_at_true_tokens_stay_finite(name, gap):
    logp = row(gap, -1.0)
    terms, pull = jax.vjp(
        lambda x: OBJECTIVES[name](x, row(0.0, -1.0), row(1, -1), true_mask(logp)), logp
    )
    assert bool(jnp.isfinite(terms).all()) and bool(jnp.isfinite(pull(terms)[0]).all())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_every_objective_has_the_policy_gradient(name):
    logp = -np.random.default_rng(0).random((3, 5)).astype(np.float32)
    a = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    _, grad = run_objective(name, logp, logp, a, np.ones((3, 5), bool))
    np.testing.assert_allclose(grad, -a, rtol=4 * EPS)


def test_gspos_sequence_form_has_the_same_gradient():
    rng = np.random.default_rng(2)
    logp, old = (jnp.asarray(-0.1 * rng.random((3, 6)), jnp.float32) for _ in range(2))
    a = jnp.broadcast_to(jnp.asarray([[1.0], [-2.0], [0.5]]), logp.shape)
    lengths = jnp.asarray([[6], [4], [2]])
    mask = jnp.arange(6)[None, :] < lengths
    weights = seq_mean_token_mean(mask)

    def token(x):
        return masked_sum(gspo(x, old, a, mask, clip_low=0.5, clip_high=0.5) * weights, mask)

    def sequence(x):
        mean = jnp.where(mask, x - old, 0.0).sum(1) / lengths[:, 0].astype(jnp.float32)
        return -jnp.mean(jnp.exp(mean) * a[:, 0])

    (value, grad), (want, want_grad) = (jax.value_and_grad(f)(logp) for f in (token, sequence))
    assert float(value) == pytest.approx(float(want), rel=8 * EPS)
    np.testing.assert_allclose(grad, want_grad, rtol=16 * EPS, atol=EPS)


def test_grpo_is_ppo_clip_under_the_token_mean():
    mask = jnp.asarray([[True, False, True]])
    clip = dict(clip_low=0.2, clip_high=0.28)

    def plain(logp):
        return masked_sum(ppo_clip(logp, OLD, A, mask, **clip) * token_mean(mask), mask)

    loss, grad = jax.value_and_grad(lambda x: grpo_loss(x, OLD, A, mask, **clip)[0])(LOGP)
    want, want_grad = jax.value_and_grad(plain)(LOGP)
    assert float(loss) == float(want) and np.asarray(grad).any()
    np.testing.assert_array_equal(grad, want_grad)


def test_grpo_loss_by_hand():
    # ρ = 1.5, 0.5, 1.5, 0.5 with A = 2, 2, -2, -2: clipped, free, free, clipped
    logp, a = jnp.log(row(1.5, 0.5, 1.5, 0.5)), row(2, 2, -2, -2)
    arrays, clip = (logp, jnp.zeros((1, 4)), a, true_mask(a)), dict(clip_low=0.2, clip_high=0.28)
    loss, metrics = grpo_loss(*arrays, **clip)
    # three roundings a term, terms at most 3, four sums
    assert abs(float(loss) + (1.28 * 2 + 0.5 * 2 - 1.5 * 2 - 0.8 * 2) / 4) <= 8 * 3 * EPS
    assert float(metrics["policy/clip_frac"]) == 0.5
    assert abs(float(metrics["policy/ratio_mean"]) - 1.0) <= 8 * EPS
    part, metrics = grpo_loss(*arrays, **clip, total=jnp.float32(8))
    assert float(part) == float(loss) / 2 and float(metrics["policy/clip_frac"]) == 0.25


def test_cross_entropy_weighs_each_answer_token_equally():
    mask = jnp.asarray([[False, True, True, False]])
    loss, grad = jax.value_and_grad(cross_entropy)(row(np.nan, -1.0, -2.0, np.inf), mask)
    assert float(loss) == 1.5 and grad.tolist() == [[0.0, -0.5, -0.5, 0.0]]
    assert float(cross_entropy(row(-9, -1, -2, -9), mask, total=jnp.float32(4))) == 0.75


# --- denominators; the terms and the mask are those of verl's test_loss_aggregation_on_cpu.py
TERMS = jnp.asarray([[1.0, 2, 30], [4, 50, 6]])
MASK = jnp.asarray([[True, True, False], [True, False, True]])


@pytest.mark.paper
def test_denominators_by_hand():
    # verl tests/trainer/ppo/test_loss_aggregation_on_cpu.py, test_token_sum_masks_tokens_…
    def mean(weights):
        return float(masked_sum(TERMS * weights, MASK))

    assert mean(MASK.astype(jnp.float32)) * 4 == 52  # its token-sum over 4 processes
    assert mean(token_mean(MASK)) == 13 / 4
    assert mean(seq_mean_token_mean(MASK)) == (3 / 2 + 10 / 2) / 2
    assert mean(seq_mean_token_sum_norm(MASK, length=8)) == 13 / 16


def test_a_row_without_true_tokens_is_no_sequence():
    terms, mask = (jnp.concatenate([x, jnp.zeros_like(x[:1])]) for x in (TERMS, MASK))
    for full, part in (
        (seq_mean_token_mean(mask), seq_mean_token_mean(MASK)),
        (seq_mean_token_sum_norm(mask, length=8), seq_mean_token_sum_norm(MASK, length=8)),
    ):
        assert float(masked_sum(terms * full, mask)) == float(masked_sum(TERMS * part, MASK))


@pytest.mark.paper
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_microbatches_cut_from_whole_weights_add_up(pieces):
    # verl, the same file: test_token_sum_is_microbatch_invariant
    rng = np.random.default_rng(0)
    terms = jnp.asarray(rng.integers(-8, 8, (4, 6)), jnp.float32)
    mask = jnp.asarray(rng.random((4, 6)) < 0.5).at[3].set(False)  # and an empty row
    for weights in (
        token_mean(mask),
        seq_mean_token_mean(mask),
        seq_mean_token_sum_norm(mask, length=8),
    ):
        parts = [
            float(masked_sum(t * w, m))
            for t, w, m in zip(*(jnp.split(x, pieces) for x in (terms, weights, mask)), strict=True)
        ]
        assert sum(parts) == pytest.approx(float(masked_sum(terms * weights, mask)), abs=8 * EPS)


def test_no_true_token_weighs_nothing():
    nothing = jnp.zeros((2, 3), bool)
    for weights in (
        token_mean(nothing),
        seq_mean_token_mean(nothing),
        seq_mean_token_sum_norm(nothing, length=3),
    ):
        assert not np.asarray(weights).any()
