# SPDX-License-Identifier: Apache-2.0
"""Streamed log-probs against the formula, a float64 oracle, and its own promises."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.token_logprobs import cases, streamed, token_logprobs
from pallas_kernels.token_logprobs.xla import VOCAB_BLOCK, even_blocks
from tests.pallas_kernels.jaxprs import equations
from tests.pallas_kernels.three_way import three_way
from tests.pallas_kernels.token_logprobs.logprobs_oracle import (
    NAMES,
    cotangents,
    naive,
    oracle,
    values_and_gradients,
)


def padded_oracle(hidden, w_head, targets, case, ct):
    """The oracle, with gradients of 0 for the columns past the words."""
    words = w_head[:, : case.vocab_size]
    *results, dw = oracle(hidden, words, targets, case.temperature, ct)
    return *results, np.pad(dw, ((0, 0), (0, case.V - case.vocab_size)))


def naive_of_words(case, targets, dtype):
    temperature = jnp.float32(case.temperature)
    return lambda h, w: naive(h, w[:, : case.vocab_size], targets, temperature, dtype)


def implementation(case, targets, impl="xla"):
    def f(hidden, w_head):
        size = case.vocab_size
        return token_logprobs(
            hidden, w_head, targets, temperature=case.temperature, vocab_size=size, impl=impl
        )

    return f


@pytest.mark.parametrize(
    "case, dtype",
    [(case, jnp.float32) for case in cases.TEST_CASES]
    + [(case, jnp.bfloat16) for case in cases.TEST_CASES[1:3]],
    ids=lambda x: x.name if isinstance(x, cases.LogprobsCase) else x.__name__,
)
def test_values_and_gradients_match_the_plain_formula(case, dtype):
    hidden, w_head, targets = cases.init_logprobs_inputs(case, dtype)
    ct = cotangents(case.M)
    expected = padded_oracle(hidden, w_head, targets, case, ct)
    simple = values_and_gradients(naive_of_words(case, targets, dtype), ct, hidden, w_head)
    # The formula costs compile time and takes no shape-dependent branch: one case is enough.
    impls = ("xla", "xla_invariant")
    for impl in (*impls, "reference") if case is cases.TEST_CASES[1] else impls:
        results = values_and_gradients(implementation(case, targets, impl), ct, hidden, w_head)
        assert [x.dtype for x in results] == [jnp.float32, jnp.float32, dtype, dtype]
        for name, actual, plain, exact in zip(NAMES, results, simple, expected, strict=True):
            three_way(actual, plain, exact, f"{case.name} {impl} {name}")


def test_bfloat16_hidden_states_meet_a_float32_head():
    case = cases.TEST_CASES[1]
    hidden, w_head, targets = cases.init_logprobs_inputs(case)
    half = hidden.astype(jnp.bfloat16)
    ct = cotangents(case.M)
    results = values_and_gradients(implementation(case, targets), ct, half, w_head)
    repeated = values_and_gradients(
        implementation(case, targets), ct, half.astype(jnp.float32), w_head
    )
    assert [x.dtype for x in results] == [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float32]
    for actual, wide in zip(results, repeated, strict=True):
        np.testing.assert_array_equal(actual, wide.astype(actual.dtype))


@pytest.mark.parametrize("planted", [3e38, float("nan")])
def test_padding_columns_never_matter(planted):
    case = cases.TEST_CASES[3]
    hidden, w_head, targets = cases.init_logprobs_inputs(case)
    planted_head = w_head.at[:, case.vocab_size :].set(planted)
    ct = cotangents(case.M)
    f = implementation(case, targets)
    run = jax.jit(lambda w: jax.vjp(f, hidden, w)[1](ct))
    values = jax.jit(lambda w: f(hidden, w))
    clean = *values(w_head), *run(w_head)
    dirty = *values(planted_head), *run(planted_head)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.any(dirty[3][:, case.vocab_size :])


def test_targets_at_block_borders_are_right():
    case = cases.TEST_CASES[3]
    hidden, w_head, _ = cases.init_logprobs_inputs(case)
    size, count = even_blocks(case.vocab_size, VOCAB_BLOCK)
    assert count == 2 and case.vocab_size % size
    last = case.vocab_size
    edge = (0, last - size - 1, last - size, size - 1, size, last - 1)
    targets = jnp.asarray(edge, jnp.int32)
    ct = cotangents(len(edge))
    exact = padded_oracle(hidden[:6], w_head, targets, case, ct)
    results = values_and_gradients(implementation(case, targets), ct, hidden[:6], w_head)
    plain = values_and_gradients(
        naive_of_words(case, targets, w_head.dtype), ct, hidden[:6], w_head
    )
    for name, actual, simple, expected in zip(NAMES, results, plain, exact, strict=True):
        three_way(actual, simple, expected, f"border {name}")


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_no_log_prob_is_above_zero(impl):
    """A multiply-add that divides by the temperature leaves a peak of 30 above itself by 2e-6."""
    temperature = 0.7
    keys = jax.random.split(jax.random.key(3), 3)
    hidden = jax.random.normal(keys[0], (61, 48))
    hidden = hidden / jnp.linalg.norm(hidden, axis=1, keepdims=True)
    targets = jax.random.permutation(keys[1], jnp.arange(97, dtype=jnp.int32))[:61]
    size = jnp.linspace(15.0, 300.0, 61)[:, None]
    w_head = jax.random.normal(keys[2], (48, 97)).at[:, targets].set((hidden * size).T)

    def f(hidden, w_head):
        return token_logprobs(hidden, w_head, targets, temperature=temperature, impl=impl)

    ct = cotangents(61)
    logp, _, *gradients = values_and_gradients(f, ct, hidden, w_head)
    assert logp.max() == 0.0
    plain = values_and_gradients(
        lambda h, w: naive(h, w, targets, jnp.float32(temperature), jnp.float32), ct, hidden, w_head
    )
    exact = oracle(hidden, w_head, targets, temperature, ct)
    three_way(logp, plain[0], exact[0], f"{impl} logp")
    for name, actual, simple, expected in zip(
        NAMES[2:], gradients, plain[2:], exact[2:], strict=True
    ):
        assert np.any(actual), name
        three_way(
            actual, simple, expected, f"{impl} {name}", ulps=300.0
        )  # e^{z − lse} is as exact as z


def test_merged_slices_have_no_positive_log_prob():
    """Hopper's exponents are multiply-adds at every temperature: e^0 there may be 1 − 2e-6."""
    peak, total = jnp.array([[30.0], [2.0]]), jnp.array([[1.0 - 2e-6], [1.5]])
    chosen = jnp.array([[30.0], [0.0]])
    logp, _, lse = streamed.merge_partials(peak, total, jnp.zeros((2, 1)), chosen, axis=0)
    assert logp == 0.0 and lse < 30.0


def test_traced_temperatures_have_no_derivative():
    case = cases.TEST_CASES[1]
    hidden, w_head, targets = cases.init_logprobs_inputs(case)

    def f(t):
        return token_logprobs(hidden, w_head, targets, temperature=t, impl="xla")

    for traced, fixed in zip(jax.jit(f)(jnp.float32(0.7)), jax.jit(lambda: f(0.7))(), strict=True):
        np.testing.assert_allclose(traced, fixed, rtol=4 * np.finfo(np.float32).eps)
    with pytest.raises(NotImplementedError, match="no derivative with respect to temperature"):
        jax.grad(lambda t: f(t)[0].sum())(jnp.float32(0.7))


def test_no_tokens_give_empty_results_and_zero_gradients():
    hidden, w_head, targets = cases.init_logprobs_inputs(cases.LogprobsCase("empty", 0, 48, 97, 97))
    case = cases.TEST_CASES[0]
    logp, entropy, dhidden, dw = values_and_gradients(
        implementation(case, targets), cotangents(0), hidden, w_head
    )
    assert logp.shape == entropy.shape == (0,) and dhidden.shape == (0, 48)
    assert not np.any(dw)


@jax.jit
def drawn(hidden, w_head, targets, temperature):
    return token_logprobs(hidden, w_head, targets, temperature=temperature, impl="xla")


def draw(seed, scale, V=97, D=16):
    hidden_key, head_key = jax.random.split(jax.random.key(seed))
    w_head = jax.random.normal(head_key, (D, V)) * jnp.float32(scale)
    return jax.random.normal(hidden_key, (5, D)), w_head


seeds, scales = st.integers(0, 2**31), st.floats(0.0, 8.0, width=32)
temperatures = st.floats(0.25, 4.0, width=32)
ULP = float(np.finfo(np.float32).eps)


@given(seeds, scales, temperatures)
def test_probabilities_sum_to_one_and_give_entropy(seed, scale, temperature):
    hidden, w_head = draw(seed, scale)
    V = w_head.shape[1]
    all_results = np.tile(np.arange(V, dtype=np.int32), 5)
    repeated = np.repeat(np.asarray(hidden), V, axis=0)
    logp, entropy = drawn(jnp.asarray(repeated), w_head, jnp.asarray(all_results), temperature)
    logp = np.asarray(logp, np.float64).reshape(5, V)
    entropy = np.asarray(entropy).reshape(5, V)[:, 0]
    # A logit of size z carries an error of about z ulp, and so does its log-probability.
    slack = 8 * ULP * (8 + np.abs(logp).max())
    np.testing.assert_allclose(np.exp(logp).sum(1), 1.0, atol=slack)
    np.testing.assert_allclose(entropy, -(np.exp(logp) * logp).sum(1), atol=slack * np.log(V))
    assert (entropy >= -slack).all() and (entropy <= np.log(V) + slack).all()


@pytest.mark.parametrize("M, D, V, vocab_size", [(1100, 16, 97, 97), (24576, 2880, 201216, 201088)])
def test_the_logits_of_all_tokens_never_exist(M, D, V, vocab_size):
    def loss(hidden, w_head, targets, temperature):
        logp, entropy = token_logprobs(
            hidden, w_head, targets, temperature=temperature, vocab_size=vocab_size, impl="xla"
        )
        return logp.sum() + entropy.sum()

    shape = jax.ShapeDtypeStruct
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(
        shape((M, D), jnp.bfloat16),
        shape((D, V), jnp.bfloat16),
        shape((M,), jnp.int32),
        shape((), jnp.float32),
    )
    shapes_seen = list(equations(jaxpr.jaxpr))
    assert any(eqn.primitive.name == "dot_general" for eqn in shapes_seen)
    for eqn in shapes_seen:
        for var in eqn.outvars:
            assert var.aval.size < M * vocab_size, (eqn.primitive.name, var.aval)
            is_logits = D not in var.aval.shape
            assert not is_logits or var.aval.size <= 2**22, (eqn.primitive.name, var.aval)


def test_misshaped_arguments_are_named():
    raw = inspect.unwrap(token_logprobs)  # without the type checks of the test run
    hidden, w_head, targets = cases.init_logprobs_inputs(cases.TEST_CASES[0])
    with pytest.raises(ValueError, match="hidden must have 48 columns"):
        raw(hidden[:, 1:], w_head, targets)
    with pytest.raises(ValueError, match="targets must have one id"):
        raw(hidden, w_head, targets[1:])
    with pytest.raises(ValueError, match="vocab_size must be in 1..97"):
        raw(hidden, w_head, targets, vocab_size=98)
