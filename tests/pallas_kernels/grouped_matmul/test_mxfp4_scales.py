# SPDX-License-Identifier: Apache-2.0
"""The scale of least squared error: compared with every scale, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4
from pallas_kernels.grouped_matmul.mxfp4_scales import choose_least_error_exponent

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

# A group of which every value becomes 0 has another scale the second time.
NORMAL = st.floats(-8, 8, width=32, allow_subnormal=False)


def encode_with_least_error(w_DF):
    return encode_mxfp4(w_DF, choose_exponent=choose_least_error_exponent)


encode = jax.jit(encode_with_least_error)
decode = jax.jit(mxfp4_to_dense)


def least_errors(w_DF, around):
    """The least squared error of each group of 32 over all scales near the OCP one, in float64."""
    groups = np.abs(w_DF.astype(np.float64)).reshape(-1, 32, w_DF.shape[1])
    least_error = np.full((len(groups), w_DF.shape[1]), np.inf)
    largest = groups.max(axis=1)
    ocp = np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2
    for shift in around:
        x = groups / np.exp2(ocp + shift)[:, None]
        error = np.abs(x[..., None] - MAGNITUDES).min(axis=-1) * np.exp2(ocp + shift)[:, None]
        least_error = np.minimum(least_error, np.square(error).sum(axis=1))
    return least_error, np.exp2(2 * ocp)


@settings(max_examples=40, deadline=None)
@given(arrays.arrays(np.float32, (64, 3), elements=st.floats(-8, 8, width=32)))
def test_no_other_scale_has_a_smaller_error(w_DF):
    packed = encode(w_DF)
    gap = np.asarray(decode(packed), np.float64) - w_DF
    actual = np.square(gap).reshape(-1, 32, 3).sum(axis=1)
    expected, unit = least_errors(w_DF, range(-4, 5))
    # Values are cut to 2^-11 of the unit, by which an error of up to 4 units changes by 2^-8.
    assert (actual <= expected + 32 * 2.0**-8 * unit + 1e-30).all()


def test_least_error_scales_follow_saturation():
    w_DF = np.zeros((64, 2), np.float32)
    w_DF[:32, 0] = 7.9  # 6 by the OCP rule
    w_DF[:32, 1], w_DF[0, 1] = 0.25, 4.0  # 0.25 is a code of the smaller scale
    ocp, least = encode_mxfp4(jnp.asarray(w_DF)), encode(w_DF)
    assert ocp.scales_EDF[0].tolist() == [127, 127]
    assert least.scales_EDF[0].tolist() == [128, 126]
    values = np.asarray(decode(least))
    assert (values[:32, 0] == 8).all() and (values[1:32, 1] == 0.25).all() and values[0, 1] == 3


@settings(max_examples=25, deadline=None)
@given(arrays.arrays(np.float32, (64, 2), elements=NORMAL))
def test_values_are_encoded_by_the_ocp_rule(w_DF):
    packed = encode(w_DF)
    for repacked in (encode(decode(packed)), encode_mxfp4(decode(packed))):
        assert all(np.array_equal(a, b) for a, b in zip(packed.codes, repacked.codes, strict=True))


@pytest.mark.parametrize("size", [2.0**-149, 2.0**-126, 3.0e-38, 1.0, 3.0e38])
def test_extreme_floats_have_existing_scales(size):
    w_DF = np.full((64, 2), size, np.float32) * np.array([1, -1], np.float32)
    packed = encode(w_DF)
    assert int(packed.scales_EDF.max()) <= 254
    actual = np.asarray(decode(packed), np.float64)
    plain = np.asarray(decode(encode_mxfp4(jnp.asarray(w_DF))), np.float64)
    assert np.square(actual - w_DF).sum() <= np.square(plain - w_DF.astype(np.float64)).sum()


def test_least_error_scales_beat_the_ocp_rule():
    w_DF = jax.random.normal(jax.random.key(0), (640, 50))
    errors = [float(jnp.linalg.norm(decode(f(w_DF)) - w_DF)) for f in (encode_mxfp4, encode)]
    assert 0.9 * errors[0] < errors[1] < 0.98 * errors[0]
