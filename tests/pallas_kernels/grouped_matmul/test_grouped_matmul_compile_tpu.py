# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels through libtpu at the sizes of GPT-OSS, for every chip; nothing is executed.

The compiler refuses copies and registers that a chip does not have, and tiles past the limit on
VMEM: 7/8 of a core's 128 MiB (v5e, v6e) or 64 MiB (v5p, 7x).
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.grouped_matmul import cases, grouped_matmul, grouped_swiglu, mxfp4
from tests.compilers import skip_without_compiler

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("default")]

CHIPS = tuple(ahead_of_time.TPUS)
GATE_UP_20B, DOWN_20B, GATE_UP_120B, DOWN_120B = cases.REAL_CASES


@pytest.fixture(autouse=True)
def compiler(request):
    skip_without_compiler(request.getfixturevalue("chip"))


def abstract_arguments(case, packed, swiglu, with_masters):
    """Abstract arguments, and the cotangent."""
    lhs, rhs, sizes, bias = cases.matmul_shapes(case)
    master = rhs
    if packed:
        n_groups, width, columns = rhs.shape
        rhs = mxfp4.Mxfp4(
            jax.ShapeDtypeStruct((n_groups, width // 2, columns), jnp.uint8),
            jax.ShapeDtypeStruct((n_groups, width // 32, columns), jnp.uint8),
        )
    if with_masters:
        rhs = rhs._replace(master_EDF=master)
    columns = case.F // 2 if swiglu else case.F
    return lhs, rhs, sizes, bias, jax.ShapeDtypeStruct((case.M, columns), lhs.dtype)


def training(lhs, rhs, sizes, bias, dout):
    """out, dlhs, drhs, dbias of the down projection."""
    f = lambda *x: grouped_matmul(x[0], x[1], sizes, bias_EF=x[2], impl="mosaic_tpu")  # noqa: E731
    out, pull = jax.vjp(f, lhs, rhs, bias)
    return out, pull(dout)


def training_swiglu(lhs, rhs, sizes, bias, dout):
    """out, dlhs, drhs, dbias of the gate and up projection."""
    f = lambda *x: grouped_swiglu(x[0], x[1], sizes, bias_EF=x[2], impl="mosaic_tpu")  # noqa: E731
    out, pull = jax.vjp(f, lhs, rhs, bias)
    return out, pull(dout)


def adapters(lhs, rhs, sizes, bias, dout):
    """out, dlhs, dbias with four-bit weights, which stay as they are."""
    f = lambda *x: grouped_matmul(x[0], rhs, sizes, bias_EF=x[1], impl="mosaic_tpu")  # noqa: E731
    out, pull = jax.vjp(f, lhs, bias)
    return out, pull(dout)


def masters(lhs, rhs, sizes, bias, dout):
    """out, dlhs, dmaster, dbias of the down projection in four bits."""

    def run(lhs, master, bias):
        stack = rhs._replace(master_EDF=master)
        return grouped_matmul(lhs, stack, sizes, bias_EF=bias, impl="mosaic_tpu")

    out, pull = jax.vjp(run, lhs, rhs.master_EDF, bias)
    return out, pull(dout)


def masters_swiglu(lhs, rhs, sizes, bias, dout):
    """The same of the gate and up projection."""

    def run(lhs, master, bias):
        stack = rhs._replace(master_EDF=master)
        return grouped_swiglu(lhs, stack, sizes, bias_EF=bias, impl="mosaic_tpu")

    out, pull = jax.vjp(run, lhs, rhs.master_EDF, bias)
    return out, pull(dout)


def sampling(lhs, rhs, sizes, bias, _):
    """The forward of gate and up, without what a gradient would need."""
    return grouped_swiglu(lhs, rhs, sizes, bias_EF=bias, impl="mosaic_tpu")


def compile_case(chip, fn, case, *, packed=False):
    swiglu = fn in (training_swiglu, masters_swiglu, sampling)
    args = abstract_arguments(case, packed, swiglu, fn in (masters, masters_swiglu))
    compiled = ahead_of_time.compile_for(chip, fn, *args)
    columns = args[-1].shape[1]
    width = case.D + columns + 256  # lhs and out, padded to whole registers
    if fn is not sampling:
        width *= 2  # and their gradients
    if fn in (training_swiglu, masters_swiglu):
        width += 2 * (columns + 128) + case.F  # gate, up, and the gradient of both
    n_groups = len(case.group_sizes)
    scales = 2 * n_groups * 96 * case.F if packed else 0  # 90 rows of them, padded
    # XLA keeps arguments as [D, F, E] where E fills lanes and F does not: copied, like all rows.
    relaid = n_groups % 128 == 0 and case.F % 128 > 0
    matrices = 2 * n_groups * case.D * (case.F + 64) if relaid else 0
    # Linear in the rows: copies into the kernels' layout; else no matrix is copied.
    bound = 2 * case.M * width + scales + matrices + (8 << 20)
    assert compiled.temp_bytes < bound, (compiled.temp_bytes, bound)


@pytest.mark.parametrize(
    "chip", [pytest.param(x, marks=pytest.mark.slow if x == "v6e" else ()) for x in CHIPS]
)
def test_the_down_projection_trains(chip):
    compile_case(chip, training, DOWN_20B)


@pytest.mark.parametrize(
    "chip", [pytest.param(x, marks=() if x == "tpu7x" else pytest.mark.slow) for x in CHIPS]
)
def test_gate_and_up_train(chip):
    compile_case(chip, training_swiglu, GATE_UP_20B)


@pytest.mark.parametrize("chip", CHIPS)
def test_gate_and_up_sample_with_four_bit_weights(chip):
    compile_case(chip, sampling, GATE_UP_20B, packed=True)


@pytest.mark.parametrize("chip", ["v5p"])
@pytest.mark.parametrize("fn", [grouped_matmul, grouped_swiglu], ids=lambda fn: fn.__name__)
def test_float32_compiles_where_there_is_least_vmem(chip, fn):
    """Its products do not fit the registers, and what spills takes vector memory too."""
    lhs, rhs = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 2880), (8, 2880, 5760))
    )
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = ahead_of_time.compile_for(chip, partial(fn, impl="mosaic_tpu"), lhs, rhs, sizes)
    assert all(size < 64 << 20 for size in compiled.vmem_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", [DOWN_20B, GATE_UP_20B], ids=lambda x: x.name)
def test_four_bit_weights_train_what_stands_before_them(chip, case):
    compile_case(chip, adapters, case, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("fn, case", [(masters, DOWN_20B), (masters_swiglu, GATE_UP_20B)])
def test_four_bit_training_makes_no_dense_copy(chip, fn, case):
    compile_case(chip, fn, case, packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("fn", [training, training_swiglu, sampling], ids=lambda x: x.__name__)
def test_a_hundred_and_twenty_eight_experts(chip, fn):
    compile_case(chip, fn, DOWN_120B if fn is training else GATE_UP_120B)
