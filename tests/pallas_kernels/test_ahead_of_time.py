# SPDX-License-Identifier: Apache-2.0
"""Real compilers for chips that are not there: what they take and what they refuse."""

import inspect
import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import ahead_of_time, sink_attention
from pallas_kernels.ahead_of_time import CHIPS, Ptxas, chip_mesh, compile_for, parse_ptxas
from pallas_kernels.dispatch import target_device
from pallas_kernels.sink_attention import cases
from tests.compilers import skip_without_compiler

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'entry_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for entry_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 16 bytes cumulative stack size
"""


def test_the_figures_of_ptxas_are_read():
    assert parse_ptxas(PTXAS) == Ptxas(registers=168, spills=20, stack=16)
    slow = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async is serialized"
    assert parse_ptxas(PTXAS + slow).warnings == (slow,)


def test_an_unknown_chip_names_the_known_ones():
    with pytest.raises(ValueError, match="one of v5e, v5p, v6e, tpu7x, a100.*got 'v9'"):
        chip_mesh("v9")


def double(x, rows):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, grid=(x.shape[0] // rows,), in_specs=[block], out_specs=block, out_shape=x
    )(x)


@pytest.mark.aot
@pytest.mark.parametrize("chip", CHIPS)
def test_every_chip_compiles_a_matmul(chip):
    skip_without_compiler(chip)
    targets = []

    def program(a, b):
        targets.append(target_device())
        return a @ b

    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    assert compile_for(chip, program, x, x).chip == chip
    assert targets[0].platform == ("tpu" if "NVIDIA" not in targets[0].kind else "gpu")
    assert targets[0].is_hopper == (chip in ("h100", "h200"))


@pytest.mark.aot
@pytest.mark.parametrize("path", ["as it is", "an old ptxas first"])
def test_the_triton_kernel_compiles_whatever_ptxas_stands_first(path, monkeypatch, tmp_path):
    """An older toolkit's ptxas does not know the PTX of a newer Triton."""
    pytest.importorskip("triton")
    library = pytest.importorskip("jax_triton")
    if "out_type" not in inspect.signature(library.triton_call).parameters:
        pytest.skip("jax-triton 0.3 asks a driver while it lowers")
    if path != "as it is":
        old = tmp_path / "ptxas"
        old.write_text("#!/bin/sh\necho 'ptxas fatal: Unsupported .version' >&2\nexit 255\n")
        old.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    skip_without_compiler("h200")
    # sizes of their own, or a kernel compiled before stands in
    case = cases.get_attention_case("train_4k")._replace(B=1, T=256 if path == "as it is" else 320)
    q, k, v, sink, *_ = jax.eval_shape(
        lambda: cases.init_attention_inputs(case._replace(S=case.T), "bfloat16")
    )
    attend = partial(sink_attention, impl="triton")
    compiled = compile_for("h200", attend, q, k, v, sink)
    assert compiled.chip == "h200" and compiled.temp_bytes <= 2**20  # no score, no copy of q


def test_the_wheels_tools_stand_first_and_once(monkeypatch, tmp_path):
    (tmp_path / "nvidia/cu13/bin").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [x for x in sys.modules if x.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "nvidia/__init__.py").touch()
    monkeypatch.setenv("PATH", "/old")
    ahead_of_time._prefer_wheel_ptxas()
    assert os.environ["PATH"] == "/old"  # no ptxas in it
    (tmp_path / "nvidia/cu13/bin/ptxas").touch()
    for _ in range(2):
        ahead_of_time._prefer_wheel_ptxas()
        assert os.environ["PATH"] == f"{tmp_path}/nvidia/cu13/bin:/old"


@pytest.mark.aot
def test_kernels_compiled_before_count_as_calls():
    skip_without_compiler("h200")
    case = cases.get_attention_case("train_4k")._replace(B=1, T=192, S=192)
    q, k, v, sink, *_ = jax.eval_shape(lambda: cases.init_attention_inputs(case, "bfloat16"))
    attend = partial(sink_attention, impl="mosaic_gpu")
    first, recompiled = (compile_for("h200", attend, q, k, v, sink) for _ in range(2))
    assert first.mosaic_calls == recompiled.mosaic_calls == len(first.kernels) == 1
    assert len(recompiled.kernels) in (0, 1)  # as the version of JAX has it


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_a_tile_that_interpretation_accepts_is_refused(chip):
    skip_without_compiler(chip)
    x = jnp.ones((16, 200))
    with pytest.raises(Exception, match="divisible by 8"):
        compile_for(chip, lambda x: double(x, 4), x)
    assert compile_for(chip, lambda x: double(x, 8), x).executable is not None


@pytest.mark.aot
def test_blocks_beyond_vector_memory_are_refused():
    skip_without_compiler("v5e")
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    with pytest.raises(Exception, match="vmem"):
        compile_for("v5e", lambda x: double(x, 8192), x)
