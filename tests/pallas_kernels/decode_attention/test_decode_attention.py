# SPDX-License-Identifier: Apache-2.0
"""Decoding as a user calls it: XLA against a float64 oracle, and what the functions refuse."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import (
    api,
    cases,
    decode_attention,
    decode_attention_in_stack,
    paged_decode_attention,
    pages,
    pallas_gpu,
    pallas_tpu,
    reference,
    xla,
)
from pallas_kernels.masks import is_visible
from pallas_kernels.sink_attention import sink_attention
from tests.pallas_kernels.decode_attention import checks
from tests.pallas_kernels.interpreted import TPU, interpreted

PAGED = cases.get_decode_case("pages_16_window")


@pytest.mark.parametrize("case", cases.PAGED_TEST_CASES, ids=lambda case: case.name)
def test_pages_through_xla_are_as_good_as_the_plain_formula(case):
    checks.check(xla.paged_decode_attention_xla, case, jnp.float32)


@pytest.mark.parametrize("name", ["pages_16_window", "pages_64"])
def test_pages_through_xla_in_half_precision(name):
    checks.check(xla.paged_decode_attention_xla, cases.get_decode_case(name), jnp.bfloat16)


@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_a_cache_through_xla_is_as_good_as_the_plain_formula(case):
    checks.check(xla.decode_attention_xla, case, jnp.float32)


@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_a_cache_through_batch_invariant_decoding_is_as_good_as_the_plain_formula(case):
    """One case has keys of other segments than the queries'."""
    checks.check(api.IMPLS["xla_invariant"].run, case, jnp.float32)


@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_so_is_one_through_the_batch_invariant_tpu_kernel(case):
    with interpreted(TPU):
        checks.check(api.IMPLS[TPU].run, case, jnp.float32)


@pytest.mark.parametrize("name", ["pages_16", "pages_16_window"])
def test_the_reference_of_pages_is_the_formula(name):
    checks.check(
        reference.paged_decode_attention_reference, cases.get_decode_case(name), jnp.float32
    )


def test_a_short_gather_sees_the_same(monkeypatch):
    monkeypatch.setattr(xla, "TOKENS", 32)
    checks.check(
        lambda *args: xla.paged_decode_attention_xla(*args),
        cases.get_decode_case("pages_16"),
        jnp.float32,
    )


def test_pages_may_lie_anywhere():
    checks.check_pages_anywhere(xla.paged_decode_attention_xla, PAGED)


def test_a_row_without_tokens_gives_zero_and_its_sink():
    x = cases.init_paged_inputs(cases.get_decode_case("pages_16"))
    o, lse = checks.run(xla.paged_decode_attention_xla, cases.get_decode_case("pages_16"), x)
    assert x.lengths_B[0] == 0
    np.testing.assert_array_equal(o[0], 0)
    np.testing.assert_allclose(lse[0, 0], x.sink_N, rtol=1e-6)


def test_slots_nobody_sees_may_hold_nan():
    x = cases.init_paged_inputs(PAGED)
    nan = [jnp.where(y == 1e4, jnp.nan, y) for y in (x.k_PSKH, x.v_PSKH)]
    assert np.isnan(nan[0]).any()
    poisoned = x._replace(k_PSKH=nan[0], v_PSKH=nan[1])
    for f in (xla.paged_decode_attention_xla, reference.paged_decode_attention_reference):
        for a, b in zip(checks.run(f, PAGED, poisoned), checks.run(f, PAGED, x), strict=True):
            np.testing.assert_array_equal(a, b)


def test_bits_say_who_sees_each_slot():
    case = cases.get_decode_case("several_new")
    x = cases.init_attention_inputs(case)
    layout = x.arguments[4]
    q_pos, k_pos, q_seg, k_seg = layout.unshared_arrays()
    bits = np.asarray(pages.visibility_bits(layout, 9))
    visible = is_visible(
        q_pos[:, :, None], k_pos[:, None, :], 9, q_seg[:, :, None], k_seg[:, None, :]
    )
    for t in range(case.T):
        np.testing.assert_array_equal((bits >> t) & 1, visible[:, t])
    assert len(np.unique(bits)) > 3


def test_a_window_lists_its_own_pages_only():
    x = cases.init_paged_inputs(PAGED)
    listed = pages.pages_from_table(
        x.k_PSKH, x.v_PSKH, x.page_table_BJ, x.lengths_B, PAGED.T, PAGED.window, 64
    )
    assert listed.table_BJ.shape == (PAGED.B, 4)  # 37 + 2 slots lie in 4 pages of 16 at most
    visible_slots = np.minimum(x.lengths_B, PAGED.window + PAGED.T - 1)
    np.testing.assert_array_equal((listed.visible_bits_BS != 0).sum(1), visible_slots)


@pytest.mark.parametrize("window", [1, 14, 15, 16, 31])
def test_the_list_of_a_window_is_long_enough(window):
    length, T = jnp.arange(1, 145, dtype=jnp.int32), 3
    kv, table = jnp.zeros((9, 16, 1, 1)), jnp.zeros((144, 9), jnp.int32)
    listed = pages.pages_from_table(kv, kv, table, length, T, window, 64)
    visible = (listed.visible_bits_BS != 0).sum(1)
    np.testing.assert_array_equal(visible, np.minimum(length, window + T - 1))


def call(x, case, f=decode_attention, **padding):
    return f(
        *x[:4],
        q_positions_BT=x[4],
        k_positions_BS=x[5],
        q_segment_ids_BT=x[6],
        k_segment_ids_BS=x[7],
        window=case.window or None,
        **padding,
    )


def test_it_stands_in_for_sink_attention():
    case = cases.get_decode_case("ring")
    x = cases.init_attention_inputs(case)
    names = ("q_positions_BT", "k_positions_BS", "q_segment_ids_BT", "k_segment_ids_BS")
    places = dict(zip(names, x[4:], strict=True))
    expected = sink_attention(*x[:4], **places, window=case.window or None)
    for a, b in zip(call(x, case), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    # The keys of a cache belong to one segment each.
    expected = [x for x in inspect.signature(sink_attention).parameters if "k_last" not in x]
    assert list(inspect.signature(decode_attention).parameters) == expected


def test_pages_and_a_cache_agree():
    case = cases.get_decode_case("pages_64")
    x = cases.init_paged_inputs(case)
    names = ("q_positions_BT", "k_positions_BS", "q_segment_ids_BT", "k_segment_ids_BS")
    q, k, v, sink, *places = checks.in_order(case, x)
    places = {n: jnp.asarray(p, jnp.int32) for n, p in zip(names, places, strict=True)}
    flat = decode_attention(*map(jnp.asarray, (q, k, v, sink)), **places, impl="reference")
    paged = paged_decode_attention(
        *x[:4], page_table_BJ=x.page_table_BJ, lengths_B=x.lengths_B, impl="reference"
    )
    for a, b in zip(flat, paged, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_differentiating_is_refused_in_words():
    case = cases.get_decode_case("ring")
    x = cases.init_attention_inputs(case)
    with pytest.raises(NotImplementedError, match="no gradient. Differentiate sink_attention"):
        jax.grad(lambda q: call((q, *x[1:]), case)[0].sum())(x[0])


@pytest.mark.parametrize("impl", ["mosaic_gpu", "mosaic_tpu"])
def test_a_named_kernel_does_not_fall_back(impl):
    case = cases.get_decode_case("ring")
    with pytest.raises(NotImplementedError, match="this is cpu"):
        call(cases.init_attention_inputs(case), case, impl=impl)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths_B": jnp.zeros(3, jnp.int32)}, r"lengths_B must have the shape \(4,\)"),
        ({"page_table_BJ": jnp.zeros((4, 0), jnp.int32)}, "J ≥ 1"),
        ({"window": -1}, "window must be a Python integer of at least 1 .* got -1"),
        ({"window": 0}, "Pass None for no window"),
        ({"impl": "mosaic_gp"}, "Did you mean 'mosaic_gpu'"),
    ],
)
def test_pages_that_do_not_fit_are_refused(change, message):
    x = cases.init_paged_inputs(PAGED)
    places = {"page_table_BJ": x.page_table_BJ, "lengths_B": x.lengths_B}
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(paged_decode_attention)(*x[:4], **(places | change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({1: jnp.zeros((2, 72, 2, 64))}, "k and v the same shape"),
        ({1: jnp.zeros((2, 72, 2, 64)), 2: jnp.zeros((2, 72, 2, 64))}, "equal batch sizes"),
        ({3: jnp.zeros(9)}, r"one entry per query head, \(10,\)"),
        ({4: jnp.zeros((3, 2), jnp.int32)}, r"q_positions_BT must have the shape \(3, 1\)"),
        ({0: jnp.zeros((3, 1, 9, 64))}, "multiple of key heads"),
        ({0: jnp.zeros((3, 1, 10, 64), jnp.bfloat16)}, "one dtype"),
    ],
)
def test_caches_that_do_not_fit_are_refused(change, message):
    case = cases.get_decode_case("ring")
    x = [change.get(i, y) for i, y in enumerate(cases.init_attention_inputs(case))]
    with pytest.raises(ValueError, match=message):  # without the type checks of the test run
        call(x, case, inspect.unwrap(decode_attention))


def test_the_kernels_take_what_the_model_has():
    for case in cases.REAL_CASES:
        assert (
            pallas_tpu.decode_attention_mosaic_tpu_unsupported(*cases.decode_shapes(case)[:2])
            is None
        )
    for case in cases.PAGED_REAL_CASES:
        q, k, _, _, table, _ = cases.decode_shapes(case)
        assert pallas_tpu.paged_decode_attention_mosaic_tpu_unsupported(q, k, table) is None
        assert "Hopper" in pallas_gpu.paged_decode_attention_mosaic_gpu_unsupported(q, k)


def stacked(x, layer, n_layers=3):
    """A stack in which the array is at `layer`, among NaN, which a wrong layer would show."""
    return jnp.full((n_layers, *x.shape), jnp.nan, x.dtype).at[layer].set(x)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_of_a_stack_is_decoded_as_the_layer_itself(layer):
    q, k, v, sink, *places = cases.init_attention_inputs(checks.SHORT, jnp.float32)
    names = "q_positions_BT", "k_positions_BS", "q_segment_ids_BT", "k_segment_ids_BS"
    options = dict(zip(names, places, strict=True)) | {"window": 40, "impl": "xla"}
    actual = decode_attention_in_stack(
        q, stacked(k, layer), stacked(v, layer), sink, layer=jnp.int32(layer), **options
    )
    expected = decode_attention(q, k, v, sink, **options)
    assert all(jnp.array_equal(a, b) for a, b in zip(actual, expected, strict=True))
