# SPDX-License-Identifier: Apache-2.0
"""Four-bit matrices with masters in the Hopper kernels, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import pallas_gpu
from tests.pallas_kernels.grouped_matmul.matmul_oracle import knows_transposes
from tests.pallas_kernels.grouped_matmul.rounded_oracle import (
    ALPHA,
    LIMIT,
    check,
    draw_inputs,
    own_matrices,
    values_and_gradients,
)


def matmul(sizes, lhs, rhs, bias):
    return pallas_gpu.grouped_matmul_mosaic_gpu(lhs, rhs, sizes, bias, interpret=True)


def swiglu(sizes, lhs, rhs, bias):
    return pallas_gpu.grouped_swiglu_mosaic_gpu(lhs, rhs, sizes, bias, ALPHA, LIMIT, interpret=True)


@knows_transposes
@pytest.mark.parametrize("op", [matmul, pytest.param(swiglu, marks=pytest.mark.slow)])
def test_values_and_gradients_match_decoded_matrices(op):
    actual = values_and_gradients(op, *draw_inputs(jnp.bfloat16, op is swiglu))
    check(actual, jnp.bfloat16, op is swiglu)


@pytest.mark.slow
@knows_transposes
def test_a_part_of_a_stack_equals_its_matrices():
    dout, sizes, lhs, rhs, bias = draw_inputs(jnp.bfloat16, False)
    alone = own_matrices(rhs)._replace(master_EDF=rhs.master_EDF)
    part, complete = (values_and_gradients(matmul, dout, sizes, lhs, x, bias) for x in (rhs, alone))
    for x, y in zip(part, complete, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@knows_transposes
def test_a_planted_fault_is_seen():
    """Masters of another expert: the mask of the gradient is theirs."""
    dout, sizes, lhs, rhs, bias = draw_inputs(jnp.bfloat16, False)
    rolled = rhs._replace(master_EDF=jnp.roll(rhs.master_EDF, 1, axis=0))
    actual = values_and_gradients(matmul, dout, sizes, lhs, rolled, bias)
    with pytest.raises(AssertionError, match="dmaster|saturated"):
        check(actual, jnp.bfloat16, False)
