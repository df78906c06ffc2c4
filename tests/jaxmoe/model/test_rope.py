# SPDX-License-Identifier: Apache-2.0
"""YaRN against an independent float64 formula, and what a rotation keeps."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.model import gpt_oss_20b, tiny
from jaxmoe.model.rope import apply_rope, rope_tables, yarn_frequencies

EPS = float(np.finfo(np.float32).eps)


def oracle_frequencies(cfg):
    """Frequency by frequency: how many turns does it make in the original context?"""
    frequencies = []
    log_fast, log_slow = math.log(cfg.rope_beta_fast), math.log(cfg.rope_beta_slow)
    for j in range(cfg.head_dim // 2):
        plain = cfg.rope_theta ** (-2 * j / cfg.head_dim)
        turns = cfg.rope_original_context * plain / (2 * math.pi)
        # linear in j is linear in log(turns)
        keep = min(max((math.log(turns) - log_slow) / (log_fast - log_slow), 0.0), 1.0)
        frequencies.append(plain * keep + plain / cfg.rope_factor * (1 - keep))
    return np.array(frequencies)


def test_frequencies_of_the_released_model():
    frequencies, factor = yarn_frequencies(gpt_oss_20b())
    want = oracle_frequencies(gpt_oss_20b())
    assert frequencies.dtype == np.float32 and frequencies.shape == (32,)
    # The ramp subtracts indices below 64 from a bound below 64: its error is 64 ulp over its
    # width (10 dimensions), and it weighs at most 1 - 1/32 of the plain frequency.
    plain = 150_000.0 ** (-np.arange(32) / 32)
    assert np.all(np.abs(frequencies - want) <= EPS * (64 / 10 * plain + 4 * want))
    assert abs(factor - (0.1 * math.log(32) + 1)) < 1e-15
    assert frequencies[0] == 1.0  # the fastest pair is kept
    assert abs(frequencies[-1] * 32 / plain[-1] - 1) <= 4 * EPS  # the slowest is divided


def test_factor_one_is_plain_rope():
    frequencies, factor = yarn_frequencies(gpt_oss_20b(rope_factor=1.0))
    np.testing.assert_allclose(frequencies, 150_000.0 ** (-np.arange(32) / 32), rtol=4 * EPS)
    assert factor == 1.0


def test_truncation_rounds_the_ramp_outward():
    truncated, cut = (yarn_frequencies(gpt_oss_20b(rope_truncate=t))[0] for t in (False, True))
    changed = np.flatnonzero(truncated != cut)
    assert changed.size and changed.min() >= 8 and changed.max() <= 18  # d(32) = 8.09, d(1) = 17.4


def test_tables_are_cos_and_sin_of_angles():
    cfg = tiny()
    positions = np.array([[0, 1, 57], [3, 2, 1000]], np.int32)
    cos, sin = rope_tables(jnp.asarray(positions), cfg)
    frequencies, factor = yarn_frequencies(cfg)
    angles = positions[:, :, None, None] * frequencies.astype(np.float64)
    bound = EPS * (np.abs(angles) + 4) * factor  # one rounding of the angle, few of the function
    assert cos.shape == (2, 3, 1, 8)
    assert np.all(np.abs(np.asarray(cos) - factor * np.cos(angles)) <= bound)
    assert np.all(np.abs(np.asarray(sin) - factor * np.sin(angles)) <= bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rotation_turns_halves_against_each_other(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 2, 3, 4)), dtype)
    angle = rng.normal(size=(1, 2, 1, 2))
    tables = tuple(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    actual = apply_rope(x, tables)
    v = np.asarray(x, np.float64)
    pairs = (v[..., :2] + 1j * v[..., 2:]) * np.exp(1j * angle)
    want = np.concatenate([pairs.real, pairs.imag], -1)
    assert actual.dtype == x.dtype
    step = float(jnp.finfo(dtype).eps)
    size = np.abs(np.concatenate([pairs, pairs], -1))
    assert np.all(
        np.abs(np.asarray(actual, np.float64) - want) <= step * np.abs(want) + 4 * EPS * size
    )
