# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels through the real compiler, at the sizes of GPT-OSS; nothing is executed.

Shared memory past the chip's limit is refused by the compiler itself, spilled registers are not.
"""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.grouped_matmul import cases, mxfp4, pallas_gpu
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_weights import ROWS
from tests.compilers import skip_without_compiler

pytestmark = pytest.mark.aot
CHIP = "h200"
# More groups are the same programs over more tiles: 120B's by `-m aot` alone.
REAL = [
    pytest.param(x, id=x.name, marks=pytest.mark.slow if "120b" in x.name else ())
    for x in cases.REAL_CASES
]
GATE_UP = [x for x in REAL if "gate_up" in x.id]


@pytest.fixture(autouse=True)
def compiler():
    skip_without_compiler(CHIP)


@pytest.fixture(autouse=True)
def no_waiting_multiplies(monkeypatch):
    """ptxas says when it makes every wgmma wait for the one before, and goes on."""
    read = ahead_of_time.parse_ptxas

    def strict(text):
        assert "serialized" not in text
        return read(text)

    monkeypatch.setattr(ahead_of_time, "parse_ptxas", strict)


def matmul(lhs, rhs, sizes, bias):
    return pallas_gpu.grouped_matmul_mosaic_gpu(lhs, rhs, sizes, bias)


def swiglu(lhs, rhs, sizes, bias):
    return pallas_gpu.grouped_swiglu_mosaic_gpu(lhs, rhs, sizes, bias, 1.702, 7.0)


def with_gradients(f):
    def run(lhs, rhs, sizes, bias, dout):
        out, pull = jax.vjp(lambda lhs, rhs, bias: f(lhs, rhs, sizes, bias), lhs, rhs, bias)
        return out, pull(dout)

    return run


def compile_training(run, case, operands, columns):
    """The program of `run` over these operands and a cotangent of so many columns."""
    dout = jax.ShapeDtypeStruct((case.M, columns), jnp.bfloat16)
    return ahead_of_time.compile_for(CHIP, run, *operands, dout)


def check(compiled, kernels):
    assert len(compiled.kernels) == kernels
    for kernel in compiled.kernels:
        assert kernel.spills == 0 and kernel.stack == 0
        assert 0 < kernel.registers <= 168


def small(case):
    """Bytes beside arguments and results: tables, and the bias in float32."""
    return 4 * (len(case.group_sizes) + 1) * case.F + (1 << 18)


@pytest.mark.parametrize("case", REAL)
def test_output_and_gradients_fit_registers(case):
    compiled = compile_training(with_gradients(matmul), case, cases.matmul_shapes(case), case.F)
    check(compiled, 3)
    assert compiled.temp_bytes <= 2 * small(case)  # dbias in float32 too


@pytest.mark.parametrize("case", GATE_UP)
def test_the_fused_activation_fits_registers(case):
    compiled = ahead_of_time.compile_for(CHIP, swiglu, *cases.matmul_shapes(case))
    check(compiled, 1)
    assert compiled.temp_bytes <= small(case)


@pytest.mark.parametrize("case", GATE_UP)
def test_swiglu_gradients_keep_product_and_its_gradient(case):
    compiled = compile_training(
        with_gradients(swiglu), case, cases.matmul_shapes(case), case.F // 2
    )
    check(compiled, 3)
    assert compiled.temp_bytes <= 2 * 2 * case.M * case.F + 2 * small(case)


def four_bits(case):
    """`cases.matmul_shapes` with weights in four bits."""
    lhs, rhs, *others = cases.matmul_shapes(case)
    E, D, F = rhs.shape
    shapes = (E, D // 2, F), (E, D // mxfp4.GROUP, F)
    return lhs, mxfp4.Mxfp4(*(jax.ShapeDtypeStruct(x, jnp.uint8) for x in shapes)), *others


def with_gradient_of_rows(f):
    def run(lhs, rhs, sizes, bias, dout):
        out, pull = jax.vjp(lambda lhs: f(lhs, rhs, sizes, bias), lhs)
        return out, pull(dout)

    return run


@pytest.mark.parametrize("case", REAL)
def test_four_bit_weights_are_never_decoded_to_memory(case):
    compiled = compile_training(with_gradient_of_rows(matmul), case, four_bits(case), case.F)
    check(compiled, 2)
    assert compiled.temp_bytes <= small(case)


@pytest.mark.parametrize("case", GATE_UP)
def test_nor_are_they_before_the_fused_activation(case):
    compiled = ahead_of_time.compile_for(CHIP, swiglu, *four_bits(case))
    check(compiled, 1)
    assert compiled.temp_bytes <= small(case)
    compiled = compile_training(with_gradient_of_rows(swiglu), case, four_bits(case), case.F // 2)
    check(compiled, 2)
    assert compiled.temp_bytes <= 2 * 2 * case.M * case.F + small(case)


def with_masters(case):
    """`four_bits` with masters in bfloat16."""
    lhs, packed, *others = four_bits(case)
    return lhs, packed._replace(master_EDF=cases.matmul_shapes(case)[1]), *others


def with_gradient_of_masters(f):
    def run(lhs, rhs, sizes, bias, dout):
        def of_masters(lhs, master, bias):
            return f(lhs, rhs._replace(master_EDF=master), sizes, bias)

        out, pull = jax.vjp(of_masters, lhs, rhs.master_EDF, bias)
        return out, pull(dout)

    return run


def limits(case):
    """Bytes of the largest value under each scale, in float32."""
    return 4 * len(case.group_sizes) * case.D // mxfp4.GROUP * case.F


@pytest.mark.parametrize("case", REAL)
def test_four_bit_training_makes_no_dense_copy(case):
    compiled = compile_training(with_gradient_of_masters(matmul), case, with_masters(case), case.F)
    check(compiled, 3)
    assert compiled.temp_bytes <= 2 * small(case) + limits(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", GATE_UP)
def test_so_do_they_before_the_fused_activation(case):
    compiled = compile_training(
        with_gradient_of_masters(swiglu), case, with_masters(case), case.F // 2
    )
    check(compiled, 3)
    assert compiled.temp_bytes <= 2 * 2 * case.M * case.F + 2 * small(case) + limits(case)


def test_four_bit_bias_gradients_take_little_memory():
    case = cases.REAL_CASES[0]

    def run(lhs, rhs, sizes, bias, dout):
        return jax.vjp(lambda bias: matmul(lhs, rhs, sizes, bias), bias)[1](dout)

    compiled = compile_training(run, case, four_bits(case), case.F)
    check(compiled, 1)
    thrown_away = 2 * ROWS * (case.M + len(case.group_sizes) * case.F)
    assert compiled.temp_bytes <= thrown_away + 2 * small(case)


def test_tiles_beyond_shared_memory_are_refused(monkeypatch):
    from pallas_kernels.grouped_matmul.hopper import pallas_gpu_tiles

    monkeypatch.setattr(pallas_gpu_tiles, "STAGES", 5)
    with pytest.raises(Exception, match="shared memory"):
        ahead_of_time.compile_for(CHIP, matmul, *cases.matmul_shapes(cases.REAL_CASES[0]))
