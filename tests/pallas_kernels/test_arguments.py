# SPDX-License-Identifier: Apache-2.0
"""Arguments that the public functions reject, with their messages, and those they accept."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    decode_attention,
    grouped_matmul,
    grouped_swiglu,
    sink_attention,
    token_logprobs,
)
from pallas_kernels.arguments import matmul_precision
from pallas_kernels.grouped_matmul import routing
from pallas_kernels.sink_attention import cases

attend, decode, matmul, swiglu, logprobs = map(
    inspect.unwrap,  # without the type checks of the test run
    (sink_attention, decode_attention, grouped_matmul, grouped_swiglu, token_logprobs),
)

INPUTS = cases.init_attention_inputs(cases.AttentionCase("small", 2, 6, 6, 4, 2, 16))
Q, K, V, SINK, Q_POS, K_POS, Q_SEG, K_SEG = INPUTS
PLACES = dict(
    q_positions_BT=Q_POS, k_positions_BS=K_POS, q_segment_ids_BT=Q_SEG, k_segment_ids_BS=K_SEG
)
LHS, RHS, SIZES = jnp.ones((7, 4)), jnp.ones((3, 4, 6)), jnp.array([2, 0, 4])
HIDDEN, HEAD, TARGETS = jnp.ones((5, 4)), jnp.ones((4, 9)), jnp.arange(5)


@pytest.mark.parametrize(
    "match, call",
    [
        ("those of k are missing", lambda: attend(Q, K, V, SINK, q_positions_BT=Q_POS)),
        ("segment ids .* those of q", lambda: attend(Q, K, V, SINK, k_segment_ids_BS=K_SEG)),
        (
            "q_positions_BT must hold integers",
            lambda: attend(
                Q, K, V, SINK, q_positions_BT=Q_POS.astype(jnp.float32), k_positions_BS=K_POS
            ),
        ),
        ("-inf for no sink", lambda: attend(Q, K, V, None)),
        ("q must hold floating-point", lambda: attend(Q.astype(int), K, V, SINK)),
        ("Python integer of at least 1 .*; got 1.5", lambda: attend(Q, K, V, SINK, window=1.5)),
        ("Python integer of at least 1 .*; got True", lambda: attend(Q, K, V, SINK, window=True)),
        (
            "Python integer of at least 1 .*; got",
            lambda: jax.jit(lambda w: attend(Q, K, V, SINK, window=w))(3),
        ),
        ("Multiply q by it", lambda: jax.jit(lambda s: attend(Q, K, V, SINK, scale=s))(3.0)),
        ("head size must be above 0", lambda: attend(Q[:, :, :0], K, V, SINK[:0])),
        ("-inf for no sink", lambda: decode(Q, K, V, None, **PLACES)),
        ("one or more matrices", lambda: matmul(LHS, RHS[0], SIZES)),
        ("one or more matrices", lambda: matmul(LHS, RHS[:0], SIZES[:0])),
        ("one or more matrices", lambda: swiglu(LHS[..., None], RHS, SIZES)),
        ("lhs must hold floating-point", lambda: matmul(LHS.astype(int), RHS, SIZES)),
        ("group_sizes must hold integers", lambda: matmul(LHS, RHS, SIZES.astype(jnp.float32))),
        ("Flatten the tokens", lambda: logprobs(HIDDEN[None], HEAD, TARGETS)),
        ("Flatten the tokens", lambda: logprobs(HIDDEN, HEAD[0], TARGETS)),
        ("targets must hold integers", lambda: logprobs(HIDDEN, HEAD, TARGETS.astype(jnp.float32))),
        ("one number above 0; got 0", lambda: logprobs(HIDDEN, HEAD, TARGETS, temperature=0.0)),
        (
            "one number above 0; got",
            lambda: logprobs(HIDDEN, HEAD, TARGETS, temperature=jnp.ones(9)),
        ),
        ("must be a Python integer", lambda: logprobs(HIDDEN, HEAD, TARGETS, vocab_size=5.0)),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(match, call):
    with pytest.raises(ValueError, match=match):
        call()


def plain(x):
    """Lists for the small ones, numpy's arrays for the others."""
    return np.asarray(x).tolist() if x.ndim == 1 else np.asarray(x)


def compiled(call):
    """call() as one program; what it closes over it gets as it is."""
    return jax.jit(call)()


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_numpys_arrays_and_lists_are_taken(impl):
    q, k, v, sink = map(plain, INPUTS[:4])
    places = {name: np.asarray(x) for name, x in PLACES.items()}
    for f, arrays, args, options, expected in (
        (attend, INPUTS[:4], (q, k, v, sink), places, PLACES),
        (decode, INPUTS[:4], (q, k, v, sink), places, PLACES),
        (matmul, (LHS, RHS, SIZES), map(plain, (LHS, RHS, SIZES)), {}, {}),
        (swiglu, (LHS, RHS, SIZES), map(plain, (LHS, RHS, SIZES)), {}, {}),
        (logprobs, (HIDDEN, HEAD, TARGETS), map(plain, (HIDDEN, HEAD, TARGETS)), {}, {}),
    ):
        args = tuple(args)
        actual = compiled(lambda f=f, args=args, options=options: f(*args, **options, impl=impl))
        expected = compiled(lambda f=f, arrays=arrays, expected=expected: f(*arrays, **expected))
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_empty_batches_and_no_keys_are_taken(impl):
    o, lse = compiled(lambda: attend(Q[:0], K[:0], V[:0], SINK, impl=impl))
    assert o.shape == Q[:0].shape and lse.shape == (0, 6, 4)
    options = dict(PLACES, k_positions_BS=K_POS[:, :0], k_segment_ids_BS=K_SEG[:, :0])
    o, lse = compiled(lambda: attend(Q, K[:, :0], V[:, :0], SINK, **options, impl=impl))
    np.testing.assert_array_equal(o, 0.0)
    np.testing.assert_allclose(lse, jnp.broadcast_to(SINK, lse.shape), rtol=1e-6)
    no_one = jnp.zeros((0, 2), jnp.int32)
    order, inverse, sizes = routing.sort_by_expert(no_one, 3)
    rows = jax.grad(lambda x: routing.permute_rows(x, order, inverse, 2).sum())(LHS[:0])
    assert rows.shape == (0, 4) and not sizes.any()


def test_a_very_long_window_is_no_window():
    o, lse = compiled(lambda: attend(Q, K, V, SINK, window=10**12))
    expected = compiled(lambda: attend(Q, K, V, SINK))
    np.testing.assert_array_equal(o, expected[0])
    np.testing.assert_array_equal(lse, expected[1])


def test_float32_products_ignore_default_precision():
    calls = (
        lambda: attend(Q, K, V, SINK)[0].sum(),
        lambda: attend(Q, K, V, SINK, impl="reference")[0].sum(),
        lambda: matmul(LHS, RHS, SIZES).sum(),
        lambda: logprobs(HIDDEN, HEAD, TARGETS)[0].sum(),
    )
    for surroundings in ("bfloat16", "highest"):
        with jax.default_matmul_precision(surroundings):
            for call in calls:
                text = str(jax.make_jaxpr(call)())
                requested = text.count("precision=")
                assert requested and requested == text.count("precision=(Precision.HIGHEST")
    assert matmul_precision(jnp.bfloat16, jnp.bfloat16) == jax.lax.Precision.DEFAULT
