# SPDX-License-Identifier: Apache-2.0
"""Rounding to MXFP4 on the device: the same bytes as on the host, for every kind of float."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxmoe.checkpoint import mxfp4 as host
from pallas_kernels.grouped_matmul.mxfp4 import Mxfp4, mxfp4_to_dense
from pallas_kernels.grouped_matmul.mxfp4_encode import (
    choose_ocp_exponent,
    encode_mxfp4,
    round_to_nearest,
)
from pallas_kernels.grouped_matmul.mxfp4_scales import choose_least_error_exponent
from pallas_kernels.grouped_matmul.mxfp4_stochastic import round_stochastically

encode = jax.jit(encode_mxfp4)
decode = jax.jit(mxfp4_to_dense, static_argnums=1)


def encode_on_host(w_DF):
    return host.blocks_to_halves(*host.encode_blocks(np.ascontiguousarray(w_DF.T)))


def assert_equal_bytes(w_DF):
    w_DF = np.asarray(w_DF, np.float32)
    actual, expected = encode(w_DF), encode_on_host(w_DF)
    np.testing.assert_array_equal(np.asarray(actual.scales_EDF), expected.scales_EDF)
    np.testing.assert_array_equal(np.asarray(actual.nibbles_EDF), expected.nibbles_EDF)
    return actual


def compare_with_host(bits, exponent, spread):
    """Exponents near one another, since the largest of a group decides; any sign and mantissa."""
    field = np.clip(exponent - bits % (spread + 1), 0, 254).astype(np.uint32)
    bits = (bits & np.uint32(0x807FFFFF)) | (field << 23)
    assert_equal_bytes(bits.view(np.float32))


FLOATS = (
    arrays.arrays(np.uint32, (64, 3), elements=st.integers(0, 2**32 - 1)),
    st.integers(0, 255),
    st.integers(0, 40),
)


@settings(max_examples=60, deadline=None)
@given(*FLOATS)
def test_finite_floats_become_the_hosts_bytes(bits, exponent, spread):
    compare_with_host(bits, exponent, spread)


RULES = {
    (scale, rounding): jax.jit(
        partial(encode_mxfp4, choose_exponent=scale, round_magnitude=rounding)
    )
    for scale in (choose_ocp_exponent, choose_least_error_exponent)
    for rounding in (round_to_nearest, round_stochastically)
}


def assert_values_stay(packed, dtype):
    """Decoded and packed again, by any rule or by the host, they are the same to the bit."""
    values = decode(packed, dtype)
    expected = np.asarray(decode(packed)).view(np.int32)
    on_host = host.decode_packed(Mxfp4(*map(np.asarray, packed.codes)))
    np.testing.assert_array_equal(on_host.astype(np.float32).view(np.int32), expected)
    repeated = [encode(values) for encode in RULES.values()]
    repeated.append(Mxfp4(*map(jnp.asarray, encode_on_host(np.asarray(values))[:2])))
    for x in repeated:
        np.testing.assert_array_equal(np.asarray(decode(x)).view(np.int32), expected)


@settings(max_examples=25, deadline=None)
@given(*FLOATS, st.sampled_from(list(RULES)), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_decoded_values_pack_to_themselves(bits, exponent, spread, rule, dtype):
    """An engine that gets decoded values may pack them: subnormals and the largest are kept too."""
    field = np.clip(exponent - bits % (spread + 1), 0, 254).astype(np.uint32)
    masters = ((bits & np.uint32(0x807FFFFF)) | (field << 23)).view(np.float32)
    assert_values_stay(RULES[rule](masters), dtype)


@settings(max_examples=25, deadline=None)
@given(
    arrays.arrays(np.uint8, (32, 3), elements=st.integers(0, 255)),
    arrays.arrays(np.uint8, (2, 3), elements=st.integers(0, 252)),
    arrays.arrays(np.uint8, 2, elements=st.integers(0, 7)),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_released_values_pack_to_themselves(nibbles, scales, largest, dtype):
    """Its groups need not have the scale of any rule: the largest code may be any."""
    low, high = np.minimum(nibbles & 7, largest[0]), np.minimum(nibbles >> 4 & 7, largest[1])
    packed = Mxfp4(jnp.asarray(nibbles & 0x88 | low | high << 4), jnp.asarray(scales))
    assert_values_stay(packed, dtype)


def borders_of_scale(exponent):
    """256 values: both signs of each border between two codes, of each code, and of their
    neighbours among the floats. Each 32 of them have the scale 2^exponent."""
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0]
    with np.errstate(over="ignore", under="ignore"):
        middle = np.array(middles, np.float32) * np.ldexp(np.float32(1), exponent)
        around = [middle]
        for limit in (0, np.inf):
            step = middle
            for _ in range(4):
                step = np.nextafter(step, np.float32(limit))
                around.append(step)
        values = np.concatenate(around)
    values = np.resize(np.where(np.isfinite(values), values, 0), 124)
    values = np.concatenate([values, -values]).reshape(31, 8)
    # The largest value of each group, which makes the scale.
    largest = np.full((1, 8), np.ldexp(np.float32(4), exponent))
    return np.concatenate([values, largest]).astype(np.float32)


def test_borders_between_codes_become_the_hosts_bytes():
    """256 values at each of the 253 scales that a float32 can have."""
    for first in range(-127, 126, 23):
        columns = np.concatenate([borders_of_scale(e) for e in range(first, first + 23)], axis=1)
        packed = assert_equal_bytes(np.concatenate([columns, -columns]))
        scales = np.asarray(packed.scales_EDF)[0].reshape(23, 8)
        assert np.array_equal(scales, np.repeat(np.arange(first, first + 23)[:, None] + 127, 8, 1))


def test_each_code_and_scale_encodes_to_itself():
    """Each group has the largest code, so that no smaller scale would do."""
    scales = np.arange(253, dtype=np.uint8)
    codes = np.resize(np.arange(16, dtype=np.uint8), 32)
    nibbles = np.repeat((codes | (codes[::-1] << 4))[:, None], 253, axis=1)
    packed = Mxfp4(jnp.asarray(nibbles), jnp.asarray(np.stack([scales, scales])))
    values = decode(packed)
    repeated = assert_equal_bytes(np.asarray(values))
    np.testing.assert_array_equal(np.asarray(repeated.nibbles_EDF), nibbles)
    np.testing.assert_array_equal(np.asarray(repeated.scales_EDF), np.asarray(packed.scales_EDF))
    assert jnp.array_equal(
        jax.lax.bitcast_convert_type(decode(repeated), jnp.int32),
        jax.lax.bitcast_convert_type(values, jnp.int32),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_stack_is_encoded_as_its_matrices(dtype):
    w_EDF = jax.random.normal(jax.random.key(0), (3, 192, 5), dtype) * 0.02
    packed = encode(w_EDF)
    for e in range(3):
        single = assert_equal_bytes(w_EDF[e])
        assert all(
            jnp.array_equal(part[e], of_one)
            for part, of_one in zip(packed.codes, single.codes, strict=True)
        )
    repeated = encode(decode(packed))
    assert all(jnp.array_equal(a, b) for a, b in zip(packed.codes, repeated.codes, strict=True))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_infinite_value_makes_its_group_nan(bad):
    w_DF = np.ones((64, 3), np.float32)
    w_DF[40, 1] = bad
    packed = encode(w_DF)
    assert packed.scales_EDF.tolist() == [[125, 125, 125], [125, 255, 125]]
    assert np.argwhere(np.isnan(np.asarray(decode(packed)))).tolist() == [
        [row, 1] for row in range(32, 64)
    ]


def test_rows_that_are_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match=r"multiple of 64, got \(96, 3\)"):
        encode_mxfp4(jnp.zeros((96, 3)))
