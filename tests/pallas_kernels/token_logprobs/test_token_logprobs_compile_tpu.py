# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels through libtpu, at the sizes of GPT-OSS; nothing is executed.

The compiler refuses a kernel that takes more than `pallas_tpu.VMEM` of vector memory.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ahead_of_time import TPUS, compile_for
from pallas_kernels.token_logprobs import cases, pallas_tpu
from tests.compilers import skip_without_compiler
from tests.pallas_kernels.token_logprobs.logprobs_programs import arrays, forward, gradients

pytestmark = pytest.mark.aot
LARGEST, SMALLER = cases.REAL_CASES


def kernels(compiled):
    return compiled.executable.as_text().count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize("chip", TPUS)
def test_the_forward_takes_a_fifth_of_a_gigabyte(chip):
    skip_without_compiler(chip)
    compiled = compile_for(chip, forward(LARGEST, "mosaic_tpu"), *arrays(LARGEST))
    assert kernels(compiled) == 1
    # Four numbers a lane, and the hidden states once more where XLA lays the argument out anew.
    assert compiled.temp_bytes <= 25 * 10**7


@pytest.mark.parametrize(
    "chip", [pytest.param(x, marks=() if x == "v5p" else pytest.mark.slow) for x in TPUS]
)
def test_the_backward_takes_less_than_a_gigabyte(chip):
    skip_without_compiler(chip)
    case = LARGEST
    compiled = compile_for(chip, gradients(case, "mosaic_tpu"), *arrays(case))
    assert kernels(compiled) == 3  # forward, and dz of a chunk and of what is left
    # For this chip XLA stores what its matmuls read in other tiles than arguments and results
    # have: one more head and one more gradient of it, hidden states and dz. So it does with
    # impl="xla"; inside a training step the layout may be the same all along.
    head, rows = 2 * case.D * case.V, 2 * case.M * (2 * case.D + pallas_tpu.CHUNK)
    recomputed = 2 * head + 2 * rows if chip == "tpu7x" else 0
    assert compiled.temp_bytes <= 10**9 + recomputed


def test_fewer_tokens_take_less_memory():
    skip_without_compiler("v5e")
    small, large = (
        compile_for("v5e", forward(case, "mosaic_tpu"), *arrays(case)).temp_bytes
        for case in (SMALLER, LARGEST)
    )
    assert small <= 0.4 * large


def test_float32_compiles_with_smaller_blocks():
    skip_without_compiler("v5e")
    case = cases.LogprobsCase("float32", 1024, 2880, 8448, 8320)
    compiled = compile_for("v5e", forward(case, "mosaic_tpu"), *arrays(case, jnp.float32))
    assert kernels(compiled) == 1


def test_bfloat16_compiles_whatever_precision_the_caller_asks_for():
    skip_without_compiler("v5e")
    case = cases.LogprobsCase("precision", 256, 256, 1024, 1000)
    with jax.default_matmul_precision("highest"):
        compiled = compile_for("v5e", gradients(case, "mosaic_tpu"), *arrays(case))
    assert kernels(compiled) == 2


def test_blocks_beyond_the_vector_memory_are_refused(monkeypatch):
    skip_without_compiler("v5p")
    monkeypatch.setattr(pallas_tpu, "ROWS", 4096)
    monkeypatch.setattr(pallas_tpu, "BLOCK_BYTES", 2**30)
    with pytest.raises(Exception, match="vmem"):
        compile_for("v5p", forward(LARGEST, "mosaic_tpu"), *arrays(LARGEST))
