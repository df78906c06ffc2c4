# SPDX-License-Identifier: Apache-2.0
"""Real compilers for chips that are not there: what they take and what they refuse."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels.ahead_of_time import CHIPS, Ptxas, compile_for, mesh_of, missing, read_ptxas
from pallas_kernels.dispatch import target

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'entry_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for entry_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 16 bytes cumulative stack size
"""


def test_the_figures_of_ptxas_are_read():
    assert read_ptxas(PTXAS) == Ptxas(registers=168, spills=20, stack=16)
    slow = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async is serialized"
    assert read_ptxas(PTXAS + slow).warnings == (slow,)


def test_an_unknown_chip_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="one of v5e, v5p, v6e, tpu7x, a100.*got 'v9'"):
        mesh_of("v9")


def needs(chip):
    reason = missing(chip)
    if reason:
        pytest.skip(reason)


def double(x, rows):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, grid=(x.shape[0] // rows,), in_specs=[block], out_specs=block, out_shape=x
    )(x)


@pytest.mark.aot
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_compiles_a_matmul_and_is_the_target_of_what_is_traced(chip):
    needs(chip)
    seen = []

    def program(a, b):
        seen.append(target())
        return a @ b

    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    assert compile_for(chip, program, x, x).chip == chip
    assert seen[0].platform == ("tpu" if "NVIDIA" not in seen[0].kind else "gpu")
    assert seen[0].hopper == (chip in ("h100", "h200"))


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_a_tile_that_interpretation_accepts_is_refused(chip):
    needs(chip)
    x = jnp.ones((16, 200))
    with pytest.raises(Exception, match="divisible by 8"):
        compile_for(chip, lambda x: double(x, 4), x)
    assert compile_for(chip, lambda x: double(x, 8), x).executable is not None


@pytest.mark.aot
def test_a_block_larger_than_the_vector_memory_is_refused():
    needs("v5e")
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    with pytest.raises(Exception, match="vmem"):
        compile_for("v5e", lambda x: double(x, 8192), x)
