# SPDX-License-Identifier: Apache-2.0
"""Denominators: what is counted, and what never matters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.losses import masked_max, masked_mean, masked_sum
from jaxmoe.losses.aggregation import effective_sample_size, token_total

X = jnp.asarray([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], jnp.float32)
MASK = jnp.asarray([[True, False, True], [False, False, True]])


def test_hand_worked_reductions():
    assert float(masked_sum(X, MASK)) == 37.0
    assert float(token_total(MASK)) == 3.0
    assert float(masked_mean(X, MASK)) == float(np.float32(37) / np.float32(3))
    assert float(masked_mean(X, MASK, jnp.float32(8))) == 37 / 8
    assert float(masked_max(X, MASK)) == 32.0


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("reduce", [masked_sum, masked_mean, masked_max])
def test_false_tokens_never_matter(reduce, poison):
    dirty = jnp.where(MASK, X, poison)
    clean, dirty_result = (jax.value_and_grad(reduce)(x, MASK) for x in (X, dirty))
    np.testing.assert_array_equal(np.asarray(clean[0]), np.asarray(dirty_result[0]))
    np.testing.assert_array_equal(np.asarray(clean[1]), np.asarray(dirty_result[1]))


def test_no_true_token_gives_zero():
    nothing = jnp.zeros(MASK.shape, bool)
    for reduce in (masked_sum, masked_mean, masked_max):
        assert float(reduce(X, nothing)) == 0.0


def test_bfloat16_is_summed_in_float32():
    values = jnp.ones((1, 1000), jnp.bfloat16)
    total = masked_sum(values, jnp.ones((1, 1000), bool))
    assert total.dtype == jnp.float32 and float(total) == 1000.0  # bfloat16 stops at 256


def test_the_effective_sample_is_all_one_or_none():
    def effective_size(*weights):
        return float(effective_sample_size(jnp.asarray([weights], jnp.float32), mask))

    mask = jnp.asarray([[True, True, True, True, False]])
    assert effective_size(3.0, 3.0, 3.0, 3.0, 99.0) == 1.0
    assert effective_size(0.0, 5.0, 0.0, 0.0, np.nan) == 0.25
    assert effective_size(0.0, 0.0, 0.0, 0.0, 1.0) == 0.0
    assert effective_size(1.0, 1.0, 2.0, 0.0, 1.0) == pytest.approx(16 / (4 * 6))  # (Σw)² / (n·Σw²)
