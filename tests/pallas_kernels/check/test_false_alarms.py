# SPDX-License-Identifier: Apache-2.0
"""The limits of a check let correct kernels pass: those for chips, interpreted, in every case."""

import jax.numpy as jnp
import pytest

from pallas_kernels.check import one
from pallas_kernels.check.cases import HARD_CASES, select_hard_cases
from tests.pallas_kernels.interpreted import OLD, interpreted

pytestmark = pytest.mark.slow
# Hopper's take 16 bits only.
DTYPES = {
    "mosaic_tpu": ("bfloat16", "float32"),
    "mosaic_gpu": ("bfloat16",),
    "mosaic_tpu_invariant": ("bfloat16", "float32"),
    "mosaic_gpu_invariant": ("bfloat16",),
}


def fewer_heads(case):
    """The same lengths, windows and layout."""
    return case._replace(N=2, K=1)


def needs_fewer_heads(impl, operation):
    """16 heads take the interpreter of Hopper's attention a quarter of an hour."""
    attention = (
        ("sink_attention",) if impl == "mosaic_gpu" else ("sink_attention", "decode_attention")
    )
    return "gpu" in impl and operation in attention


@pytest.mark.parametrize(
    "impl, op, case, dtype",
    [
        pytest.param(
            impl,
            op,
            fewer_heads(case) if needs_fewer_heads(impl, operation) else case,
            dtype,
            id=f"{impl}-{operation}-{case.name}-{dtype}",
        )
        for impl, dtypes in DTYPES.items()
        for operation in HARD_CASES
        for op, case in select_hard_cases(operation, impl)
        for dtype in dtypes
    ],
)
def test_a_correct_kernel_for_a_chip_passes(impl, op, case, dtype):
    if "gpu" in impl and OLD:
        pytest.skip("jax 0.10 takes 10 seconds to interpret one block")
    with interpreted(impl):
        assert one.find_fault(op, case, impl, jnp.dtype(dtype), repeats=1) is None
