# SPDX-License-Identifier: Apache-2.0
"""The TPU's own compiler takes the kernels at real sizes, for every chip; nothing is executed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import cases, pallas_tpu
from pallas_kernels.sink_attention import pallas_tpu_blocks as blocks
from tests.compilers import skip_without_compiler

pytestmark = pytest.mark.aot

MIB = 2**20
# MiB of vector memory, forward and backward: what the widest case takes, and room for a tenth more.
# Dk and dv are in it, whole: 1 KiB a key at a head size of 64.
VMEM_LIMITS = {"v5e": (11, 28), "v5p": (11, 28), "v6e": (18, 47), "tpu7x": (18, 47)}
NAMES = tuple(case.name for case in cases.REAL_CASES)
# Each kernel on each chip; cases that differ from these in the length of the grid, on one chip.
CHIPS = {name: ("v5e",) for name in NAMES} | {
    "full_20b": tuple(ahead_of_time.TPUS),
    "window_20b": tuple(ahead_of_time.TPUS),
    "head128": ("v5e", "tpu7x"),
}
# By `-m aot` alone; v6e's first is one of the pinned schedules, which CI compiles anyway.
LONG = {
    ("v6e", "full_20b"),
    ("tpu7x", "full_20b"),
    ("tpu7x", "head128"),
    ("v5e", "full_120b"),
    ("v5e", "train_4k"),
}


def compiled(chip, case, dtype=jnp.bfloat16, vmem=None, shares=False):
    """The forward and the backward pass of a case, with `vmem` bytes for each kernel."""
    return _compiled(chip, case._replace(name="", layout=""), dtype, vmem, shares)  # one per shape


@functools.cache
def _compiled(chip, case, dtype, vmem, shares):
    skip_without_compiler(chip)

    def step(dout, dlse, q, k, v, sink, *places):
        def attend(*args):
            return pallas_tpu.sink_attention_mosaic_tpu(
                *args, Layout(*places), case.window, case.H**-0.5
            )

        out, pull = jax.vjp(attend, q, k, v, sink)
        return *out, *pull((dout, dlse))

    def struct(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    B, T, S, N, K, H = case[1:7]
    q, k, dlse, sink = (
        struct(B, T, N, H),
        struct(B, S, K, H),
        struct(B, T, N, dtype=jnp.float32),
        struct(N, dtype=jnp.float32),
    )
    places = [struct(B, size, dtype=jnp.int32) for size in (T, S, T, S, *([S] if shares else []))]
    with pytest.MonkeyPatch.context() as patch:
        if vmem is not None:
            params = dataclasses.replace(blocks.compiler_params(), vmem_limit_bytes=vmem)
            patch.setattr(blocks, "compiler_params", lambda: params)
        return ahead_of_time.compile_for(chip, step, q, dlse, q, k, k, sink, *places)


@pytest.mark.parametrize(
    "chip, name",
    [
        pytest.param(chip, name, marks=pytest.mark.slow if (chip, name) in LONG else ())
        for name in NAMES
        for chip in CHIPS[name]
    ],
)
def test_both_passes_compile_within_vmem(chip, name):
    case = cases.get_attention_case(name)
    text = compiled(chip, case).executable.as_text()
    for kernel in ("forward", "backward"):
        assert f"sink_attention_{kernel}" in text
    used = compiled(chip, case).vmem_bytes
    assert len(used) == 2
    assert all(a <= limits * MIB for a, limits in zip(used, VMEM_LIMITS[chip], strict=True)), used
    operands = 2 * (2 * case.B * case.T * case.N * case.H + 4 * case.B * case.S * case.K * 128)
    assert compiled(chip, case).temp_bytes < 3 * operands


@pytest.mark.parametrize(
    "chip, window",
    [
        pytest.param(chip, window, marks=() if chip == "v5e" else pytest.mark.slow)
        for chip in ("v5e", "v5p", "v6e")
        for window in (0, 128)
    ],
)
def test_shared_keys_compile_within_the_chips_vmem(chip, window):
    """A prompt of 8,192 tokens and 16 answers of 512 are as long."""
    case = cases.get_attention_case("full_20b")._replace(window=window)
    results = compiled(chip, case, shares=True)
    limits = [limit * MIB for limit in VMEM_LIMITS[chip]]
    assert len(results.vmem_bytes) == 2
    assert all(a <= b for a, b in zip(results.vmem_bytes, limits, strict=True)), results.vmem_bytes


def test_float32_compiles():
    compiled("v5e", cases.get_attention_case("window_20b"), jnp.float32)


@pytest.mark.slow
def test_the_widest_float32_that_is_not_refused_compiles():
    case = cases.AttentionCase("widest", 1, 512, 512, 16, 2, 128)
    compiled("v5e", case, jnp.float32)


def test_bfloat16_compiles_whatever_precision_the_caller_asks_for():
    small = cases.AttentionCase("precision", 1, 512, 512, 8, 2, 64)
    with jax.default_matmul_precision("highest"):
        _compiled.__wrapped__("v5e", small, jnp.bfloat16, None, False)


def test_a_step_of_decoding_compiles():
    compiled("v6e", cases.AttentionCase("decode", 8, 1, 4096, 64, 8, 64))


def test_temporary_memory_is_linear_in_length():
    case = cases.get_attention_case(
        "full_20b"
    )  # of shorter rows XLA lays one buffer more over another
    twice = case._replace(T=2 * case.T, S=2 * case.S)
    short, long = (compiled("v5e", x).temp_bytes for x in (case, twice))
    assert long < 2.1 * short + 2**20


@pytest.mark.slow
def test_rows_beyond_vmem_are_taken_in_parts():
    case = cases.AttentionCase("long", 1, 49152, 49152, 16, 2, 64)
    results = compiled("tpu7x", case)
    assert len(results.vmem_bytes) == 1 + 3  # 16,384 keys each
    dq = 4 * case.T * case.N * case.H
    assert results.temp_bytes < 2.5 * dq, (results.temp_bytes, dq)  # not one for each part


def test_too_little_vmem_is_refused():
    with pytest.raises(Exception, match="(?i)vmem"):
        compiled("v5e", cases.get_attention_case("window_20b"), vmem=2**20)
