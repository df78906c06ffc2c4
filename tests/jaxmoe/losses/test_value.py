# SPDX-License-Identifier: Apache-2.0
"""The critic's loss: by hand, against float64 and its central differences, and at its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.losses import clipped_value_loss, explained_variance, masked_sum

EPS = float(np.finfo(np.float32).eps)
MASK = np.array([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], bool)


def arrays(*values):
    return [jnp.asarray(x, jnp.float32) for x in values]


def value64(values, old, returns, clip):
    """verl's compute_value_loss before its mean, written anew in float64."""
    clipped = old + np.clip(values - old, -clip, clip)
    return 0.5 * np.maximum((values - returns) ** 2, (clipped - returns) ** 2)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (0.75, 2.0, 1.125, 0.0),  # already moved 0.5 toward the return: held
        (-0.75, -2.0, 1.125, 0.0),
        (0.75, 0.0, 0.28125, 0.75),  # moved away from it: called back
        (0.75, 0.5625, 0.017578125, 0.1875),  # past it, by more than the clipped one is short
        (0.75, 0.6875, 0.017578125, 0.0),  # and by less
        (-0.25, 1.0, 0.78125, -1.25),  # inside
    ],
)
def test_the_clip_stops_values_that_moved_too_far(value, target, loss, slope):
    def term(x):
        return clipped_value_loss(
            x, *arrays([[0.0]], [[target]]), jnp.ones((1, 1), bool), clip=0.5
        )[0, 0]

    actual, grad = jax.value_and_grad(term)(jnp.full((1, 1), value, jnp.float32))
    assert float(actual) == loss and float(grad[0, 0]) == slope


@pytest.mark.parametrize("clip", [0.5, 0.05, float("inf")])
def test_values_and_gradients_are_those_of_float64_differences(clip):
    rng = np.random.default_rng(0)
    values, old, returns = (
        np.float64(np.float32(2 * rng.normal(size=MASK.shape))) for _ in range(3)
    )
    fixed, mask = arrays(old, returns), jnp.asarray(MASK)
    actual, grad = jax.value_and_grad(
        lambda x: masked_sum(clipped_value_loss(x, *fixed, mask, clip=clip), mask)
    )(*arrays(values))
    h = 1e-6
    up, down = (value64(values + d, old, returns, clip) for d in (h, -h))
    want = np.where(MASK, (up - down) / (2 * h), 0.0)
    # one subtraction of numbers below 8, and no kink within h
    np.testing.assert_allclose(grad, want, atol=8 * EPS + 1e-8)
    is_clipped = MASK & (want == 0)
    assert is_clipped.any() == (clip < 1) and (want != 0).any()
    total = value64(values, old, returns, clip)[MASK].sum()
    assert float(actual) == pytest.approx(total, rel=32 * EPS)


def test_a_batchs_first_update_is_never_clipped():
    values, returns = arrays(*np.random.default_rng(1).normal(size=(2, *MASK.shape)))
    mask = jnp.asarray(MASK)
    grad = jax.grad(lambda x: clipped_value_loss(x, values, returns, mask, clip=0.1).sum())(values)
    np.testing.assert_allclose(grad, jnp.where(mask, values - returns, 0.0), rtol=4 * EPS)


def test_old_values_and_returns_get_no_gradient():
    values, old, returns = arrays(*np.random.default_rng(2).normal(size=(3, *MASK.shape)))
    grads = jax.grad(
        lambda o, g: clipped_value_loss(values, o, g, jnp.asarray(MASK)).sum(), argnums=(0, 1)
    )(old, returns)
    assert not any(np.asarray(g).any() for g in grads)


@pytest.mark.parametrize("value", [1000.0, np.inf, -np.inf, np.nan])
def test_what_stands_at_false_tokens_never_matters(value):
    clean = arrays(*np.where(MASK, np.random.default_rng(3).normal(size=(3, *MASK.shape)), 0.0))
    dirty = [jnp.where(MASK, x, value) for x in clean]

    def losses_and_gradients(values, old, returns):
        loss = jax.value_and_grad(
            lambda x: clipped_value_loss(x, old, returns, jnp.asarray(MASK)).sum()
        )
        return (*loss(values), explained_variance(values, returns, jnp.asarray(MASK)))

    for actual, want in zip(
        losses_and_gradients(*dirty), losses_and_gradients(*clean), strict=True
    ):
        np.testing.assert_array_equal(actual, want)


def test_explained_variance_is_numpys():
    rng = np.random.default_rng(4)
    returns = rng.normal(3.0, 2.0, MASK.shape)
    values = returns + rng.normal(0.0, 1.0, MASK.shape)
    actual = explained_variance(*arrays(values, returns), jnp.asarray(MASK))
    want = 1 - np.var((returns - values)[MASK]) / np.var(returns[MASK])
    assert float(actual) == pytest.approx(want, abs=64 * EPS) and 0 < want < 1


def test_explained_variance_ranks_perfect_constant_and_wrong_critics():
    (returns,), mask = arrays([[1.0, 2.0, 4.0]]), jnp.ones((1, 3), bool)
    assert float(explained_variance(returns, returns, mask)) == 1.0
    assert float(explained_variance(returns + 7.0, returns, mask)) == 1.0  # no variance either
    for values, want in ((jnp.full((1, 3), 9.0), 0.0), (-returns, -3.0)):
        actual = float(explained_variance(values, returns, mask))
        assert actual == pytest.approx(want, abs=16 * EPS)
    assert float(explained_variance(returns, jnp.ones((1, 3)), mask)) == 0.0


def test_no_true_token_is_zero_and_not_nan():
    x, nothing = jnp.ones((2, 3)), jnp.zeros((2, 3), bool)
    assert not np.asarray(clipped_value_loss(x, x, x + 1.0, nothing)).any()
    assert float(explained_variance(x, x + 1.0, nothing)) == 0.0
