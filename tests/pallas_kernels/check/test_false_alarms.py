# SPDX-License-Identifier: Apache-2.0
"""The limits of a check let our own kernels pass: those for chips, interpreted, in every case."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.check import one
from pallas_kernels.check.cases import HARD_CASES

pytestmark = pytest.mark.slow
OLD = jax.__version_info__ < (0, 11)
TAKES = {"tpu": ("bfloat16", "float32"), "gpu": ("bfloat16",)}  # Hopper's take 16 bits only

ATTENTION = "gpu", "sink_attention"  # 16 heads take its interpreter a quarter of an hour


def fewer_heads(case):
    """The same lengths, windows and layout."""
    return case._replace(N=2, K=1)


@pytest.mark.parametrize(
    "chip, op, case, dtype",
    [
        pytest.param(chip, op, fewer_heads(case) if (chip, operation) == ATTENTION else case, dtype,
                     id=f"{chip}-{operation}-{case.name}-{dtype}")
        for chip, dtypes in TAKES.items()
        for operation, several in HARD_CASES.items()
        for op, case in several
        for dtype in dtypes
    ],
)  # fmt: skip
def test_a_right_kernel_for_a_chip_is_found_right(chip, op, case, dtype):
    if chip == "gpu" and OLD:
        pytest.skip("jax 0.10 takes 10 seconds to interpret one block")
    impl = f"tests.pallas_kernels.check.interpreted:{chip}"
    assert (
        one.find_fault(
            one.replace_implementation(op, impl), case, impl, jnp.dtype(dtype), repeats=1
        )
        is None
    )
