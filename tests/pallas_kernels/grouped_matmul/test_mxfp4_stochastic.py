# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: its mean is the value, codes stay, and the draw is that of the weights."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import mxfp4_stochastic
from pallas_kernels.grouped_matmul.mxfp4 import mxfp4_to_dense
from pallas_kernels.grouped_matmul.mxfp4_encode import encode_mxfp4
from pallas_kernels.grouped_matmul.mxfp4_stochastic import draw_from_bits, round_stochastically

encode = jax.jit(partial(encode_mxfp4, round_magnitude=round_stochastically))
decode = jax.jit(mxfp4_to_dense)
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def draw_groups(scale, n=4000):
    """Groups with the same 31 values, of which the last varies, so that each is drawn anew."""
    rng = np.random.default_rng(0)
    w_DF = np.repeat(rng.uniform(-6, 6, (64, 1)), n, axis=1)
    w_DF[[5, 40]] = 6.0
    w_DF[[31, 63]] = rng.uniform(0.1, 0.4, (2, n))
    return (w_DF * scale).astype(np.float32)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-20, 1.0, 2.0**120])
def test_the_mean_over_draws_is_the_value(scale):
    w_DF = draw_groups(scale)
    values = np.asarray(decode(encode(w_DF)), np.float64) / scale
    x = w_DF.astype(np.float64) / scale
    rows = [row for row in range(64) if row not in (31, 63)]
    # Standard error: the gap is at most 2 and its deviation 1, of 4,000 draws.
    np.testing.assert_allclose(values[rows].mean(1), x[rows, 0], atol=5 / np.sqrt(4000))
    above = np.searchsorted(MAGNITUDES, np.abs(x), side="left")
    below = np.searchsorted(MAGNITUDES, np.abs(x), side="right") - 1
    is_neighbour = (np.abs(values) == MAGNITUDES[above]) | (np.abs(values) == MAGNITUDES[below])
    assert is_neighbour.all() and (np.sign(values) * np.sign(x) >= 0).all()
    # Both neighbours occur, or rounding to nearest would pass where values are near codes.
    assert (np.abs(values[rows]).std(1) > 0.05).mean() > 0.8


@pytest.mark.parametrize(("draw", "rounds_up"), [(0, True), (2**32 - 1, False)])
def test_draws_stay_between_neighbouring_codes(monkeypatch, draw, rounds_up):
    """The smallest draw takes every value between two codes up, the largest none."""
    monkeypatch.setattr(
        mxfp4_stochastic, "draw_from_bits", lambda size: jnp.full(size.shape, draw, jnp.uint32)
    )
    codes = np.float32(MAGNITUDES)
    between = (codes[1:] + codes[:-1]) / 2
    x = np.concatenate([codes, between])
    size = jax.lax.bitcast_convert_type(jnp.asarray(x)[:, None], jnp.int32)
    run = jax.jit(lambda size: round_stochastically(size, jnp.zeros((1, 1), jnp.int32)))
    rounded = np.asarray(run(size))[:, 0]
    np.testing.assert_array_equal(rounded[:8], np.arange(8))
    np.testing.assert_array_equal(rounded[8:], np.arange(7) + rounds_up)


def test_codes_stay_and_larger_values_saturate():
    packed = jax.jit(encode_mxfp4)(jax.random.normal(jax.random.key(1), (192, 7)))
    repacked = encode(decode(packed))
    assert all(np.array_equal(a, b) for a, b in zip(packed.codes, repacked.codes, strict=True))
    w_DF = jnp.full((64, 1), 7.9)
    assert (decode(encode(w_DF)) == 6.0).all()


def test_saturated_values_take_a_hundredth_of_the_mean():
    """Of normal weights, 2.4 % are above 6 · 2^e: docs/results/quantised.md."""
    w_DF = np.asarray(jax.random.normal(jax.random.key(3), (3200, 256)))
    groups = np.abs(w_DF).reshape(100, 32, 256)
    largest = 6 * 2.0 ** (np.floor(np.log2(groups.max(1, keepdims=True))) - 2)
    assert 0.022 < (groups > largest).mean() < 0.026
    values = np.asarray(decode(encode(w_DF)))
    slope = (values * w_DF).sum() / (w_DF**2).sum()  # 1 for a rounding without bias
    assert 0.985 < slope < 0.993
    values = np.abs(values).reshape(groups.shape)
    assert (values[groups > largest] < groups[groups > largest]).all()


def test_equal_weights_are_rounded_equally():
    w_EDF = jax.random.normal(jax.random.key(2), (3, 64, 20))
    jitted = encode(w_EDF)
    for e in range(3):
        single = encode(w_EDF[e])
        assert all(np.array_equal(a[e], b) for a, b in zip(jitted.codes, single.codes, strict=True))
    # Each group has one value that is changed by its last bit.
    near = w_EDF.at[:, ::32].set(jnp.nextafter(w_EDF[:, ::32], 9.0))
    changed = np.asarray(decode(encode(near)) != decode(jitted))
    assert 0.1 < changed.mean() < 0.6


def test_draws_are_uniform_and_independent_of_place():
    size = jax.lax.bitcast_convert_type(jnp.full((4, 32, 1000), 0.3), jnp.int32)
    size = size + jnp.arange(1000)[None, None]
    draws = np.asarray(draw_from_bits(size)).reshape(-1, 1000) / 2.0**32
    histogram = np.histogram(draws[:32], bins=16, range=(0, 1))[0]
    assert histogram.std() / histogram.mean() < 0.1
    assert abs(np.corrcoef(draws[0], draws[1])[0, 1]) < 0.1
    assert draws.min() >= 0 and draws.max() < 1
