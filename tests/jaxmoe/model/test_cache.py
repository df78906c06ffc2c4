# SPDX-License-Identifier: Apache-2.0
"""What the cache holds, and that sliding layers hold no more than their window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import forward, init_cache, init_params, plain_ops
from jaxmoe.model.cache import cache_bytes, newest_slots
from tests.jaxmoe.small_models import SEVEN_EXPERTS as CFG

OPS = plain_ops()
B = 2


def test_sliding_layers_hold_only_their_window():
    cache = init_cache(CFG, B, 29)
    assert cache.stacks["sliding"].k.shape == (1, B, 9, 48)
    assert cache.stacks["full"].k.shape == (1, B, 29, 48)
    assert init_cache(CFG, B, 5).stacks["sliding"].k.shape == (1, B, 5, 48)
    assert init_cache(CFG, B, 513).stacks["full"].k.shape == (1, B, 576, 48)


def test_bytes_are_those_of_the_arrays():
    cache = init_cache(CFG, B, 29)
    assert cache_bytes(CFG, B, 29) == sum(x.nbytes for x in jax.tree.leaves(cache))


def test_an_empty_cache_may_be_donated():
    cache = init_cache(CFG, B, 29)
    jax.jit(lambda c: jax.tree.map(lambda x: x + 1, c), donate_argnums=0)(cache)


@pytest.mark.parametrize("prefill", [3, 24])
def test_sliding_slots_are_the_last_window(prefill):
    params = init_params(jax.random.key(0), CFG)
    run = jax.jit(
        lambda p, t, positions, c: forward(p, t, CFG, OPS, positions_BT=positions, cache=c)[1]
    )
    positions = jnp.broadcast_to(jnp.arange(prefill), (B, prefill))
    cache = run(params, jnp.zeros((B, prefill), jnp.int32), positions, init_cache(CFG, B, 40))
    for position in range(prefill, prefill + 12):
        positions = jnp.full((B, 1), position)
        cache = run(params, jnp.zeros((B, 1), jnp.int32), positions, cache)
        cached = np.asarray(cache.stacks["sliding"].positions_BC)[
            np.asarray(cache.stacks["sliding"].segments_BC) > 0
        ]
        first = max(0, position - 8)
        want = np.arange(first, position + 1)
        np.testing.assert_array_equal(np.sort(cached.reshape(B, -1), axis=1), [want] * B)
        full = np.asarray(cache.stacks["full"].segments_BC)
        np.testing.assert_array_equal(full.sum(axis=1), [position + 1] * B)


def test_newest_slots_are_in_order_after_empty_ones():
    positions = jnp.asarray([[4, 5, 6, 3, 0], [0, 1, 2, 9, 9]], jnp.int32)
    segments = jnp.asarray([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]], jnp.int32)
    keep = np.asarray(newest_slots(positions, segments, 4))
    np.testing.assert_array_equal(keep[0], [3, 0, 1, 2])
    np.testing.assert_array_equal(keep[1][1:], [0, 1, 2])
    assert keep[1][0] in (3, 4)
