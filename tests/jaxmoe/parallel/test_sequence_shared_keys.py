# SPDX-License-Identifier: Apache-2.0
"""Keys that several segments share, on several devices: values and gradients are those of one."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.parallel import ring
from jaxmoe.parallel.attention import METHODS, attend_over_shards
from jaxmoe.parallel.halo import halo_attention
from pallas_kernels.sink_attention import cases, sink_attention
from tests.jaxmoe.parallel.attention_on_devices import run_on_devices
from tests.pallas_kernels.sink_attention.attention_oracle import (
    compare,
    cotangents,
    formula,
    naive,
    values_and_gradients,
)
from tests.pallas_kernels.sink_attention.shared_rows import shared_places

CASE = cases.AttentionCase("shared", 3, 64, 64, 24, 2, 10, 9, sinks="big")
# Shared tokens of each group of a row, and the other tokens of its sequences.
ROWS = (
    ((17, (9, 4, 12)), (5, (6, 7))),
    ((3, (2, 1)), (1, (5,)), (21, (8, 3, 10))),
    ((30, (11, 13, 10)),),  # a full row of one group
)


def shared_layout(rows=ROWS, length=CASE.T):
    """Positions, segments and last segments of the rows, padded on the right."""
    return list(map(jnp.asarray, shared_places(length, rows)))


def draw_inputs():
    positions, segments, last = shared_layout()
    arrays = cases.init_attention_inputs(CASE)[:4]
    return *arrays, positions, positions, segments, segments, last


@functools.cache
def expected_values(window):
    case, inputs, ct = CASE._replace(window=window), draw_inputs(), cotangents(CASE)
    return inputs, ct, formula(case, *ct, *inputs), naive(case, jnp.float32, *ct, *inputs)


def check_shared(attend_fn, window):
    inputs, ct, exact, simple = expected_values(window)
    actual = values_and_gradients(attend_fn, window, *ct, *inputs)
    compare(CASE._replace(window=window), actual, inputs, ct, simple, exact)


# A window of 9 covers a shard of 8 devices, and an answer's reaches its prompt some shards back.
@pytest.mark.parametrize(
    "method, shards, window",
    [
        ("ring", 4, 9),
        ("ring", 8, 0),
        ("zigzag", 4, 9),
        ("ulysses", 8, 30),
    ],
)
def test_shared_keys_on_several_devices_match_one(method, shards, window):
    check_shared(run_on_devices(method, shards), window)


def test_a_ring_skips_answers_that_see_no_others():
    """NaN passes through a mask, in p·v and in dO·v: only what is skipped keeps it out."""
    rows = (((32, (32, 32, 32)),),)
    positions, segments, last = shared_layout(rows, 128)
    case = CASE._replace(B=1, T=128, S=128, window=0)
    q, k, v, sink = cases.init_attention_inputs(case)[:4]
    is_third = np.asarray(segments[0] == 3)
    bad = jnp.where(is_third[None, :, None, None], jnp.nan, v)
    layout = positions, positions, segments, segments, last
    results = values_and_gradients(
        run_on_devices("ring", 4), 0, *cotangents(case), q, k, bad, sink, *layout
    )
    for x in (results[0], results[2]):
        np.testing.assert_array_equal(np.isfinite(x).all((0, 2, 3)), ~is_third)


def test_windows_over_shared_keys_use_no_halo():
    places = "q_positions_BT", "k_segment_ids_BS"
    for method, attention in METHODS.items():
        for window, names, expected in (
            (5, places, halo_attention),
            (5, (*places, "k_last_segment_ids_BS"), attention),
            (None, (*places, "k_last_segment_ids_BS"), attention),
        ):
            assert attend_over_shards(sink_attention, method, window, names).func is expected
    assert "k_last_segment_ids_BS" not in inspect.signature(halo_attention).parameters


def keys_without_their_last_segment(patch):
    own_keys = ring._own_keys
    patch.setattr(ring, "_own_keys", lambda *x: own_keys(*x)._replace(last_segments_bs=None))


def last_segments_that_do_not_travel(patch):
    def keep_own(keys, layout):
        return layout._replace(k_positions_BS=keys.positions_bs, k_segment_ids_BS=keys.segments_bs)

    patch.setattr(ring._VisitingKeys, "layout", keep_own)


@pytest.mark.parametrize(
    "fault", [keys_without_their_last_segment, last_segments_that_do_not_travel]
)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="error"):
        check_shared(run_on_devices("ring", 4), 9)
