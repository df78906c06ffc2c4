# SPDX-License-Identifier: Apache-2.0
"""Batch invariance of attention by the GPU and TPU kernels, interpreted.

A trainer's rows, one of them alone, and single queries against a cache in any order have equal
bits; without one of the precautions they have not.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention, sink_attention
from pallas_kernels.sink_attention import mosaic_invariant, pallas_gpu
from pallas_kernels.sink_attention.hopper import pallas_gpu_blocks
from tests.pallas_kernels.interpreted import INVARIANT, OLD, TPU, interpreted
from tests.pallas_kernels.sink_attention.attention_oracle import public

LENGTHS = (300, 211)  # past a block of keys of every kernel
T, N, K, H = max(LENGTHS), 4, 2, 64
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


def run(q, k, v, sink, at_q, at_k, impl, window, function=sink_attention):
    (q_pos, q_seg), (k_pos, k_seg) = at_q, at_k
    attend = jax.jit(partial(public(impl, function), window))
    o, lse = attend(q, k, v, sink, q_pos, k_pos, q_seg, k_seg)
    return np.asarray(o.astype(jnp.float32)), np.asarray(lse)


def compositions(q, k, v, sink, impl, window, queries):
    """Number of results of row 0 that differ in a batch of one, and for each query in a cache."""
    start, composition = layout_of(), (impl, window)
    o, lse = run(q, k, v, sink, start, start, *composition)
    first = layout_of(LENGTHS[:1])
    single = run(q[:1], k[:1], v[:1], sink, first, first, *composition)
    n_differing = {"alone": sum((a != b[:1]).sum() for a, b in zip(single, (o, lse), strict=True))}
    for query in queries:
        slots = np.random.default_rng(query).permutation(query + 1)  # not as many as any other
        cached_length = jnp.asarray(slots, jnp.int32)[None], jnp.ones((1, slots.size), jnp.int32)
        outputs = jnp.full((1, 1), query, jnp.int32), jnp.ones((1, 1), jnp.int32)
        cached = (x[:1, slots] for x in (k, v))
        single_row = run(
            q[:1, query : query + 1],
            *cached,
            sink,
            outputs,
            cached_length,
            *composition,
            decode_attention,
        )
        n_differing[query] = sum(
            (a[0, 0] != b[0, query]).sum() for a, b in zip(single_row, (o, lse), strict=True)
        )
    return n_differing, (o, lse)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("impl", INVARIANT)
def test_a_querys_bits_ignore_rows_and_cache_order(arrays, impl, window):
    with interpreted(impl):
        n_differing, (o, lse) = compositions(*arrays, impl, window, (1, 299))
    assert n_differing == {"alone": 0, 1: 0, 299: 0}
    wide = [x.astype(jnp.float32) for x in arrays]
    start = layout_of()
    places = start[0], start[0], start[1], start[1]
    expected = public("reference")(window, *wide, *places)
    real = np.asarray(start[1]) > 0
    assert np.abs(o - expected[0])[real].max() < 2e-2
    assert np.abs(lse - expected[1])[real].max() < 1e-4


def test_unsupported_sees_the_shapes_of_the_call():
    """A cache is padded, so that its keys are shapes and no arrays."""
    queries, keys = (jax.ShapeDtypeStruct((1, size, 4, H), jnp.bfloat16) for size in (3, 300))
    find_reason = mosaic_invariant.sink_attention_mosaic_invariant_unsupported
    assert "needs a Hopper GPU" in find_reason("mosaic_gpu", queries, keys)


def test_keys_in_cache_order_change_bits(arrays, monkeypatch):
    monkeypatch.setattr(
        mosaic_invariant, "order_by_position", lambda k, v, layout, window: (k, v, layout)
    )
    with interpreted(TPU):
        n_differing, _ = compositions(*arrays, TPU, WINDOWS[0], (299,))
    assert n_differing[299] > 0


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="jax 0.10 interprets a block in 10 s")
def test_the_fast_kernels_order_changes_bits(arrays, monkeypatch):
    """Masked blocks come before full ones: the order depends on the other queries of a tile."""
    padded = pallas_gpu_blocks.Padded
    monkeypatch.setattr(padded, "invariant_key_block_table", padded.nonempty_key_block_table)
    monkeypatch.setattr(
        pallas_gpu, "mosaic_forward_tiles", lambda *_: pallas_gpu.MosaicTiles(3, 64, 2)
    )
    jax.clear_caches()
    with interpreted("mosaic_gpu_invariant"):
        n_differing, _ = compositions(*arrays, "mosaic_gpu_invariant", None, (140,))
    assert n_differing[140] > 0
    jax.clear_caches()


def test_gradients_are_those_of_the_reference(arrays):
    start = layout_of()
    weights = jax.random.normal(jax.random.key(8), arrays[0].shape)

    places = start[0], start[0], start[1], start[1]

    def total(impl, q, k, v, sink):
        o, lse = public(impl)(100, q, k, v, sink, *places)
        return jnp.sum(o * weights) + jnp.sum(jnp.where(start[1][:, :, None] > 0, lse, 0.0))

    wide = [x.astype(jnp.float32) for x in arrays]
    with interpreted(TPU):
        results = jax.jit(jax.grad(partial(total, TPU), argnums=(0, 1, 2, 3)))(*wide)
    expected = jax.jit(jax.grad(partial(total, "reference"), argnums=(0, 1, 2, 3)))(*wide)
    for outputs, expected_grad in zip(results, expected, strict=True):
        assert np.abs(outputs - expected_grad).max() < 2e-5 * max(1.0, np.abs(expected_grad).max())
