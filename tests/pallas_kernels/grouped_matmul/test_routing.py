# SPDX-License-Identifier: Apache-2.0
"""Sorting rows by expert and summing them back: permutations, gathers, gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_matmul, routing
from tests.pallas_kernels.jaxprs import equations
from tests.pallas_kernels.three_way import three_way

M, A, E, D, F = 29, 4, 7, 48, 40


def chosen_experts(seed=0):
    ranks = np.random.default_rng(seed).random((M, E)).argsort(axis=1)
    return jnp.asarray(ranks[:, :A], jnp.int32)


SORT = jax.jit(routing.sort_by_expert, static_argnums=1)


def check_sort(indices, n_experts, sort=SORT):
    order, inverse, sizes = sort(jnp.asarray(indices, jnp.int32), n_experts)
    flat = np.asarray(indices).reshape(-1)
    outside = (flat < 0) | (flat >= n_experts)
    flat = np.where(outside, n_experts, flat)
    np.testing.assert_array_equal(order, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(inverse, np.argsort(order))
    np.testing.assert_array_equal(sizes, np.bincount(flat, minlength=n_experts + 1)[:n_experts])
    assert order.dtype == inverse.dtype == sizes.dtype == jnp.int32


indices_lists = st.lists(
    st.lists(st.integers(-1, E + 1), min_size=A, max_size=A), min_size=12, max_size=12
)


@pytest.mark.parametrize("limit", [0, routing._COUNTING_SORT_LIMIT])
def test_both_sorts_are_the_stable_sort_by_expert(limit, monkeypatch):
    monkeypatch.setattr(routing, "_COUNTING_SORT_LIMIT", limit)
    # another function, so that tracing reads the limit again
    sort = jax.jit(lambda *x: routing.sort_by_expert(*x), static_argnums=1)
    check_sort(chosen_experts(), E, sort)
    check_sort(np.full((M, A), 3), E, sort)
    check_sort(np.full((M, A), E), E, sort)
    check_sort(np.zeros((0, A), np.int32), E, sort)


@given(indices_lists)
def test_pairs_without_expert_are_sorted_last(indices):
    check_sort(np.asarray(indices, np.int32), E)


def inputs(dtype, rows, cols):
    x_key, w_key, d_key = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(x_key, (rows, cols)).astype(dtype)
    weights = jax.nn.softmax(jax.random.normal(w_key, (M, A)), axis=-1)
    return x, weights, jax.random.normal(d_key, (M, cols)).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_combine_is_the_weighted_sum(dtype):
    _, inverse, _ = routing.sort_by_expert(chosen_experts(), E)
    y, weights, dout = inputs(dtype, M * A, D)

    def naive(y, weights):
        rows = y[inverse].reshape(M, A, D)
        return (rows * weights.astype(dtype)[:, :, None]).sum(1)

    f64 = lambda x: np.asarray(x.astype(jnp.float32), np.float64)  # noqa: E731
    rows = f64(y)[np.asarray(inverse)].reshape(M, A, D)
    exact_dy = np.zeros((M * A, D))
    exact_dy[np.asarray(inverse)] = (f64(weights)[:, :, None] * f64(dout)[:, None]).reshape(-1, D)
    exact = (
        (rows * f64(weights)[:, :, None]).sum(1),
        exact_dy,
        (rows * f64(dout)[:, None]).sum(-1),
    )
    out, pull = jax.vjp(lambda y, w: routing.combine_rows(y, inverse, w), y, weights)
    simple, simple_pull = jax.vjp(naive, y, weights)
    actual, plain = (out, *pull(dout)), (simple, *simple_pull(dout))
    assert [x.dtype for x in actual] == [dtype, dtype, jnp.float32]
    for name, a, b, c in zip(("out", "dy", "dweights"), actual, plain, exact, strict=True):
        three_way(a, b, c, f"combine_rows {name}")


def block(x, indices, weights, gate, down):
    """A whole MoE block with a plain square for its activation."""
    order, inverse, sizes = routing.sort_by_expert(indices, E)
    rows = routing.permute_rows(x, order, inverse, A)
    hidden = jnp.square(grouped_matmul(rows, gate, sizes, impl="xla"))
    return routing.combine_rows(grouped_matmul(hidden, down, sizes, impl="xla"), inverse, weights)


def dense(x, indices, weights, gate, down):
    """Every token through every expert."""
    share = (jax.nn.one_hot(indices, E, dtype=x.dtype) * weights[:, :, None]).sum(1)
    hidden = jnp.square(jnp.einsum("md,edf->emf", x, gate))
    return jnp.einsum("emf,efd,me->md", hidden, down, share)


def block_inputs():
    x, weights, dout = inputs(jnp.float32, M, D)
    gate_key, down_key = jax.random.split(jax.random.key(2))
    gate = jax.random.normal(gate_key, (E, D, F)) * D**-0.5
    return x, weights, gate, jax.random.normal(down_key, (E, F, D)) * F**-0.5, dout


def gradients(f, indices, dout, *args):
    out, pull = jax.vjp(lambda x, *rest: f(x, indices, *rest), *args)
    return out, *pull(dout)


@pytest.mark.parametrize("n_owned", [E, 3])
def test_a_block_equals_all_tokens_through_experts(n_owned):
    """Experts from n_owned on belong to someone else: their share is 0 in values and gradients."""
    x, weights, gate, down, dout = block_inputs()
    indices = chosen_experts()
    mine = indices < n_owned
    actual = jax.jit(lambda *a: gradients(block, jnp.where(mine, indices, E), dout, *a))(
        x, weights, gate, down
    )
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in (dout, x, weights, gate, down)]
        d, *args = [jnp.asarray(a) for a in wide]
        masked = lambda x, i, w, g, h: dense(x, i, jnp.where(mine, w, 0.0), g, h)  # noqa: E731
        exact = [np.asarray(a) for a in jax.jit(partial(gradients, masked, indices))(d, *args)]
    masked = lambda x, i, w, g, h: dense(x, i, jnp.where(mine, w, 0.0), g, h)  # noqa: E731
    plain = jax.jit(partial(gradients, masked, indices))(dout, x, weights, gate, down)
    for name, a, b, c in zip(
        ("y", "dx", "dw", "dgate", "ddown"), actual, plain, exact, strict=True
    ):
        three_way(a, b, c, f"block {name}")


def test_nothing_but_row_numbers_is_scattered():
    x, weights, gate, down, dout = block_inputs()
    run = lambda *args: gradients(block, chosen_experts(), dout, *args)  # noqa: E731
    scattered = [
        eqn.outvars[0].aval.dtype
        for eqn in equations(jax.make_jaxpr(run)(x, weights, gate, down).jaxpr)
        if "scatter" in eqn.primitive.name
    ]
    assert scattered and all(dtype == jnp.int32 for dtype in scattered)


def test_an_order_of_the_wrong_length_is_named():
    order, inverse, _ = routing.sort_by_expert(chosen_experts(), E)
    with pytest.raises(ValueError, match="order must hold 3 positions"):
        routing.permute_rows(jnp.zeros((M, D)), order, inverse, 3)
