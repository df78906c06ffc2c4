# SPDX-License-Identifier: Apache-2.0
"""Memory is linear in length, unneeded blocks are skipped, one program serves every position."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sink_attention import cases, xla
from tests.pallas_kernels.jaxprs import equations
from tests.pallas_kernels.sink_attention.attention_oracle import public

attend = public()


@partial(jax.jit, static_argnums=0)
def values_and_gradients(window, dout, q, k, v, sink, *places):
    (o, lse), pull = jax.vjp(lambda *args: attend(window, *args, *places), q, k, v, sink)
    return o, lse, *pull((dout, jnp.zeros_like(lse)))


def program(case, window=0):
    inputs = cases.init_attention_inputs(case)
    dout = jnp.ones_like(inputs.q_BTNH)
    jaxpr = jax.make_jaxpr(partial(values_and_gradients, window))(dout, *inputs)
    return list(equations(jaxpr.jaxpr))


@pytest.mark.parametrize("window", [0, 128])
def test_nothing_is_as_large_as_the_scores(window):
    case = cases.AttentionCase("long", 1, 4096, 4096, 8, 2, 16)
    largest = 2 * case.T * case.N * case.H
    visible = program(case, window)
    assert sum(eqn.primitive.name == "dot_general" for eqn in visible) == 7
    for eqn in visible:
        assert "scatter" not in eqn.primitive.name
        for var in eqn.outvars:
            assert var.aval.size <= largest, (eqn.primitive.name, var.aval)
            assert sum(n >= case.T for n in var.aval.shape) <= 1, (eqn.primitive.name, var.aval)


def planted(case, keys, queries):
    """Queries that stay finite, forward and backward, if `keys` hold NaN values."""
    inputs = cases.init_attention_inputs(case)
    bad = inputs._replace(v_BSKH=jnp.where(keys[:, :, None, None], jnp.nan, inputs.v_BSKH))
    dout = jnp.where(queries[:, :, None, None], jnp.ones_like(inputs.q_BTNH), 0.0)
    o, _, dq, *_ = values_and_gradients(case.window, dout, *bad)
    # XLA would forgive NaN behind a mask neither in p·v nor in dO·v: only skipping keeps it out
    return np.isfinite(o).all((2, 3)) & np.isfinite(dq).all((2, 3))


def test_later_keys_are_skipped():
    case = cases.AttentionCase("causal", 1, 512, 512, 4, 1, 16)
    time = np.arange(512)[None]
    fine = planted(case, time >= 384, time < 384)
    np.testing.assert_array_equal(fine, time < 384)


def test_keys_before_the_window_are_skipped():
    case = cases.AttentionCase("window", 1, 512, 512, 4, 1, 16, 64)
    time = np.arange(512)[None]
    fine = planted(case, time < 128, time >= 256)
    assert fine[0, 256:].all() and not fine[0, :128].any()


def test_other_episodes_are_skipped():
    case = cases.AttentionCase("packed", 1, 512, 512, 4, 1, 16, 0, "packed")
    segments = cases.case_layout(case)[3]
    first = segments == 1
    fine = planted(case, first, segments == 3)  # the middle one shares a block with the first
    assert fine[segments == 3].all() and not fine[first].any()
    fine = planted(case, segments == 3, first)
    assert fine[first].all() and not fine[segments == 3].any()


@pytest.mark.parametrize("window", [0, 10])
def test_no_visible_key_is_skipped(window, monkeypatch):
    monkeypatch.setattr(xla, "xla_block_sizes", lambda *_: (8, 8))
    zeros, segments = jnp.zeros((1, 32, 1, 8)), jnp.ones((1, 32), jnp.int32)
    run = jax.jit(partial(attend, window))
    for offset in range(9):
        q_pos, k_pos = np.arange(32)[None] + offset, np.arange(32)[None]
        none = jnp.full(1, -jnp.inf)
        places = jnp.asarray(q_pos), jnp.asarray(k_pos)
        _, lse = run(zeros, zeros, zeros, none, *places, segments, segments)
        distance = q_pos[0, :, None] - k_pos
        counts = ((distance >= 0) & ((distance < window) | (window == 0))).sum(1)
        np.testing.assert_array_equal(np.rint(np.exp(lse[0, :, 0])), counts)


def test_left_padding_is_skipped():
    case = cases.AttentionCase("left", 1, 512, 512, 4, 1, 16, 0, "left")
    time, segments = np.arange(512)[None], cases.case_layout(case)[3]
    fine = planted(case, (segments == 0) & (time < 128), segments > 0)
    assert fine[segments > 0].all()


@pytest.mark.parametrize("case", cases.BENCH_CASES[1:3], ids=lambda case: case.name)
def test_a_query_block_reads_few_extra_blocks(case):
    sizes = (case.B, case.T, case.S, case.K, case.N // case.K, case.window)
    bt, bs = xla.xla_block_sizes(*sizes)
    inputs = jax.eval_shape(partial(cases.init_attention_inputs, case))

    @jax.jit
    def visits():
        arrays = [jnp.zeros(x.shape, x.dtype) for x in inputs[:4]]
        layout = jax.tree.map(jnp.asarray, cases.case_layout(case))
        return xla._make_blocks(*arrays, layout, case.window)[0].visits_nm

    read = np.asarray(visits())[:, 0] * bs
    first = np.arange(len(read)) * bt
    expected = np.minimum(first + bt, case.T)
    expected = np.minimum(expected, bt + case.window - 1) if case.window else expected
    assert (read < expected + 2 * bs).all() and (read >= expected).all()
