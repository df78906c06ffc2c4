# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of sink attention through the real compiler, at the sizes of GPT-OSS."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import ahead_of_time, hopper
from pallas_kernels.sink_attention import cases, pallas_gpu
from pallas_kernels.sink_attention.hopper import pallas_gpu_backward
from tests.compilers import skip_without_compiler
from tests.pallas_kernels.sink_attention.attention_oracle import public

pytestmark = pytest.mark.aot

CHIP = "h200"
REGISTERS = 65536  # of one core; a warpgroup is 128 threads


@pytest.fixture(scope="module", autouse=True)
def compiler():
    skip_without_compiler(CHIP)


def abstract(case, dtype=jnp.bfloat16):
    inputs = jax.eval_shape(lambda: cases.init_attention_inputs(case, dtype))
    q = inputs.q_BTNH
    return (q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)), inputs


def values_and_gradients(case):
    def f(ct, inputs, *last):
        attend = partial(public("mosaic_gpu"), case.window)
        out, pull = jax.vjp(lambda *x: attend(*x, *inputs[4:], *last), *inputs[:4])
        return *out, *pull(ct)

    return f


# One of each shape: positions are arrays, and some versions compile a kernel once per process.
EXTRA_ROWS = ("train_4k", "packed_20b")  # full_20b's programs: by `-m aot` alone
SHAPES = {case._replace(name="", layout=""): case for case in cases.REAL_CASES}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(x, id=x.name, marks=pytest.mark.slow if x.name in EXTRA_ROWS else ())
        for x in SHAPES.values()
    ],
)
def test_forward_and_backward_compile_without_spilling(case):
    compiled = ahead_of_time.compile_for(CHIP, values_and_gradients(case), *abstract(case))
    tiles = (
        pallas_gpu.mosaic_forward_tiles(case.H, case.window, case.N // case.K),
        pallas_gpu_backward.mosaic_dq_tiles(case.H, case.window, case.N // case.K),
        pallas_gpu_backward.mosaic_dkv_tiles(case.H, case.window),
    )
    assert len(compiled.kernels) == compiled.mosaic_calls == len(tiles)
    for kernel in compiled.kernels:
        assert kernel.spills == 0 and kernel.stack == 0 and not kernel.warnings
        assert kernel.shared <= hopper.SHARED_BYTES
    # each warpgroup starts with an equal part of a core's registers, in steps of 8 a thread
    parts = {n: REGISTERS // (128 * (n + 1)) // 8 * 8 for n in (x.consumers for x in tiles)}
    assert sorted(x.registers for x in compiled.kernels) == sorted(
        parts[x.consumers] for x in tiles
    )
    for consumers, part in parts.items():  # or they wait for ever for what they ask
        compute, fetch = hopper.REGISTERS[consumers]
        assert compute * consumers + fetch <= part * (consumers + 1)
    # lse and delta in two layouts, positions, segments: nothing that grows as T·S
    rows = case.B * case.T * case.N * 4
    assert compiled.temp_bytes <= 8 * rows
    print(f"\n{case.name}: {compiled.kernels}, temporary {compiled.temp_bytes:,} bytes")


@pytest.mark.slow  # the same kernels with one row of segments more
@pytest.mark.parametrize("name", ["full_20b", "window_20b", "head128"])
def test_shared_keys_compile_without_spilling(name):
    case = cases.get_attention_case(name)
    ct, inputs = abstract(case)
    last = inputs.k_segment_ids_BS
    compiled = ahead_of_time.compile_for(CHIP, values_and_gradients(case), ct, inputs, last)
    assert len(compiled.kernels) == compiled.mosaic_calls == 3
    for kernel in compiled.kernels:
        assert kernel.spills == 0 and kernel.stack == 0 and not kernel.warnings
        assert kernel.shared <= hopper.SHARED_BYTES
    print(f"\n{case.name}: {compiled.kernels}")


@pytest.mark.slow
def test_float16_compiles_too():
    case = cases.get_attention_case("train_4k")._replace(T=1000, S=1300, B=1, layout="chunk")
    inputs = abstract(case, jnp.float16)
    compiled = ahead_of_time.compile_for(CHIP, values_and_gradients(case), *inputs)
    assert [x.spills for x in compiled.kernels] == [0, 0, 0]


def test_a_ring_that_does_not_fit_is_refused(monkeypatch):
    """So what the tiles take is checked by someone."""
    case = cases.get_attention_case("head128")
    big = pallas_gpu.mosaic_forward_tiles(128, 0, 4)._replace(stages=4)
    monkeypatch.setattr(pallas_gpu, "mosaic_forward_tiles", lambda *_: big)
    with pytest.raises(ValueError, match="shared memory"):
        ahead_of_time.compile_for(CHIP, values_and_gradients(case), *abstract(case))
