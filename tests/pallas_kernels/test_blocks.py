# SPDX-License-Identifier: Apache-2.0
"""The table of blocks against the predicate of every single pair."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.blocks import block_ranges, block_table
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import cases
from tests.pallas_kernels.sink_attention.shared_rows import shared_places

make_table = jax.jit(block_table, static_argnums=(1, 2, 3))
make_ranges = jax.jit(block_ranges)


@partial(jax.jit, static_argnums=1)
def mask_of(layout, window):
    return layout.visible_mask(window)


def by_block(visible_BTS, q_block, k_block):
    B, T, S = visible_BTS.shape
    shape = (B, T // q_block, q_block, S // k_block, k_block)
    return visible_BTS.reshape(shape).transpose(0, 1, 3, 2, 4)


@given(st.integers(0, 10**6), st.sampled_from([0, 1, 5, 30]), st.booleans(), st.booleans())
def test_skipped_blocks_hide_all_and_full_ones_none(seed, window, packed, shares):
    rng = np.random.default_rng(seed)
    q_pos, k_pos = (rng.integers(-3, 40, (2, n)) for n in (24, 30))
    q_seg, k_seg = (rng.integers(0 if packed else 1, 3 if packed else 2, (2, n)) for n in (24, 30))
    if seed % 2:
        q_pos, k_pos, q_seg, k_seg = (np.sort(x, axis=1) for x in (q_pos, k_pos, q_seg, k_seg))
    layout = Layout(*(jnp.asarray(x, jnp.int32) for x in (q_pos, k_pos, q_seg, k_seg)))
    if shares:
        last = np.asarray(layout.k_segment_ids_BS) + rng.integers(0, 3, (2, 30))
        layout = layout._replace(k_last_segment_ids_BS=jnp.asarray(last, jnp.int32))
    needed, full = map(np.asarray, make_table(layout, 8, 6, window))
    blocks = by_block(np.asarray(mask_of(layout, window)), 8, 6)
    assert not (blocks.any((3, 4)) & ~needed).any()
    assert not (~blocks.all((3, 4)) & full).any()
    assert not (full & ~needed).any()


@pytest.mark.parametrize("window", [0, 127, 128])
def test_the_table_is_exact_in_causal_layouts(window):
    layout = jax.tree.map(
        jnp.asarray, cases.case_layout(cases.AttentionCase("c", 1, 512, 512, 1, 1, 8))
    )
    needed, full = make_table(layout, 64, 32, window)
    blocks = by_block(np.asarray(mask_of(layout, window)), 64, 32)
    np.testing.assert_array_equal(needed, blocks.any((3, 4)))
    np.testing.assert_array_equal(full, blocks.all((3, 4)))


RAGGED = ((211, (90, 31, 150)), (47, (1, 64, 33)), (300, (5,)))


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("groups", [RAGGED, tuple((n, ()) for n in (150, 233, 71, 317))])
def test_blocks_of_two_sequences_are_not_wasted(groups, window):
    positions, segments, last = map(jnp.asarray, shared_places(1024, (groups,)))
    layout = Layout(positions, positions, segments, segments, last)
    if groups is not RAGGED:  # a packed row without shared keys
        layout = layout._replace(k_last_segment_ids_BS=None)
    for q_block, k_block in ((64, 64), (128, 256), (32, 128)):
        needed, _ = make_table(layout, q_block, k_block, window)
        blocks = by_block(np.asarray(mask_of(layout, window)), q_block, k_block)
        exact = blocks.any((3, 4))
        assert not (exact & ~np.asarray(needed)).any()
        assert int(needed.sum()) <= 1.05 * exact.sum()


@given(st.integers(0, 10**6))
def test_runs_hold_every_needed_block(seed):
    rng = np.random.default_rng(seed)
    needed = rng.random((2, 5, 7)) < 0.6
    full = needed & (rng.random((2, 5, 7)) < 0.6)
    actual = np.asarray(make_ranges(jnp.asarray(needed), jnp.asarray(full)))
    flat = (actual.reshape(-1, 4), needed.reshape(-1, 7), full.reshape(-1, 7))
    for row, any_visible, all_ in zip(*flat, strict=True):
        first, whole_first, whole_last, last = row
        assert 0 <= first <= whole_first <= whole_last <= last <= 7
        outside = np.ones(7, bool)
        outside[first:last] = False
        assert not any_visible[outside].any()
        assert all_[whole_first:whole_last].all()
        assert (whole_last > whole_first) == all_.any() and (last > first) == any_visible.any()
