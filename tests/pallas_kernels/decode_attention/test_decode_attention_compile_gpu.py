# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of decoding through ptxas at the sizes of GPT-OSS 20B and 120B."""

import math

import pytest

from pallas_kernels import ahead_of_time, hopper
from pallas_kernels.decode_attention import cases, pallas_gpu
from tests.compilers import skip_without_compiler

pytestmark = pytest.mark.aot

COMPILED = ("64x8k", "64_ring", "8x32k_new4", "head_128")


def compiled(case):
    skip_without_compiler("h200")

    def decode(*x):
        return pallas_gpu.decode_attention_mosaic_gpu(*x, case.window, case.H**-0.5)

    return ahead_of_time.compile_for("h200", decode, *cases.decode_shapes(case))


@pytest.mark.parametrize("name", COMPILED)
def test_no_spills_and_no_copy_of_the_cache(name):
    case = cases.get_decode_case(name)
    compiled_case = compiled(case)
    assert (
        compiled_case.mosaic_calls == 2
    )  # the splits and their merge, which may be compiled already
    blocks = 2 if case.H == 64 else 1  # of 128 threads, on a core
    for kernel in compiled_case.kernels:
        assert kernel.spills == kernel.stack == 0 and not kernel.warnings
        assert blocks * 128 * kernel.registers <= 65536
        assert blocks * (kernel.shared + 1024) <= hopper.SHARED_BYTES + 1024
    cache = 2 * math.prod(cases.decode_shapes(case)[1].shape) * 2
    assert compiled_case.temp_bytes < 0.05 * cache + 2**23
