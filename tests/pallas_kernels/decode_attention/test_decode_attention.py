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
    pallas_tpu,
    xla,
)
from pallas_kernels.sink_attention import sink_attention
from tests.pallas_kernels.decode_attention import checks
from tests.pallas_kernels.interpreted import TPU, interpreted


@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_xla_decodes_as_the_plain_formula(case):
    checks.check(xla.decode_attention_xla, case, jnp.float32)


@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_xla_invariant_decodes_as_the_plain_formula(case):
    """One case has keys of other segments than the queries'."""
    checks.check(api.IMPLS["xla_invariant"].run, case, jnp.float32)


@pytest.mark.parametrize("case", cases.TEST_CASES, ids=lambda case: case.name)
def test_the_invariant_tpu_kernel_decodes_as_the_formula(case):
    with interpreted(TPU):
        checks.check(api.IMPLS[TPU].run, case, jnp.float32)


def test_a_row_without_keys_gives_its_sink():
    case = cases.get_decode_case("uneven")
    x = cases.init_attention_inputs(case)
    x = x._replace(k_segment_ids_BS=x.k_segment_ids_BS.at[0].set(0))
    o, lse = checks.run(xla.decode_attention_xla, case, x)
    np.testing.assert_array_equal(o[0], 0)
    np.testing.assert_allclose(lse[0, 0], x.sink_N, rtol=1e-6)


PLACES = "q_positions_BT", "k_positions_BS", "q_segment_ids_BT", "k_segment_ids_BS"


def call(x, case, f=decode_attention, **options):
    places = dict(zip(PLACES, x[4:], strict=True))
    return f(*x[:4], **places, window=case.window or None, **options)


def test_it_stands_in_for_sink_attention():
    case = cases.get_decode_case("ring")
    x = cases.init_attention_inputs(case)
    for a, b in zip(call(x, case), call(x, case, sink_attention), strict=True):
        np.testing.assert_array_equal(a, b)
    # The keys of a cache belong to one segment each.
    expected = [x for x in inspect.signature(sink_attention).parameters if "k_last" not in x]
    assert list(inspect.signature(decode_attention).parameters) == expected


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


def stacked(x, layer, n_layers=3):
    """A stack in which the array is at `layer`, among NaN, which a wrong layer would show."""
    return jnp.full((n_layers, *x.shape), jnp.nan, x.dtype).at[layer].set(x)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_stacks_layer_decodes_as_the_layer(layer):
    q, k, v, sink, *places = cases.init_attention_inputs(checks.SHORT, jnp.float32)
    options = dict(zip(PLACES, places, strict=True)) | {"window": 40, "impl": "xla"}
    actual = decode_attention_in_stack(
        q, stacked(k, layer), stacked(v, layer), sink, layer=jnp.int32(layer), **options
    )
    expected = decode_attention(q, k, v, sink, **options)
    assert all(jnp.array_equal(a, b) for a, b in zip(actual, expected, strict=True))
