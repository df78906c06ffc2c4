# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels where segments share keys, interpreted: numbers, skipped blocks, faults."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import masks
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import cases, pallas_tpu, pallas_tpu_backward
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks
from pallas_kernels.sink_attention import pallas_tpu_visits as visits
from tests.pallas_kernels.sink_attention import attention_oracle as oracle
from tests.pallas_kernels.sink_attention import attention_sides
from tests.pallas_kernels.sink_attention.shared_rows import shared_places

SMALL_BLOCKS = 16, 8, 8  # queries, keys, keys that a step may start at
WINDOW_BLOCKS = 16, 24, 8  # a window's steps: three blocks of keys
CASE = cases.AttentionCase("shared", 2, 77, 77, 6, 2, 16)
# Of each row the groups: the length of a prompt, those of its answers. The rest is padding.
ROWS = {
    # a prompt of several blocks, an answer of one token, answers that begin anywhere in a block
    "one_group": (((37, (9, 1, 13)),), ((20, (5, 4, 6, 5, 7, 5, 3)),)),
    # blocks of queries with the answers of two groups, or of three
    "several_groups": (
        ((21, (9, 1)), (3, (4, 5, 2)), (18, (6, 8))),
        ((2, (1, 1)), (30, (11, 20)), (5, (1, 3, 2))),
    ),
    # a window's steps would reach from the prompt past one answer into the next
    "whole_blocks": (((24, (8, 16, 8, 16)),), ((8, (24, 8, 24)),)),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "tpu_block_sizes", lambda *_: SMALL_BLOCKS)


def make_attend(**options):
    """A new function, so that jit does not reuse a program with other blocks."""
    return attention_sides.of_positional(
        partial(pallas_tpu.sink_attention_mosaic_tpu, **{"interpret": True, **options})
    )


ATTEND = make_attend()


def with_places(case, q_places, k_places, dtype=jnp.float32):
    """The case's arrays, then positions and segments of queries and keys, and last segments."""
    places = q_places[0], k_places[0], q_places[1], k_places[1], k_places[2]
    return *cases.init_attention_inputs(case, dtype)[:4], *map(jnp.asarray, places)


def compares(case, inputs, attend=ATTEND, dtype=jnp.float32):
    ct = oracle.cotangents(case, dtype)
    actual = oracle.values_and_gradients(attend, case.window, *ct, *inputs)
    assert all(np.isfinite(x.astype(jnp.float32)).all() for x in actual[2:])
    oracle.compare(case, actual, inputs, ct)


def inputs_of(case, name, dtype=jnp.float32):
    places = shared_places(case.T, ROWS[name])
    return with_places(case, places, places, dtype)


@pytest.mark.parametrize("sinks", ["normal", "big"])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_the_formula(name, window, sinks):
    case = CASE._replace(window=window, sinks=sinks)
    compares(case, inputs_of(case, name))


@pytest.mark.slow
def test_bfloat16_is_as_good_as_its_formula():
    compares(CASE, inputs_of(CASE, "several_groups", jnp.bfloat16), dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    "name, in_parts",
    [
        ("one_group", True),
        ("whole_blocks", False),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (("one_group", False), ("several_groups", True), ("whole_blocks", True))
        ),
    ],
)
def test_steps_of_several_blocks_count_keys_once(name, in_parts, monkeypatch):
    monkeypatch.setattr(blocks, "tpu_block_sizes", lambda *_: WINDOW_BLOCKS)
    if in_parts:  # of three blocks, which steps do not end at
        monkeypatch.setattr(pallas_tpu_backward, "max_keys_per_part", lambda _: 24)
    case = CASE._replace(window=9)
    compares(case, inputs_of(case, name), make_attend())


def test_few_queries_have_their_heads_in_the_lanes():
    case = CASE._replace(T=5)
    assert blocks.choose_sizes((2, 5, 6, 16), (2, 77, 2, 16), 0).F == 3
    places = shared_places(CASE.T, ROWS["several_groups"])
    columns = np.array([[0, 30, 43, 50, 76], [3, 34, 62, 75, 76]])  # of prompts and answers
    q_places = np.stack([np.take_along_axis(x, columns, 1) for x in places])
    compares(case, with_places(case, q_places, places), make_attend())


def test_a_tree_of_three_ranges_is_right():
    """Leaves see the root, one of its children and themselves, with blocks of others between."""
    lengths, starts = (17, 12, 9, 8, 16, 10, 5), (0, 17, 29, 29, 17, 33, 33)
    nodes, last = np.arange(1, 8), (7, 4, 3, 4, 7, 6, 7)
    positions = np.concatenate([s + np.arange(n) for s, n in zip(starts, lengths, strict=True)])
    row = np.stack([positions, np.repeat(nodes, lengths), np.repeat(last, lengths)])
    places = np.repeat(row[:, None].astype(np.int32), 2, axis=1)
    compares(CASE, with_places(CASE, places, places))


def finite(x_BTNH):
    return np.isfinite(x_BTNH).all((0, 2, 3))


def test_blocks_of_other_answers_are_skipped_not_masked():
    """NaN passes through a mask, in p·v and in dO·v: only what is skipped keeps it out."""
    # four blocks of keys of a prompt, then answers of two blocks
    places = shared_places(CASE.T, (((32, (16, 16, 8)),),) * 2)
    inputs, ct = with_places(CASE, places, places), oracle.cotangents(CASE)
    time = np.arange(CASE.T)
    middle = (time >= 48) & (time < 64)

    def planted(argument):
        arrays = list(inputs)
        arrays[argument] = jnp.where(middle[None, :, None, None], jnp.nan, arrays[argument])
        o, _, dq, dk, dv, _ = oracle.values_and_gradients(ATTEND, 0, *ct, *arrays)
        return finite(o), finite(dq), finite(dk), finite(dv)

    o, dq, _, _ = planted(2)
    np.testing.assert_array_equal(o, ~middle)
    np.testing.assert_array_equal(dq, ~middle)
    _, _, dk, dv = planted(0)
    seen_by_it = middle | (time < 32)
    np.testing.assert_array_equal(dk, ~seen_by_it)
    np.testing.assert_array_equal(dv, ~seen_by_it)


def visited_blocks(ends, group):
    """(blocks, whether each is seen whole) that the kernels' loop visits, by its own code."""
    ranges = visits.read_ranges(ends, 0, group, len(ends) == 2 * visits.ENDS)
    steps = [ranges.locate_block(i, group) for i in range(int(ranges.count_steps(group)))]
    for i, block in enumerate(steps):
        assert bool(ranges.has_next(i, block, group)) == (i + 1 < len(steps))
        assert i + 1 == len(steps) or ranges.next_block(i, block, group) == steps[i + 1]
    assert steps[0] == ranges.first
    covered = [int(step) + j for step in steps for j in range(group)]
    return covered, [bool(ranges.is_full(block)) for block in covered]


@pytest.mark.parametrize(
    "queries, keys",
    [
        (512, 512),
        pytest.param(512, 1024, marks=pytest.mark.slow),
        pytest.param(1024, 1024, marks=pytest.mark.slow),
    ],
)
def test_few_blocks_beyond_those_needed_are_visited(queries, keys):
    """A prompt of 2,048 tokens and 16 answers of 128, with the blocks of the chips."""
    positions, segments, last = map(jnp.asarray, shared_places(4096, (((2048, (128,) * 16),),)))
    layout = Layout(positions, positions, segments, segments, last)
    x = blocks.Sizes(1, 4096, 4096, 8, 8, 1, 64, queries, keys, keys)
    tables = np.asarray(blocks.block_layout(x, layout, 0).q_runs).reshape(-1, 8)
    pairs = np.asarray(layout.visible_mask(0)).reshape(x.n, queries, x.m, keys)
    needed, full = int(pairs.any((1, 3)).sum()), int(pairs.all((1, 3)).sum())
    covered, unmasked = zip(*(visited_blocks(ends, 1) for ends in tables), strict=True)
    n_visited = sum(map(len, covered))
    assert needed <= n_visited <= 1.05 * needed
    assert sum(map(sum, unmasked)) == full
    print(f"\n{queries} x {keys}: {n_visited} visited, {needed} needed, {full} of them whole")


def ignore_last_segments(patch):
    patch.setattr(blocks, "is_visible", lambda *args: masks.is_visible(*args[:5]))


def change_ranges(change):
    def plant(patch):
        original = visits._split_ranges
        patch.setattr(visits, "_split_ranges", lambda *args: change(original, *args))

    return plant


def drop_upper_range(original, *tables_and_group):
    return original(*tables_and_group).at[..., 1, :].set(0)


def mask_nothing_of_upper_range(original, *tables_and_group):
    ends = original(*tables_and_group)
    return ends.at[..., 1, 1:3].set(ends[..., 1, ::3])


def forget_that_steps_overlap(original, needed, full, _):
    return original(needed, full, 1)


def fetch_the_neighbour(patch):
    """The block after this one is fetched, at the end of the lower range too."""
    patch.setattr(visits.TwoRanges, "next_block", lambda _, __, block, group: block + group)


FAULTS = {
    "last segments ignored": ignore_last_segments,
    "the answers' range dropped": change_ranges(drop_upper_range),
    "no mask in the answers' range": change_ranges(mask_nothing_of_upper_range),
    "the neighbour fetched": fetch_the_neighbour,
    "steps that overlap": change_ranges(forget_that_steps_overlap),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    case, name = CASE, "one_group"
    if fault == "steps that overlap":  # only those of a window do
        case, name = CASE._replace(window=9), "whole_blocks"
        monkeypatch.setattr(blocks, "tpu_block_sizes", lambda *_: WINDOW_BLOCKS)
    FAULTS[fault](monkeypatch)
    jax.clear_caches()  # what was compiled without the fault must not be found
    inputs, ct = inputs_of(case, name), oracle.cotangents(case)
    actual = oracle.values_and_gradients(make_attend(), case.window, *ct, *inputs)
    with pytest.raises(AssertionError, match="error"):
        oracle.compare(case, actual, inputs, ct)
