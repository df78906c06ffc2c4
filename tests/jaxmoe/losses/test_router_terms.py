# SPDX-License-Identifier: Apache-2.0
"""Terms about the router: hand-computed cases, float64 differences, parts, padding, equal load."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.losses.router_terms import load_balance, router_entropy, router_kl, z_loss

EPS = float(np.finfo(np.float32).eps)
B, T, L, E = 4, 6, 3, 5
LENGTHS = np.array([6, 4, 1, 3])
MASK = np.arange(T)[None, :] < LENGTHS[:, None]
N_TOKENS = jnp.float32(MASK.sum())


def make_arrays(seed, scale=2.0):
    """Return logits, old logits and a load, as float64 arrays whose values float32 can hold."""
    rng = np.random.default_rng(seed)
    logits, old = (np.float64(np.float32(scale * rng.normal(size=(B, T, L, E)))) for _ in range(2))
    return logits, old, rng.integers(0, 40, (L, E))


def call_term(name, logits, old, load, mask=MASK, n_tokens=N_TOKENS):
    # Numbers of the tests are float64; a jax array keeps its dtype.
    logits, old = (
        x if isinstance(x, jax.Array) else jnp.asarray(x, jnp.float32) for x in (logits, old)
    )
    mask = jnp.asarray(mask)
    return {
        "load_balance": lambda: load_balance(logits, mask, n_tokens, jnp.asarray(load)),
        "z_loss": lambda: z_loss(logits, mask, n_tokens),
        "router_entropy": lambda: router_entropy(logits, mask, n_tokens),
        "router_kl": lambda: router_kl(logits, old, mask, n_tokens),
    }[name]()


@partial(jax.jit, static_argnums=0)
def run_term(name, logits, old, load, mask=MASK):
    """Value and gradient; numbers are rounded to float32."""
    return jax.value_and_grad(lambda x: call_term(name, x, old, load, mask))(logits)


def token_values64(name, logits, old, load):
    """Values of each token, [B, T, L], written anew in float64."""

    def softmax(x):
        e = np.exp(x)
        return e / e.sum(-1, keepdims=True)

    p, q = softmax(logits), softmax(old)
    if name == "load_balance":
        return E * (p * (load / load.sum(1, keepdims=True))).sum(-1)
    if name == "z_loss":
        return np.log(np.exp(logits).sum(-1)) ** 2
    if name == "router_entropy":
        return (p * np.log(p)).sum(-1)
    return (q * np.log(q / p)).sum(-1)


NAMES = ("load_balance", "z_loss", "router_entropy", "router_kl")


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_those_of_float64_differences(name):
    logits, old, load = make_arrays(0)
    value, grad = run_term(name, logits, old, load)
    expected = token_values64(name, logits, old, load).mean(-1)[MASK].mean()
    assert abs(float(value) - expected) <= 8 * EPS * max(1.0, abs(expected))
    step, expected_grad = 1e-5, np.zeros_like(logits)
    # A token's value depends on its own logits alone, so one difference per expert is enough.
    for e in range(E):
        up, down = (
            token_values64(name, logits + d * np.eye(E)[e], old, load) for d in (step, -step)
        )
        expected_grad[..., e] = (up - down) / (2 * step)
    expected_grad *= MASK[:, :, None, None] / (MASK.sum() * L)
    scale = np.abs(expected_grad).max()
    assert np.abs(np.asarray(grad) - expected_grad).max() <= (64 * EPS + 1e-9) * scale


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_batch_add_up_to_it(name):
    logits, old, load = make_arrays(5)

    def value_and_gradient(rows):
        return run_term(name, logits[rows], old[rows], load, MASK[rows])

    value, grad = value_and_gradient(slice(None))
    for parts in (2, 4):
        values, grads = zip(
            *(value_and_gradient(rows) for rows in np.split(np.arange(B), parts)), strict=True
        )
        assert abs(float(sum(values)) - float(value)) <= MASK.sum() * EPS * abs(float(value))
        np.testing.assert_allclose(np.concatenate(grads), grad, rtol=8 * EPS, atol=EPS * EPS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [np.nan, -np.inf, 1e30])
def test_padding_never_counts(name, garbage):
    logits, old, load = make_arrays(6)

    def value_and_gradient(padding):
        x, y = (np.where(MASK[:, :, None, None], a, padding) for a in (logits, old))
        return run_term(name, x, y, load)

    (value, grad), (expected, expected_grad) = map(value_and_gradient, (garbage, 0.0))
    assert float(value) == float(expected)
    np.testing.assert_array_equal(grad, expected_grad)
    assert not np.asarray(grad)[~MASK].any()


@pytest.mark.parametrize("logits", ["equal", "random"])
def test_equal_load_has_balance_one_and_zero_gradient(logits):
    x, old, _ = make_arrays(7)
    x = np.zeros_like(x) if logits == "equal" else x
    load = np.full((L, E), 12)
    value, grad = run_term("load_balance", x, old, load)
    assert abs(float(value) - 1.0) <= 4 * EPS
    assert np.abs(np.asarray(grad)).max() <= EPS


def test_one_busy_experts_balance_is_the_expert_count():
    logits = np.full((B, T, L, E), -50.0)
    logits[..., 2] = 50.0
    load = np.zeros((L, E), int)
    load[:, 2] = 17
    assert float(call_term("load_balance", logits, logits, load)) == E
    # Equal probabilities: Σ f·(1/E)·E is 1 whatever the load is.
    equal = np.zeros_like(logits)
    assert float(call_term("load_balance", equal, equal, load)) == pytest.approx(1.0, abs=2 * EPS)
    # Two experts, f = (3/4, 1/4) and P = (2/3, 1/3): 2·(1/2 + 1/12) = 7/6.
    two = jnp.log(jnp.asarray([2.0, 1.0]))[None, None, None]
    value = load_balance(two, jnp.ones((1, 1), bool), jnp.float32(1), jnp.asarray([[3, 1]]))
    assert float(value) == pytest.approx(7 / 6, rel=4 * EPS)


def test_a_layer_without_load_adds_nothing():
    logits, old, load = make_arrays(8)
    load[1] = 0
    value, grad = jax.value_and_grad(lambda z: call_term("load_balance", z, old, load))(
        jnp.asarray(logits, jnp.float32)
    )
    assert np.isfinite(float(value)) and not np.asarray(grad)[:, :, 1].any()


def test_other_terms_by_hand():
    # p = (2/3, 1/3), q = (1/2, 1/2); logsumexp(log 2, 0) is log 3.
    logits, mask = jnp.log(jnp.asarray([2.0, 1.0]))[None, None, None], jnp.ones((1, 1), bool)
    one, close = jnp.float32(1), pytest.approx
    assert float(z_loss(logits, mask, one)) == close(np.log(3) ** 2, rel=8 * EPS)
    entropy = np.log(3) - 2 / 3 * np.log(2)
    assert float(router_entropy(logits, mask, one)) == close(-entropy, rel=8 * EPS)
    kl = 0.5 * np.log(0.5 / (2 / 3)) + 0.5 * np.log(0.5 / (1 / 3))
    assert float(router_kl(logits, jnp.zeros_like(logits), mask, one)) == close(kl, rel=16 * EPS)


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2 * E, max_size=2 * E),
    st.floats(-20, 20, width=32),
)
def test_bounds_hold_for_any_logits(values, shift):
    x, old = (jnp.asarray(v, jnp.float32).reshape(1, 1, 1, E) for v in (values[:E], values[E:]))
    mask, one = jnp.ones((1, 1), bool), jnp.float32(1)
    entropy = float(router_entropy(x, mask, one))
    assert -np.log(E) - 4 * EPS <= entropy <= 0.0
    assert float(z_loss(x, mask, one)) >= 0.0
    assert float(router_kl(x, old, mask, one)) >= -1e-6
    # A softmax does not see a constant, and neither do these terms.
    assert float(router_kl(x + shift, x, mask, one)) == pytest.approx(0.0, abs=1e-5)
    assert float(router_entropy(x + shift, mask, one)) == pytest.approx(entropy, abs=1e-4)
    balance = float(load_balance(x, mask, one, jnp.arange(E)[None]))
    assert -EPS <= balance <= E * (E - 1) / 10 + 8 * EPS


def test_old_logits_and_load_have_no_gradient():
    logits, old, load = make_arrays(10)
    for name, place in (("router_kl", 1), ("load_balance", 2)):
        arrays = [jnp.asarray(x, jnp.float32) for x in (logits, old, load)]
        grad = jax.grad(lambda x, a=arrays, n=name, p=place: call_term(n, *a[:p], x, *a[p + 1 :]))(
            arrays[place]
        )
        assert not np.asarray(grad).any()


def test_half_precision_is_widened_first():
    logits, old, load = make_arrays(11)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    for name in NAMES:
        value = call_term(name, rounded, old, load)
        assert value.dtype == jnp.float32
        expected = token_values64(name, np.asarray(rounded, np.float64), old, load)
        assert float(value) == pytest.approx(expected.mean(-1)[MASK].mean(), rel=1e-5)
