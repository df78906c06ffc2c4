# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels through ptxas, at the sizes of GPT-OSS; nothing is executed."""

import re

import pytest

from pallas_kernels.ahead_of_time import compile_for
from pallas_kernels.token_logprobs import cases, pallas_gpu
from tests.compilers import skip_without_compiler
from tests.pallas_kernels.token_logprobs.logprobs_programs import arrays, forward, gradients

pytestmark = pytest.mark.aot
LARGEST = cases.REAL_CASES[0]


def check_kernels(compiled, minimum):
    # A kernel compiled before in this process may be kept, and nothing is said of it again.
    assert len(compiled.kernels) >= minimum
    for kernel in compiled.kernels:
        assert kernel.spills == 0 and kernel.stack == 0, kernel
        # What three warpgroups may start with; from there the two that multiply go on to 232.
        assert kernel.registers <= 65536 // 384, kernel


@pytest.mark.parametrize("case", cases.REAL_CASES, ids=lambda case: case.name)
def test_the_forward_takes_a_third_of_a_gigabyte(case):
    skip_without_compiler("h200")
    compiled = compile_for("h200", forward(case, "mosaic_gpu"), *arrays(case))
    check_kernels(compiled, 1)
    partials = 4 * -(-case.vocab_size // pallas_gpu.COLUMNS) * case.M * 4
    assert compiled.temp_bytes <= partials + 64 * case.M


def test_the_backward_takes_less_than_a_gigabyte():
    skip_without_compiler("h200")
    compiled = compile_for("h200", gradients(LARGEST, "mosaic_gpu"), *arrays(LARGEST))
    check_kernels(compiled, 2)  # dz of a chunk and of what is left; and the forward
    assert compiled.temp_bytes <= 10**9


def test_hopper_runs_the_named_kernel():
    skip_without_compiler("h200")
    case = cases.LogprobsCase("small", 200, 128, 704, 650)
    compiled = compile_for("h200", forward(case, "mosaic_gpu"), *arrays(case))
    assert re.search("mosaic_gpu", compiled.executable.as_text())
    check_kernels(compiled, 1)
    plain = compile_for("h200", forward(case, "auto"), *arrays(case))
    assert not re.search("mosaic_gpu", plain.executable.as_text())  # until it has run on one


def test_more_stages_than_shared_memory_holds_are_refused(monkeypatch):
    skip_without_compiler("h200")
    monkeypatch.setattr(pallas_gpu, "STAGES", 5)
    with pytest.raises(Exception, match="shared memory"):
        compile_for("h200", forward(LARGEST, "mosaic_gpu"), *arrays(LARGEST))
