# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant attention: values and gradients of the formula, and equal bits in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention
from pallas_kernels.sink_attention import cases
from pallas_kernels.sink_attention.xla_invariant_blocks import KEYS
from tests.pallas_kernels.sink_attention.attention_oracle import (
    compare,
    cotangents,
    public,
    values_and_gradients,
)

attend = public("xla_invariant")
run = jax.jit(attend, static_argnums=0)
decode = jax.jit(public("xla_invariant", decode_attention), static_argnums=0)

SMALL = cases.AttentionCase("small", 2, 24, 29, 15, 3, 16, 9)
PACKED = cases.AttentionCase("packed", 2, 75, 75, 6, 2, 8, layout="packed")


@pytest.mark.parametrize("case", [SMALL, PACKED], ids=lambda case: case.name)
def test_values_and_gradients_match_the_plain_formula(case):
    """In float32: test_sink_attention.py."""
    inputs, ct = (f(case, jnp.bfloat16) for f in (cases.init_attention_inputs, cotangents))
    actual = values_and_gradients(attend, case.window, *ct, *inputs)
    compare(case, actual, inputs, ct)


def one_row(length, heads=(4, 2), size=8):
    keys = jax.random.split(jax.random.key(3), 4)
    q = 3 * jax.random.normal(keys[0], (1, length, heads[0], size))
    k, v = (jax.random.normal(key, (1, length, heads[1], size)) for key in keys[1:3])
    return q, k, v, 3 * jax.random.normal(keys[3], heads[:1])


@pytest.mark.parametrize(
    "window", [None, 9, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, KEYS + 5))]
)
def test_a_querys_bits_ignore_slots(window):
    length, slots = 2 * KEYS + 7, 3 * KEYS
    q, k, v, sink = one_row(length)
    place = jnp.arange(length)[None]
    segments = jnp.ones_like(place)
    o, lse = run(window, q, k, v, sink, place, place, segments, segments)
    rng = np.random.default_rng(0)
    for t in (0, 8, KEYS - 1, KEYS, length - 1):
        slot = rng.permutation(slots)[: t + 1]

        def spread(x, fill, slot=slot, t=t):  # what no key is in must not count
            return jnp.full((1, slots, *x.shape[2:]), fill, x.dtype).at[0, slot].set(x[0, : t + 1])

        keys, query = (spread(k, jnp.nan), spread(v, jnp.nan)), slice(t, t + 1)
        places = place[:, query], spread(place, 5), segments[:, query], spread(segments, 0)
        single = decode(window, q[:, query], *keys, sink, *places)
        assert np.array_equal(single[0][0, 0], o[0, t])
        assert np.array_equal(single[1][0, 0], lse[0, t])


def test_a_query_without_keys_has_the_sink_alone():
    q, k, v, sink = one_row(60)
    place, none = jnp.arange(60)[None], jnp.zeros((1, 60), jnp.int32)
    o, lse = run(None, q, k, v, sink, place, place, none, none)
    assert np.all(np.asarray(o) == 0)
    np.testing.assert_allclose(lse, jnp.broadcast_to(sink, lse.shape), rtol=1e-6)


@pytest.mark.parametrize("window", [None, 70])
def test_positions_may_have_gaps(window):
    q, k, v, sink = one_row(60)
    rng = np.random.default_rng(1)
    place = jnp.asarray(np.cumsum(rng.integers(1, 50, 60)), jnp.int32)[None]
    segments = jnp.asarray(np.repeat([1, 0, 3], 20), jnp.int32)[None]
    layout = place, place, segments, segments
    want = jax.jit(public(), static_argnums=0)(window, q, k, v, sink, *layout)
    for actual, plain in zip(run(window, q, k, v, sink, *layout), want, strict=True):
        np.testing.assert_allclose(actual, plain, rtol=2e-5, atol=2e-5)
