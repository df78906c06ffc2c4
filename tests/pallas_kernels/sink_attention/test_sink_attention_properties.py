# SPDX-License-Identifier: Apache-2.0
"""What a softmax with a sink promises, tried on every implementation over random layouts.

Positions, segments, padding and the order of keys are drawn; lengths are no multiple of any block.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.sink_attention import cases
from tests.pallas_kernels.sink_attention import attention_oracle as oracle
from tests.pallas_kernels.sink_attention import attention_sides

SLOW = {"mosaic_gpu": 3, "triton": 4}  # examples; interpreters that take half a second a call


@pytest.fixture(scope="module", params=attention_sides.SIDES)
def side(request):
    with attention_sides.opened(request.param) as opened:
        yield opened


def for_each_side(side, check, **drawn):
    """check(side, …) for drawn arguments, fewer where a call is slow."""

    @settings(max_examples=SLOW.get(side.name, 12))
    @given(**{"seed": st.integers(0, 10**6), **drawn})
    def side_param(**arguments):
        check(side, **arguments)

    side_param()


def drawn_inputs(side, seed):
    """Up to three segments among padding; keys in any order, queries anywhere, also before the
    first key and past the last; sinks of every size up to ±30, and none."""
    case, rng = side.case, np.random.default_rng(seed)
    B, T, S = case.B, case.T, case.S
    sinks = rng.choice([-np.inf, -30.0, -2.0, 0.0, 2.0, 30.0], case.N)
    k_positions = rng.permuted(np.tile(np.arange(S) - 3, (B, 1)), axis=1)
    if rng.integers(2):  # as in a packed batch
        q_positions = np.sort(rng.integers(-9, S + 9, (B, T)), 1)
        k_positions = np.sort(k_positions, 1)
    else:
        q_positions = rng.integers(-9, S + 9, (B, T))
    places = {
        "q_positions_BT": q_positions,
        "k_positions_BS": k_positions,
        "q_segment_ids_BT": np.sort(rng.integers(0, 4, (B, T)), 1),
        "k_segment_ids_BS": np.sort(rng.integers(0, 3, (B, S)), 1),  # segment 3 has no keys
    }
    inputs = cases.init_attention_inputs(case, side.dtype, seed)
    return inputs._replace(
        sink_N=jnp.asarray(sinks, jnp.float32),
        **{name: jnp.asarray(x, jnp.int32) for name, x in places.items()},
    )


def test_any_layout_matches_the_oracle(side):
    def check(side, seed):
        inputs, ct = drawn_inputs(side, seed), oracle.cotangents(side.case, side.dtype)
        oracle.compare(side.case, side.run(*ct, *inputs), inputs, ct)

    for_each_side(side, check)


def test_a_window_of_128_holds_128_keys(side):
    case = side.case._replace(B=1, T=140, S=140, N=side.case.K, window=128)

    def check(side, seed, offset):
        q, k, v, _, *places = cases.init_attention_inputs(case, side.dtype)
        places = [x + offset * (i < 2) for i, x in enumerate(places)]
        sink = jnp.full(case.N, -jnp.inf, jnp.float32)
        _, lse = side.forward(jnp.zeros_like(q), k, v, sink, *places, window=128)
        counts = np.rint(np.exp(np.asarray(lse[0, :, 0], np.float64)))
        np.testing.assert_array_equal(counts[126:131], [127, 128, 128, 128, 128])
        np.testing.assert_array_equal(counts, np.minimum(np.arange(140) + 1, 128))

    for_each_side(side, check, seed=st.just(0), offset=st.integers(0, 10**6))


def test_the_order_of_the_batch_changes_no_bit(side):
    def check(side, seed):
        inputs, ct = drawn_inputs(side, seed), oracle.cotangents(side.case, side.dtype)
        results = side.run(*ct, *inputs)
        turned = [x if x is inputs.sink_N else x[::-1] for x in (*ct, *inputs)]
        pairs = zip(oracle.NAMES[:5], results, side.run(*turned), strict=False)
        for name, a, b in pairs:  # dsink is a sum over the batch
            np.testing.assert_array_equal(np.asarray(a)[::-1], b, err_msg=name)

    for_each_side(side, check)


def test_a_segments_bits_ignore_other_segments(side):
    """Neither on what padding holds nor on the other episodes, in values and in gradients."""

    def check(side, seed, segment):
        inputs, (dout, dlse) = drawn_inputs(side, seed), oracle.cotangents(side.case, side.dtype)
        q_mine, k_mine = (
            np.asarray(x == segment) for x in (inputs.q_segment_ids_BT, inputs.k_segment_ids_BS)
        )
        wide = {"q_BTNH": q_mine, "k_BSKH": k_mine, "v_BSKH": k_mine}
        other_inputs = {
            name: jnp.where(
                changed[..., None, None], getattr(inputs, name), jnp.asarray(7, dout.dtype)
            )
            for name, changed in wide.items()
        }
        ct = (
            jnp.where(q_mine[..., None, None], dout, jnp.asarray(0, dout.dtype)),
            jnp.where(q_mine[..., None], dlse, 0.0),
        )
        actual, other_o = (side.run(*ct, *x) for x in (inputs, inputs._replace(**other_inputs)))
        masks = (q_mine, q_mine, q_mine, k_mine, k_mine)
        for name, changed, a, b in zip(oracle.NAMES, masks, actual, other_o, strict=False):
            np.testing.assert_array_equal(
                np.asarray(a)[changed], np.asarray(b)[changed], err_msg=name
            )
        for x, changed in zip(actual[2:5], (q_mine, k_mine, k_mine), strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32)[~changed], 0.0)
        np.testing.assert_array_equal(actual[5], other_o[5])

    for_each_side(side, check, segment=st.integers(1, 2))


def test_the_same_bits_come_out_every_time(side):
    inputs, ct = drawn_inputs(side, 0), oracle.cotangents(side.case, side.dtype)
    for name, a, b in zip(
        oracle.NAMES, side.run(*ct, *inputs), side.run(*ct, *inputs), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=name)
