# SPDX-License-Identifier: Apache-2.0
"""Four-bit experts: every code, every scale, and the error bound that `encode` states."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.checkpoint import mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random_packed(seed: int, *, highest: int = 250) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (3, 5, 2, 16), np.uint8)
    return blocks, rng.integers(0, highest, (3, 5, 2), np.uint8)


def test_the_low_nibble_is_the_earlier_value():
    blocks = np.zeros((1, 16), np.uint8)
    blocks[0, 0] = 0x52  # codes 2 then 5
    values = mxfp4.decode_blocks(blocks, np.array([127], np.uint8))
    assert values[:3].tolist() == [1.0, 3.0, 0.0]


def test_every_code_has_its_value_and_its_sign():
    blocks = np.arange(16, dtype=np.uint8)[None]  # high halves are 0
    values = mxfp4.decode_blocks(blocks, np.array([128], np.uint8))[0::2]
    assert values[:8].tolist() == [2 * v for v in E2M1]
    assert values[8:16].tolist() == [-2 * v for v in E2M1]
    assert np.signbit(values[8])


def test_scales_are_powers_of_two_down_to_subnormals():
    blocks = np.full((255, 1, 16), 0x12, np.uint8)  # 1.0 then 0.5
    values = mxfp4.decode_blocks(blocks, np.arange(255, dtype=np.uint8)[:, None])
    want = np.exp2(np.arange(255, dtype=np.float64) - 127)
    assert (values[:, 0] == want).all() and (values[:, 1] == want / 2).all()


def test_bfloat16_holds_every_finite_value_exactly():
    packed = random_packed(0)
    wide, narrow = mxfp4.decode_blocks(*packed), mxfp4.decode_blocks(*packed, dtype="bfloat16")
    assert narrow.dtype == ml_dtypes.bfloat16
    assert (narrow.astype(np.float32) == wide).all()


def test_a_nan_scale_is_refused():
    with pytest.raises(ValueError, match="255"):
        mxfp4.decode_blocks(np.zeros((1, 16), np.uint8), np.array([255], np.uint8))


@given(st.integers(0, 2**32 - 1))
def test_decoded_values_come_back_in_every_bit(seed):
    values = mxfp4.decode_blocks(*random_packed(seed))
    round_trip = mxfp4.decode_blocks(*mxfp4.encode_blocks(values))
    assert (round_trip.view(np.uint32) == values.view(np.uint32)).all()


def test_rounding_is_to_nearest_and_ties_to_even():
    fine = np.linspace(-6, 6, 96 * 31, dtype=np.float32).reshape(-1, 31)
    x = np.concatenate([np.full((len(fine), 1), 6.0, np.float32), fine], axis=1)
    actual = mxfp4.decode_blocks(*mxfp4.encode_blocks(x))
    grid = np.array(E2M1, np.float32)
    distance = np.abs(np.abs(x)[..., None] - grid)
    assert (np.abs(np.abs(x) - np.abs(actual)) == distance.min(-1)).all()
    ties = np.zeros((1, 32), np.float32)
    ties[0, :8] = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert mxfp4.decode_blocks(*mxfp4.encode_blocks(ties))[0, :8].tolist() == [
        6,
        0,
        1,
        1,
        2,
        2,
        4,
        4,
    ]


@given(st.integers(0, 2**32 - 1), st.integers(-100, 100))
def test_the_error_stays_inside_the_stated_bound(seed, power):
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.standard_normal((4, 5, 96)), power).astype(np.float32)
    blocks, scales = mxfp4.encode_blocks(x)
    error = np.abs(mxfp4.decode_blocks(blocks, scales) - x).reshape(4, 5, 3, 32)
    size = np.abs(x).reshape(4, 5, 3, 32)
    unit = np.exp2(scales.astype(np.float64) - 127)[..., None]
    largest = size.max(-1, keepdims=True)
    assert ((4 * unit <= largest) & (largest < 8 * unit)).all()
    assert (error <= np.maximum(size, unit) / 4).all()
    assert (np.where(size < largest / 8, error, 0) <= largest / 16).all()


def test_the_bound_is_nearly_reached():
    x = np.zeros(32, np.float32)
    x[0] = np.nextafter(np.float32(8), np.float32(0))
    actual = mxfp4.decode_blocks(*mxfp4.encode_blocks(x))
    assert actual[0] == 6.0 and (x[0] - actual[0]) / x[0] > 0.2499


def test_zeros_and_smallest_floats_encode_without_a_warning():
    x = np.zeros((2, 32), np.float32)
    x[1] = np.float32(1e-45)
    assert (mxfp4.decode_blocks(*mxfp4.encode_blocks(x)) == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_encode_refuses_what_is_not_finite(value):
    x = np.zeros((2, 32), np.float32)
    x[1, 7] = value
    with pytest.raises(ValueError, match="finite"):
        mxfp4.encode_blocks(x)


def test_encode_refuses_a_broken_group():
    with pytest.raises(ValueError, match="32"):
        mxfp4.encode_blocks(np.zeros((2, 48), np.float32))
