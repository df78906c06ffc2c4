# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant attention: values and gradients of the formula, and equal bits in any batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import compare, cotangents, values_and_gradients

from pallas_kernels import decode_attention, sink_attention
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import cases
from pallas_kernels.sink_attention.xla_invariant_blocks import KEYS, blocks_by_position


def attend(window, q, k, v, sink, q_pos, k_pos, q_seg, k_seg):
    return sink_attention(
        q,
        k,
        v,
        sink,
        q_positions_BT=q_pos,
        k_positions_BS=k_pos,
        q_segment_ids_BT=q_seg,
        k_segment_ids_BS=k_seg,
        window=window or None,
        impl="xla_invariant",
    )


SMALL = cases.AttentionCase("small", 2, 24, 29, 15, 3, 16, 9)
PACKED = cases.AttentionCase("packed", 2, 75, 75, 6, 2, 8, layout="packed")


@pytest.mark.parametrize(
    "case, dtype",
    [(SMALL, jnp.float32), (SMALL, jnp.bfloat16), (PACKED, jnp.float32)],
    ids=lambda x: getattr(x, "name", None),
)
def test_values_and_gradients_match_the_plain_formula(case, dtype):
    inputs, ct = cases.init_attention_inputs(case, dtype), cotangents(case, dtype)
    actual = values_and_gradients(attend, case.window, *ct, *inputs)
    compare(case, actual, inputs, ct)


def one_row(length, heads=(4, 2), size=8):
    keys = jax.random.split(jax.random.key(3), 4)
    q = 3 * jax.random.normal(keys[0], (1, length, heads[0], size))
    k, v = (jax.random.normal(key, (1, length, heads[1], size)) for key in keys[1:3])
    return q, k, v, 3 * jax.random.normal(keys[3], heads[:1])


@pytest.mark.parametrize("window", [None, 1, 9, KEYS + 5])
def test_a_querys_bits_ignore_slots(window):
    length, slots = 2 * KEYS + 7, 3 * KEYS
    q, k, v, sink = one_row(length)
    place = jnp.arange(length)[None]
    segments = jnp.ones_like(place)
    o, lse = jax.jit(attend, static_argnums=0)(
        window, q, k, v, sink, place, place, segments, segments
    )

    @jax.jit
    def single(q, k, v, q_pos, k_pos, k_seg):
        return decode_attention(
            q,
            k,
            v,
            sink,
            q_positions_BT=q_pos,
            k_positions_BS=k_pos,
            q_segment_ids_BT=jnp.ones_like(q_pos),
            k_segment_ids_BS=k_seg,
            window=window,
            impl="xla_invariant",
        )

    rng = np.random.default_rng(0)
    for t in (0, 8, KEYS - 1, KEYS, length - 1):
        slot = rng.permutation(slots)[: t + 1]

        def spread(x, fill, slot=slot, t=t):  # what no key is in must not count
            return jnp.full((1, slots, *x.shape[2:]), fill, x.dtype).at[0, slot].set(x[0, : t + 1])

        n_differing = single(
            q[:, t : t + 1],
            spread(k, jnp.nan),
            spread(v, jnp.nan),
            place[:, t : t + 1],
            spread(place, 5),
            spread(segments, 0),
        )
        assert np.array_equal(n_differing[0][0, 0], o[0, t]) and np.array_equal(
            n_differing[1][0, 0], lse[0, t]
        )


@pytest.mark.parametrize("window", [None, 9, KEYS + 5])
@pytest.mark.parametrize("slots", [1, 2, KEYS, KEYS + 1, 2 * KEYS])
def test_a_full_ring_places_every_key(slots, window):
    """So many keys touch one block more where the first lies at a block's end."""
    for oldest in (0, 1, KEYS - 1, KEYS, 5 * KEYS - 2):
        positions = oldest + (np.arange(slots) + 3) % slots  # each where a cache has it
        q_positions = np.sort(positions)[-2:]
        layout = Layout(
            *(
                jnp.asarray(x, jnp.int32)[None]
                for x in (
                    q_positions,
                    positions,
                    np.ones_like(q_positions),
                    np.ones_like(positions),
                )
            )
        )
        blocks, (begin_BT, end_BT, _, _) = blocks_by_position(layout, window or 0)
        for position, begin, end in zip(q_positions, begin_BT[0], end_BT[0], strict=True):
            read = np.asarray(blocks.slot_BCX[0, int(begin) : int(end)])
            first = np.asarray(blocks.block_BC[0, int(begin)]) * KEYS
            start = first + np.arange(read.size)
            visible = {p: s for p, s in zip(start, read.reshape(-1), strict=True) if s >= 0}
            expected_x = positions[positions <= position]
            expected_x = expected_x[expected_x > position - window] if window else expected_x
            assert all(positions[visible[p]] == p for p in expected_x), (slots, oldest, position)


def test_a_query_without_keys_has_the_sink_alone():
    q, k, v, sink = one_row(5)
    place, none = jnp.arange(5)[None], jnp.zeros((1, 5), jnp.int32)
    o, lse = attend(None, q, k, v, sink, place, place, none, none)
    assert np.all(np.asarray(o) == 0)
    np.testing.assert_allclose(lse, jnp.broadcast_to(sink, lse.shape), rtol=1e-6)


@pytest.mark.parametrize("window", [None, 70])
def test_positions_may_have_gaps(window):
    q, k, v, sink = one_row(60)
    rng = np.random.default_rng(1)
    place = jnp.asarray(np.cumsum(rng.integers(1, 50, 60)), jnp.int32)[None]
    segments = jnp.asarray(np.repeat([1, 0, 3], 20), jnp.int32)[None]
    layout = place, place, segments, segments
    want = sink_attention(
        q,
        k,
        v,
        sink,
        q_positions_BT=place,
        k_positions_BS=place,
        q_segment_ids_BT=segments,
        k_segment_ids_BS=segments,
        window=window,
    )
    for actual, plain in zip(attend(window, q, k, v, sink, *layout), want, strict=True):
        np.testing.assert_allclose(actual, plain, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cached_length", [0, 2])
def test_caches_of_other_segments_are_not_read(cached_length):
    q, _, _, sink = one_row(1)
    nothing = jnp.full((1, 40, 2, 8), jnp.nan)
    place, segment = jnp.full((1, 1), 7, jnp.int32), jnp.ones((1, 1), jnp.int32)
    o, lse = decode_attention(
        q,
        nothing,
        nothing,
        sink,
        q_positions_BT=place,
        q_segment_ids_BT=segment,
        impl="xla_invariant",
        k_positions_BS=jnp.arange(40)[None],
        k_segment_ids_BS=jnp.full((1, 40), cached_length),
    )
    assert np.all(np.asarray(o) == 0)
    np.testing.assert_allclose(lse[0, 0], sink, rtol=1e-6)
