# SPDX-License-Identifier: Apache-2.0
"""The clipped surrogate, by hand, by a float64 formula, and at its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.losses import grpo_loss

EPS = float(np.finfo(np.float32).eps)
B, T = 2, 5
MASK = np.array([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]], bool)


def arrays(*values):
    return [jnp.asarray(v, bool if np.asarray(v).dtype == bool else jnp.float32) for v in values]


def formula(logp, old, advantages, mask, low=0.2, high=0.28):
    """The paper's surrogate in float64."""
    ratio = np.exp(logp - old)
    terms = np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)
    return -terms[mask].sum() / mask.sum()


def test_hand_worked_tokens():
    # ρ = 1.5, 0.5, 1.5, 0.5 with A = 2, 2, -2, -2: clipped, free, free, clipped
    logp, old, adv, mask = arrays(
        np.log([[1.5, 0.5, 1.5, 0.5]]),
        np.zeros((1, 4)),
        [[2.0, 2.0, -2.0, -2.0]],
        np.ones((1, 4), bool),
    )
    loss, metrics = grpo_loss(logp, old, adv, mask, clip_low=0.2, clip_high=0.28)
    want = -(1.28 * 2 + 0.5 * 2 - 1.5 * 2 - 0.8 * 2) / 4
    # three roundings a term, terms at most 3, four sums
    assert abs(float(loss) - want) <= 8 * 3 * EPS
    assert float(metrics["policy/clip_frac"]) == 0.5
    assert abs(float(metrics["policy/ratio_mean"]) - 1.0) <= 8 * EPS


def test_the_gradient_matches_float64_finite_differences():
    rng = np.random.default_rng(0)
    logp = rng.normal(-2, 0.5, (B, T)).astype(np.float32).astype(np.float64)
    # ratios away from the kinks at 0.8 and 1.28
    gap = rng.choice([-0.7, -0.1, 0.1, 0.6], (B, T))
    old = (logp - gap).astype(np.float32).astype(np.float64)
    adv = rng.normal(size=(B, T)).astype(np.float32).astype(np.float64)
    gradient = jax.grad(lambda x: grpo_loss(x, *arrays(old, adv, MASK), clip_high=0.28)[0])(
        arrays(logp)[0]
    )
    step, want = 1e-5, np.zeros((B, T))
    for index in np.ndindex(B, T):
        up, down = logp.copy(), logp.copy()
        up[index] += step
        down[index] -= step
        want[index] = (formula(up, old, adv, MASK) - formula(down, old, adv, MASK)) / (2 * step)
    # eight float32 roundings, and step**2 of the central difference
    bound = 8 * EPS * np.abs(want) + step**2 * np.abs(adv) * 2
    assert np.all(np.abs(np.asarray(gradient) - want) <= bound)
    assert np.count_nonzero(want) >= 2  # not all clipped


def test_on_policy_gradient_is_minus_advantage_over_total():
    rng = np.random.default_rng(1)
    logp, adv, mask = arrays(rng.normal(-3, 2, (B, T)), rng.normal(size=(B, T)), MASK)
    value = jax.value_and_grad(
        lambda x: grpo_loss(x, jax.lax.stop_gradient(x), adv, mask), has_aux=True
    )
    (_, metrics), grad = value(logp)
    assert float(metrics["policy/ratio_mean"]) == 1.0
    assert float(metrics["policy/clip_frac"]) == 0.0
    want = np.where(MASK, -np.asarray(adv) / MASK.sum(), 0)
    np.testing.assert_allclose(np.asarray(grad), want, rtol=2 * EPS, atol=0)


@given(st.sampled_from([np.nan, np.inf, -np.inf]), st.integers(0, 2))
def test_what_stands_under_a_false_mask_never_matters(poison, poisoned):
    rng = np.random.default_rng(2)
    clean = [rng.normal(-2, 1, (B, T)), rng.normal(-2, 1, (B, T)), rng.normal(size=(B, T))]
    dirty = [x.copy() for x in clean]
    dirty[poisoned][~MASK] = poison

    def loss(values):
        return grpo_loss(*values, jnp.asarray(MASK))

    results = [jax.value_and_grad(loss, has_aux=True)(arrays(*x)) for x in (clean, dirty)]
    for a, b in zip(*[jax.tree.leaves(r) for r in results], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("gap", [1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_thousand_nats_apart_stays_finite(gap, advantage):
    mask = jnp.ones((1, 2), bool)
    logp, old, adv = arrays([[gap, -1.0]], [[0.0, -1.0]], [[advantage, advantage]])
    out = jax.value_and_grad(lambda x: grpo_loss(x, old, adv, mask), has_aux=True)(logp)
    assert all(np.all(np.isfinite(np.asarray(x))) for x in jax.tree.leaves(out))


def test_pieces_with_the_same_total_add_up():
    rng = np.random.default_rng(3)
    logp, old, adv, mask = arrays(*rng.normal(-1, 0.3, (3, B, T)), MASK)
    full_loss, _ = grpo_loss(logp, old, adv, mask)
    total = jnp.float32(MASK.sum())
    pieces = [
        grpo_loss(logp[i : i + 1], old[i : i + 1], adv[i : i + 1], mask[i : i + 1], total=total)[0]
        for i in range(B)
    ]
    assert abs(float(full_loss) - float(sum(pieces))) <= T * EPS * np.abs(np.asarray(adv)).sum()


def test_no_true_token_gives_zero_and_zero_gradient():
    logp, old, adv = arrays(*np.ones((3, B, T)))
    nothing = jnp.zeros((B, T), bool)
    (loss, _), grad = jax.value_and_grad(lambda x: grpo_loss(x, old, adv, nothing), has_aux=True)(
        logp
    )
    assert float(loss) == 0.0 and not np.any(np.asarray(grad))
