# SPDX-License-Identifier: Apache-2.0
"""Attention whose blocks come by position, interpreted: a query's bits in every company.

A trainer's rows, one of them alone, the beginning of one, and single queries against a cache in any
order; the same through the kernels as they are must not agree, or nothing would be shown.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sink_attention
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import in_order, pallas_gpu, pallas_gpu_blocks
from pallas_kernels.sink_attention.in_order import BLOCK, by_position, ordered_attention

LENGTHS = (300, 211)  # past a block of keys of every kernel
T, N, K, H = max(LENGTHS), 4, 2, 64
OLD = jax.__version_info__ < (0, 11)
CHIPS = (
    "mosaic_tpu",
    pytest.param("mosaic_gpu", marks=[
        pytest.mark.slow, pytest.mark.skipif(OLD, reason="jax 0.10 interprets a block in 10 s")
    ]),
)  # fmt: skip
WINDOWS = (None, 100)


def inputs():
    """Hot scores, so that the order of sums is seen; sinks, one of them large."""
    keys = jax.random.split(jax.random.key(3), 3)
    q, k, v = (
        (2.0 * jax.random.normal(key, (2, T, heads, H))).astype(jnp.bfloat16)
        for key, heads in zip(keys, (N, K, K), strict=True)
    )
    return q, k, v, jnp.array([1.5, -2.0, 20.0, 0.3])


arrays = pytest.fixture(scope="module")(inputs)


def layout_of(lengths=LENGTHS):
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (len(lengths), T))
    return positions, (positions < jnp.array(lengths)[:, None]).astype(jnp.int32)


def run(q, k, v, sink, at_q, at_k, chip, window, interpret):
    (q_pos, q_seg), (k_pos, k_seg) = at_q, at_k
    attend = partial(ordered_attention, window=window, impl=chip, interpret=interpret)
    o, lse = jax.jit(attend)(
        q, k, v, sink, q_positions_BT=q_pos, k_positions_BS=k_pos, q_segment_ids_BT=q_seg,
        k_segment_ids_BS=k_seg,
    )  # fmt: skip
    return np.asarray(o.astype(jnp.float32)), np.asarray(lse)


def compositions(q, k, v, sink, chip, window, queries, interpret=True):
    """How many numbers of these queries of row 0 differ: row 0 alone, and each in a cache."""
    at, how = layout_of(), (chip, window, interpret)
    o, lse = run(q, k, v, sink, at, at, *how)
    first = layout_of(LENGTHS[:1])
    alone = run(q[:1], k[:1], v[:1], sink, first, first, *how)
    found = {"alone": sum((a != b[:1]).sum() for a, b in zip(alone, (o, lse), strict=True))}
    for query in queries:
        slots = np.random.default_rng(query).permutation(query + 1)  # not as many as any other
        held = jnp.asarray(slots, jnp.int32)[None], jnp.ones((1, slots.size), jnp.int32)
        mine = jnp.full((1, 1), query, jnp.int32), jnp.ones((1, 1), jnp.int32)
        cached = (x[:1, slots] for x in (k, v))
        one = run(q[:1, query : query + 1], *cached, sink, mine, held, *how)
        found[query] = sum(
            (a[0, 0] != b[0, query]).sum() for a, b in zip(one, (o, lse), strict=True)
        )
    return found, (o, lse)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chip", CHIPS)
def test_a_querys_bits_are_those_of_a_row_alone_and_of_a_cache_in_any_order(arrays, chip, window):
    found, (o, lse) = compositions(*arrays, chip, window, (1, 299))
    assert found == {"alone": 0, 1: 0, 299: 0}
    wide = [x.astype(jnp.float32) for x in arrays]
    at = layout_of()
    right = sink_attention(
        *wide, q_positions_BT=at[0], k_positions_BS=at[0], q_segment_ids_BT=at[1],
        k_segment_ids_BS=at[1], window=window, impl="reference",
    )  # fmt: skip
    real = np.asarray(at[1]) > 0
    assert np.abs(o - right[0])[real].max() < 2e-2
    assert np.abs(lse - right[1])[real].max() < 1e-4


@pytest.mark.parametrize("window", WINDOWS)
def test_with_keys_where_the_cache_has_them_it_differs(arrays, window, monkeypatch):
    monkeypatch.setattr(in_order, "by_position", lambda k, v, layout, window: (k, v, layout))
    found, _ = compositions(*arrays, "mosaic_tpu", window, (299,))
    assert found[299] > 0


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="jax 0.10 interprets a block in 10 s")
def test_with_the_kernels_own_order_of_a_gpu_it_differs(arrays, monkeypatch):
    """Blocks that are masked come before those seen whole: the order is that of the company."""
    padded = pallas_gpu_blocks.Padded
    monkeypatch.setattr(padded, "table_in_order", padded.table_of_some)
    monkeypatch.setattr(pallas_gpu, "forward_tiles", lambda *_: pallas_gpu.MosaicTiles(3, 64, 2))
    jax.clear_caches()
    found, _ = compositions(*arrays, "mosaic_gpu", None, (140,))
    assert found[140] > 0
    jax.clear_caches()


@pytest.mark.parametrize("window", [None, 100])
def test_keys_of_a_cache_come_to_the_columns_of_their_positions(window):
    """Of a ring that holds the last 128, with a row that has none and NaN where nothing is."""
    S, at = 128, np.array([0, 127, 500])
    held = np.stack([np.roll(np.arange(a - S + 1, a + 1), a) for a in at])
    segments = (held >= 0).astype(np.int32)
    k = np.where(held[:, :, None, None] >= 0, held[:, :, None, None], np.nan).astype(np.float32)
    asks = np.array([[1], [1], [0]], np.int32)
    layout = Layout._make(
        jnp.asarray(x, jnp.int32) for x in (at[:, None], np.maximum(held, 0), asks, segments)
    )
    if window is None:  # the cache of a full layer, which holds the beginning
        layout = layout._replace(q_segment_ids_BT=jnp.array([[1], [1], [0]]))
    k_BCKH, v_BCKH, moved = by_position(jnp.asarray(k), jnp.asarray(k), layout, window or 0)
    assert k_BCKH.shape[1] % BLOCK == 0 and np.isfinite(k_BCKH).all()
    np.testing.assert_array_equal(k_BCKH, v_BCKH)
    for row, a in enumerate(at[:2]):
        there = np.asarray(moved.k_segment_ids_BS[row]) > 0
        positions = np.asarray(moved.k_positions_BS[row])
        assert positions[0] % BLOCK == 0 and (np.diff(positions) == 1).all()
        seen = range(max(0, a - window + 1) if window else 0, a + 1)
        assert set(seen) <= set(positions[there])
        np.testing.assert_array_equal(np.asarray(k_BCKH)[row, there, 0, 0], positions[there])
    assert not np.asarray(moved.k_segment_ids_BS[2]).any()


def test_gradients_are_the_kernels_own(arrays):
    q, k, v, sink = arrays
    at = layout_of()
    weights = jax.random.normal(jax.random.key(8), q.shape)

    def total(attend, q, k, v, sink):
        o, lse = attend(
            q, k, v, sink, q_positions_BT=at[0], k_positions_BS=at[0], q_segment_ids_BT=at[1],
            k_segment_ids_BS=at[1], window=100,
        )  # fmt: skip
        return jnp.sum(o * weights) + jnp.sum(jnp.where(at[1][:, :, None] > 0, lse, 0.0))

    ours = partial(ordered_attention, impl="mosaic_tpu", interpret=True)
    wide = [x.astype(jnp.float32) for x in arrays]
    got = jax.grad(partial(total, ours), argnums=(0, 1, 2, 3))(*wide)
    right = jax.grad(partial(total, partial(sink_attention, impl="reference")), (0, 1, 2, 3))(*wide)
    for mine, theirs in zip(got, right, strict=True):
        assert np.abs(mine - theirs).max() < 2e-5 * max(1.0, np.abs(theirs).max())
