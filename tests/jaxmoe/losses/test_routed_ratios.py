# SPDX-License-Identifier: Apache-2.0
"""Objectives that use experts: cases by hand, float64 differences, and what must not matter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.losses import (
    erpo,
    gspo,
    length_scaled_clip,
    mask_switched,
    masked_sum,
    ppo_clip,
    rspo,
    switch_aware_clip,
)
from jaxmoe.losses.routed_ratios import move_to_next_token

EPS = float(np.finfo(np.float32).eps)
B, T, L, E, A = 4, 7, 2, 5, 2
LENGTHS = np.array([7, 5, 3, 6])
IS_TOKEN = np.arange(T)[None] < LENGTHS[:, None]
MASK = IS_TOKEN & (np.arange(T)[None] >= 2)  # two tokens of prompt
NAMES = ("rspo", "erpo", "switch_aware_clip", "length_scaled_clip")


def make_arrays(seed):
    """Return float64 arrays by name, whose values float32 can hold."""
    rng = np.random.default_rng(seed)

    def rounded(x):
        return np.float64(np.float32(x))

    def choose():
        return rng.random((B, T, L, E)).argsort(-1)[..., :A].astype(np.int32)

    logits = rounded(rng.normal(size=(B, T, L, E)))
    return {
        "logp": rounded(-rng.random((B, T))),
        "old": rounded(-rng.random((B, T))),
        "a": rounded(rng.normal(size=(B, T)) * 2),
        "logits": logits,
        "old_logits": rounded(logits + 0.3 * rng.normal(size=logits.shape)),
        "experts": choose(),
        "old_experts": choose(),
        "switched": rng.random((B, T)) < 0.5,
    }


def call_objective(name, x, mask=MASK, **options):
    """Call an objective on float64 arrays, or on jax arrays as they are."""
    x = {
        n: v if isinstance(v, jax.Array) or v.dtype.kind != "f" else jnp.asarray(v, jnp.float32)
        for n, v in x.items()
    }
    x = {n: jnp.asarray(v) for n, v in x.items()}
    first = (x["logp"], x["old"], x["a"], jnp.asarray(mask))
    return {
        "rspo": lambda: rspo(
            *first,
            x["logits"],
            x["old_logits"],
            x["old_experts"],
            **{"clip_high": 0.28, "dual_clip": 3.0} | options,
        ),
        "erpo": lambda: erpo(
            *first, x["experts"], jnp.arange(E), **{"clip_low": 0.1, "clip_high": 0.15} | options
        ),
        "switch_aware_clip": lambda: switch_aware_clip(
            *first, x["switched"], **{"dual_clip": 3.0, "tight": 0.6} | options
        ),
        "length_scaled_clip": lambda: length_scaled_clip(
            *first, **{"dual_clip": 3.0, "length": 3} | options
        ),
    }[name]()


@partial(jax.jit, static_argnums=0)
def run_objective(name, x):
    """The sum over true tokens and its gradient; numbers are rounded to float32."""

    def total(logp):
        return masked_sum(call_objective(name, x | {"logp": logp}), jnp.asarray(MASK))

    return jax.value_and_grad(total)(x["logp"])


def clipped64(r, a, low, high, dual=np.inf):
    loss = -np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)
    return np.where(a < 0, np.minimum(loss, -dual * a), loss) if dual < np.inf else loss


def softmax64(x):
    e = np.exp(x)
    return e / e.sum(-1, keepdims=True)


def pool64(log_ratio, experts, mask):
    """Return the pooled log-ratio of each token, by loops over tokens, layers and experts."""
    pooled = np.zeros_like(log_ratio)
    for b, t in zip(*np.nonzero(mask), strict=True):
        means = []
        for layer in range(L):
            for e in experts[b, t - 1, layer]:
                group = [u for u in range(T) if mask[b, u] and e in experts[b, u - 1, layer]]
                means.append(np.mean([log_ratio[b, u] for u in group]))
        pooled[b, t] = np.mean(means)
    return pooled


def loss64(name, x, logp):
    """Return the loss at each token in float64; x["logp"] is where stop_gradient freezes it."""
    r, a = np.exp(logp - x["old"]), np.where(MASK, x["a"], 0.0)
    if name == "rspo":
        p, q = softmax64(x["logits"]), softmax64(x["old_logits"])
        shift = np.abs(np.log(p) - np.log(q))
        gamma = np.ones((B, T))
        for b in range(B):
            for t in range(1, T):
                experts = x["old_experts"][b, t - 1]
                values = [shift[b, t - 1, i, e] for i in range(L) for e in experts[i]]
                gamma[b, t] = max(np.exp(-np.mean(values)), 0.2)
        return clipped64(gamma * r, a, 0.2, 0.28, 3.0)
    if name == "erpo":
        pooled = pool64(np.where(MASK, x["logp"] - x["old"], 0.0), x["experts"], MASK)
        return clipped64(np.exp(pooled + logp - x["logp"]), a, 0.1, 0.15)
    if name == "switch_aware_clip":
        scale = np.where(x["switched"], 0.4, 1.0)
    else:
        scale = np.minimum((3.0 / MASK.sum(1, keepdims=True)) ** 2, 1.0)
    return clipped64(r, a, 0.2 * scale, 0.2 * scale, 3.0)


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_float64_differences(name):
    x, step = make_arrays(0), 1e-6
    value, grad = run_objective(name, x)
    up, down = (loss64(name, x, x["logp"] + d) for d in (step, -step))
    expected = np.where(MASK, (up - down) / (2 * step), 0.0)
    scale = np.abs(x["a"]) * np.exp(np.abs(x["logp"] - x["old"])) + 1
    assert np.all(np.abs(np.asarray(grad) - expected) <= (32 * EPS + 1e-8) * scale)
    assert (expected != 0).sum() > 3 and (expected[MASK] == 0).any()  # both sides of the clip
    total = loss64(name, x, x["logp"])[MASK]
    assert abs(float(value) - total.sum()) <= 64 * EPS * np.abs(total).sum()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [np.nan, -np.inf, 1e30])
def test_masked_tokens_and_unused_logits_never_matter(name, garbage):
    x = make_arrays(4)
    # The position before a trained token is used, and no other.
    used = np.pad(MASK[:, 1:], ((0, 0), (0, 1)))[:, :, None, None]

    def value_and_gradient(fill):
        dirty = x | {n: np.where(MASK, x[n], fill) for n in ("logp", "old", "a")}
        dirty |= {n: np.where(used, x[n], fill) for n in ("logits", "old_logits")}
        number = 0 if np.isfinite(fill) and abs(fill) < 1 else -7
        dirty |= {n: np.where(used, x[n], number) for n in ("experts", "old_experts")}
        return run_objective(name, dirty)

    (value, grad), (expected, expected_grad) = map(value_and_gradient, (garbage, 0.0))
    assert float(value) == float(expected)
    np.testing.assert_array_equal(grad, expected_grad)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_where_the_advantages_are_zero_matters(name):
    x = make_arrays(5)
    x["a"][2:] = 0.0
    dead = (x["a"] == 0)[:, :, None, None]
    dirty = x | {n: np.where(dead[..., 0, 0], np.nan, x[n]) for n in ("logp", "old")}
    dirty |= {n: np.where(dead, np.nan, x[n]) for n in ("logits", "old_logits")}
    value, grad = run_objective(name, dirty)
    assert np.isfinite(float(value)) and np.isfinite(grad).all()
    assert not np.asarray(grad)[2:].any() and np.asarray(grad)[:2].any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_independent_so_microbatches_change_nothing(name):
    x = make_arrays(6)
    complete = call_objective(name, x)
    for rows in np.split(np.arange(B), 2):
        part = call_objective(name, {n: v[rows] for n, v in x.items()}, MASK[rows])
        np.testing.assert_array_equal(part, np.asarray(complete)[rows])


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_each_has_the_policy_gradient(name):
    x = make_arrays(7)
    x = x | {"old": x["logp"], "old_logits": x["logits"], "old_experts": x["experts"]}
    _, grad = run_objective(name, x)
    np.testing.assert_allclose(grad, np.where(MASK, -x["a"], 0.0), rtol=8 * EPS)


def test_only_the_log_prob_has_a_gradient():
    x = {
        n: jnp.asarray(v, jnp.float32 if v.dtype.kind == "f" else v.dtype)
        for n, v in make_arrays(8).items()
    }
    constant = {array: x[array] for array in ("old", "a", "logits", "old_logits")}
    for name in NAMES:
        grads = jax.grad(lambda arrays, n=name: call_objective(n, x | arrays).sum())(constant)
        for array, grad in grads.items():
            assert not np.asarray(grad).any(), (name, array)


def test_rspo_by_hand():
    # One layer, two experts. p(0) falls from 2/3 to 1/3 at the position before the token.
    log2 = float(np.log(2.0))
    old_logits = jnp.asarray([[[[log2, 0.0]], [[0.0, 0.0]]]])
    logits = jnp.asarray([[[[0.0, log2]], [[9.0, 0.0]]]])  # the token's own position is not used
    experts, mask = jnp.zeros((1, 2, 1, 1), jnp.int32), jnp.asarray([[False, True]])
    logp = jnp.zeros((1, 2))
    for advantage, floor, expected in (
        (1.0, 0.2, -0.5),  # γ = exp(−log 2) = 1/2, and the ratio 1/2 is not clipped
        (1.0, 0.75, -0.75),
        (-1.0, 0.2, 0.8),  # the floor; for A < 0 the clip at 1 − 0.2
    ):
        terms = rspo(
            logp, logp, jnp.full((1, 2), advantage), mask, logits, old_logits, experts, floor=floor
        )
        assert terms.tolist() == [[0.0, pytest.approx(expected, rel=4 * EPS)]]


def test_erpo_contains_gspo_and_ppo_clip():
    x = make_arrays(9)
    logp, old, a = (jnp.asarray(x[n], jnp.float32) for n in ("logp", "old", "a"))
    mask, options = jnp.asarray(MASK), {"clip_low": 0.3, "clip_high": 0.4}

    def value_and_gradient(fn):
        return jax.value_and_grad(lambda v: masked_sum(fn(v), mask))(logp)

    # All experts of a token, as with soft routing, form one group in each row.
    soft = jnp.broadcast_to(jnp.arange(E), (B, T, L, E))
    per_token = jnp.broadcast_to(jnp.arange(T)[None, :, None, None], (B, T, L, 1))
    for experts, numbers, other in (
        (soft, jnp.arange(E), gspo),
        (per_token, jnp.arange(T), ppo_clip),
    ):
        value, grad = value_and_gradient(
            lambda v, e=experts, n=numbers: erpo(v, old, a, mask, e, n, **options)
        )
        expected, expected_grad = value_and_gradient(
            lambda v, f=other: f(v, old, a, mask, **options)
        )
        assert float(value) == pytest.approx(float(expected), rel=32 * EPS)
        np.testing.assert_allclose(grad, expected_grad, rtol=32 * EPS, atol=8 * EPS)


def test_the_range_of_switched_tokens_is_tighter():
    logp = jnp.log(jnp.asarray([[1.15, 1.15, 1.3]]))
    switched, ones = jnp.asarray([[False, True, True]]), jnp.ones((1, 3))
    args = (jnp.zeros((1, 3)), ones, ones > 0)
    terms = switch_aware_clip(logp, *args, switched, tight=0.5)
    np.testing.assert_allclose(terms, [[-1.15, -1.1, -1.1]], rtol=4 * EPS)
    np.testing.assert_array_equal(
        switch_aware_clip(logp, *args, switched, tight=0.0), ppo_clip(logp, *args)
    )
    np.testing.assert_array_equal(
        switch_aware_clip(logp, *args, jnp.zeros((1, 3), bool), tight=1.0), ppo_clip(logp, *args)
    )


def test_the_range_shrinks_with_the_squared_length():
    logp, mask = jnp.full((3, 8), float(np.log(1.5))), np.zeros((3, 8), bool)
    for row, tokens in enumerate((2, 4, 8)):
        mask[row, :tokens] = True
    args = (jnp.zeros((3, 8)), jnp.ones((3, 8)), jnp.asarray(mask))
    terms = length_scaled_clip(logp, *args, length=4)
    # Full range at 2 and 4 tokens; a quarter of it at twice the length.
    np.testing.assert_allclose(terms[:, 0], [-1.2, -1.2, -1.05], rtol=4 * EPS)
    np.testing.assert_array_equal(length_scaled_clip(logp, *args, length=8), ppo_clip(logp, *args))


def test_switched_tokens_are_dropped():
    switched = jnp.asarray([[True, False]])
    correction = mask_switched(switched)
    assert correction.keep_BT.tolist() == [[False, True]]
    assert correction.weights_BT is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rspo", {"floor": 1.5}, "floor must be between 0 and 1, got 1.5. Try floor=1.0."),
        ("rspo", {"dual_clip": 1.0}, "dual_clip must be above 1"),
        ("erpo", {"clip_low": -0.1}, "clip_low must be 0 or more"),
        ("switch_aware_clip", {"tight": -0.5}, "tight must be between 0 and 1"),
        ("length_scaled_clip", {"length": 0}, "length must be above 0, got 0."),
    ],
)
def test_options_out_of_range_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        call_objective(name, make_arrays(0), **options)


@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_rspo_weights_are_between_floor_and_one(seed, floor):
    x = make_arrays(seed)
    ones = x | {"old": x["logp"], "a": np.ones((B, T))}
    ratio = -np.asarray(call_objective("rspo", ones, floor=floor, clip_low=1.0))[MASK]
    assert (ratio <= 1.0).all() and (ratio >= np.float32(floor)).all()


def test_an_array_shifts_one_token_right():
    x = jnp.arange(12).reshape(2, 3, 2)
    assert move_to_next_token(x).tolist() == [[[0, 0], [0, 1], [2, 3]], [[0, 0], [6, 7], [8, 9]]]
    assert move_to_next_token(jnp.asarray([[True, True, False]])).tolist() == [[False, True, True]]
