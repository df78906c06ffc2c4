# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels through ptxas, at the sizes of GPT-OSS; nothing is executed."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ahead_of_time import compile_for, compiler_unavailable
from pallas_kernels.token_logprobs import cases, pallas_gpu, token_logprobs

pytestmark = pytest.mark.aot
LARGEST = cases.REAL_CASES[0]


def needs(chip):
    if reason := compiler_unavailable(chip):
        pytest.skip(reason)


def arrays(case, dtype=jnp.bfloat16):
    shape = jax.ShapeDtypeStruct
    return (
        shape((case.M, case.D), dtype), shape((case.D, case.V), dtype),
        shape((case.M,), jnp.int32), shape((), jnp.float32),
    )  # fmt: skip


def forward(case, impl):
    def run(hidden, w_head, targets, temperature):
        return token_logprobs(
            hidden, w_head, targets,
            temperature=temperature, vocab_size=case.vocab_size, impl=impl,
        )  # fmt: skip

    return run


def gradients(case, impl):
    run = forward(case, impl)
    return jax.grad(lambda *args: sum(x.sum() for x in run(*args)), argnums=(0, 1))


def check_kernels(compiled, minimum):
    # A kernel compiled before in this process may be kept, and nothing is said of it again.
    assert len(compiled.kernels) >= minimum
    for kernel in compiled.kernels:
        assert kernel.spills == 0 and kernel.stack == 0, kernel
        # What three warpgroups may start with; from there the two that multiply go on to 232.
        assert kernel.registers <= 65536 // 384, kernel


@pytest.mark.parametrize("case", cases.REAL_CASES, ids=lambda case: case.name)
def test_the_forward_spills_nothing_and_takes_a_third_of_a_gigabyte(case):
    needs("h200")
    compiled = compile_for("h200", forward(case, "mosaic_gpu"), *arrays(case))
    check_kernels(compiled, 1)
    partials = 4 * -(-case.vocab_size // pallas_gpu.COLUMNS) * case.M * 4
    assert compiled.temp_bytes <= partials + 64 * case.M


def test_the_backward_spills_nothing_and_takes_less_than_a_gigabyte():
    needs("h200")
    compiled = compile_for("h200", gradients(LARGEST, "mosaic_gpu"), *arrays(LARGEST))
    check_kernels(compiled, 2)  # dz of a chunk and of what is left; and the forward
    assert compiled.temp_bytes <= 10**9


def test_the_kernel_runs_on_hopper_for_those_who_name_it():
    needs("h200")
    case = cases.LogprobsCase("small", 200, 128, 704, 650)
    compiled = compile_for("h200", forward(case, "mosaic_gpu"), *arrays(case))
    assert re.search("mosaic_gpu", compiled.executable.as_text())
    check_kernels(compiled, 1)
    plain = compile_for("h200", forward(case, "auto"), *arrays(case))
    assert not re.search("mosaic_gpu", plain.executable.as_text())  # until it has run on one


def test_more_stages_than_shared_memory_holds_are_refused(monkeypatch):
    needs("h200")
    monkeypatch.setattr(pallas_gpu, "STAGES", 5)
    with pytest.raises(Exception, match="shared memory"):
        compile_for("h200", forward(LARGEST, "mosaic_gpu"), *arrays(LARGEST))
