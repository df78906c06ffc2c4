# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels through the real compilers, for GPUs that are not there, at real shapes.

Run as a program, this file compiles and prints figures; the tests run it so, in processes that no
test of the interpreter has touched.
"""

import functools
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from pallas_kernels import ahead_of_time
from pallas_kernels.masks import Layout
from pallas_kernels.sink_attention import cases
from pallas_kernels.sink_attention.triton_kernels import jax_triton_call, triton_launch

pytestmark = pytest.mark.aot

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a block may take
KERNELS = {
    "forward_kernel": triton_launch.triton_forward_tiles,
    "dq_kernel": triton_launch.triton_dq_tiles,
    "dkv_kernel": triton_launch.triton_dkv_tiles,
}
TYPES = dict.fromkeys("q k v o dout dq dk dv".split()) | dict.fromkeys(
    "sink lse delta".split(), "*fp32"
)
TYPES |= dict.fromkeys("q_positions k_positions q_segments k_segments runs".split(), "*i32")
# Positions, segments and lengths are arguments: the programs of these are those of every case.
PROGRAMS = [(90, "full_20b", "bf16"), (80, "head128", "bf16"), (80, "full_20b", "fp32")]
EXTRA = [  # by `-m aot` alone: four seconds a kernel
    (80, "full_20b", "bf16"),
    (100, "full_20b", "bf16"),
    (90, "window_20b", "bf16"),
    (90, "head128", "bf16"),
]
ALL = [*PROGRAMS, *(pytest.param(*x, marks=pytest.mark.slow) for x in EXTRA)]


def compile_kernel(name, arch, case, dtype):
    """A kernel compiled by `triton.compile` alone, and the report of ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from pallas_kernels.sink_attention.triton_kernels import triton_kernel

    kernel, tiles = getattr(triton_kernel, name), KERNELS[name](case.H, 4 if "32" in dtype else 2)
    constants = triton_launch.kernel_constants(
        case.K, case.N // case.K, case.H, case.window, case.H**-0.5, tiles
    )
    signature = {
        x: "constexpr" if x in constants else TYPES.get(x, "i32") or f"*{dtype}"
        for x in kernel.arg_names
    }
    aligned = [["tt.divisibility", 16]]
    attrs = {(i,): aligned for i, t in enumerate(signature.values()) if t.startswith("*")}
    options = {
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": False,
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    compiled_kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert len(compiled_kernel.asm["cubin"]) > 1000
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled_kernel.asm["ptx"])
        chip = f"sm_{arch}{'a' if arch >= 90 else ''}"
        ptxas_output = subprocess.run(
            [get_ptxas(arch).path, "-v", f"--gpu-name={chip}", str(ptx), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    figures = ahead_of_time.parse_ptxas(ptxas_output)
    return {
        "registers": figures.registers,
        "spills": figures.spills,
        "shared": compiled_kernel.metadata.shared,
        "warps": tiles.warps,
        "ptx": compiled_kernel.asm["ptx"],
    }


def compile_from_jax(name):
    """Temporary memory of the forward and of forward and backward of a case, and JAX's PTX."""
    import jax
    import jax.numpy as jnp

    try:
        import jax_triton.triton_lib as library
    except ImportError:
        return {"missing": "needs jax-triton: pip install jax-triton"}
    reason = ahead_of_time.compiler_unavailable("h200")
    if reason:
        return {"missing": reason}
    if jax.__version_info__ < (0, 11):  # it asks the driver and not the target; there is no driver
        library.triton_kernel_call_lib.get_compute_capability = lambda _device: 90
    programs = []
    original = library.compile_ttir_to_ptx_inplace

    def remember(*args, **kwargs):
        result = original(*args, **kwargs)
        programs.append((result.name, result.binary))
        return result

    library.compile_ttir_to_ptx_inplace = remember
    case = cases.get_attention_case(name)
    bf16, place = jnp.bfloat16, jax.ShapeDtypeStruct

    def arguments(T):
        q = place((case.B, T, case.N, case.H), bf16)
        kv = place((case.B, case.S, case.K, case.H), bf16)
        ints = (place((case.B, x), jnp.int32) for x in (T, case.S, T, case.S))
        return q, kv, kv, place((case.N,), jnp.float32), Layout(*ints)

    def forward(*args):
        return jax_triton_call.sink_attention_triton(*args, case.window, case.H**-0.5)

    def backward(dout, dlse, *args):
        out, pull = jax.vjp(lambda *x: forward(*x, *args[4:]), *args[:4])
        return *out, *pull((dout, dlse))

    prefill = ahead_of_time.compile_for("h200", forward, *arguments(case.T))
    ahead_of_time.compile_for("h200", forward, *arguments(1))  # a decode step
    after_decode = len(programs)
    dout, dlse = arguments(case.T)[0], place((case.B, case.T, case.N), jnp.float32)
    program_pair = ahead_of_time.compile_for("h200", backward, dout, dlse, *arguments(case.T))
    return {
        "forward": prefill.temp_bytes,
        "backward": program_pair.temp_bytes,
        "after_decode": after_decode,
        "programs": programs,
    }


def figures(*arguments):
    """Run this file as a program; ptxas of the wheel comes first on PATH.

    Triton writes a later version of PTX than the ptxas of a machine's older toolkit reads.
    """
    wheel = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    root = str(Path(ahead_of_time.__file__).parents[1])
    environment = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"} | {
        "PATH": f"{wheel}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": root,
        "JAX_PLATFORMS": "cpu",
    }
    process = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)],
        env=environment,
        text=True,
        capture_output=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@functools.cache
def made_of(programs):
    """Every kernel of them, by two processes at a time."""
    halves = [programs[i::2] for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda x: figures("triton", json.dumps(x)), halves)
    return {tuple(key): value for part in parts for key, value in part}


@pytest.fixture
def compiled():
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton")
    return lambda *key: made_of(tuple(EXTRA if key[1:] in EXTRA else PROGRAMS))[key]


@pytest.fixture(scope="module")
def from_jax():
    if find_spec("jax_triton") is None:
        pytest.skip("needs jax-triton: pip install jax-triton")
    report = figures("jax", "full_20b")
    if "missing" in report:
        pytest.skip(report["missing"])
    return report


@pytest.mark.parametrize("arch, name, dtype", ALL)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_spills_and_shared_memory_suffices(compiled, arch, name, dtype, kernel):
    compiled_kernel = compiled(kernel, arch, name, dtype)
    print({x: compiled_kernel[x] for x in ("registers", "spills", "shared", "warps")})
    assert compiled_kernel["spills"] == 0
    assert compiled_kernel["registers"] * compiled_kernel["warps"] * 32 <= 65536
    assert compiled_kernel["shared"] <= min(
        SHARED_LIMIT[arch], 99 * 1024
    )  # the limit of smaller cards


@pytest.mark.parametrize("kernel", KERNELS)
def test_hopper_code_has_wgmma_and_16_byte_copies(compiled, kernel):
    ptx = compiled(kernel, 90, "full_20b", "bf16")["ptx"]
    assert "wgmma" in ptx and "cp.async.cg.shared.global" in ptx


@pytest.mark.parametrize("arch, name, dtype", ALL)
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_operation_is_left_for_ptxas_to_fuse(compiled, arch, name, dtype, kernel):
    """Or a masked and a whole block could round differently: only `.rn` forbids contraction."""
    ptx = compiled(kernel, arch, name, dtype)["ptx"]
    assert not re.findall(r"\b(?:add|sub|mul)(?:\.ftz)?\.f32", ptx)
    assert re.findall(r"\bmul\.rn(?:\.ftz)?\.f32", ptx)


def test_h200_memory_is_linear_in_length(from_jax):
    case = cases.get_attention_case("full_20b")
    rows = case.B * case.T * case.N
    assert from_jax["forward"] <= 2**20
    assert from_jax["backward"] <= 4 * 4 * rows  # lse, Δ and tables: no score, no copy of q


def test_prefill_and_decode_run_one_program(from_jax):
    assert from_jax["after_decode"] == 1


def test_jax_runs_the_instructions_that_are_measured_here(compiled, from_jax):
    def instructions(ptx):
        lines = (x.split("//")[0].strip() for x in ptx.splitlines())
        return [x for x in lines if x and not x.startswith((".", "$"))]

    for name, ptx in from_jax["programs"]:
        measured_ptx = compiled(name, 90, "full_20b", "bf16")["ptx"]
        assert instructions(ptx) == instructions(measured_ptx), name


if __name__ == "__main__":
    if sys.argv[1] == "jax":
        print(json.dumps(compile_from_jax(sys.argv[2])))
    else:
        print(
            json.dumps(
                [
                    (
                        (kernel, *program),
                        compile_kernel(
                            kernel, program[0], cases.get_attention_case(program[1]), program[2]
                        ),
                    )
                    for program in json.loads(sys.argv[2])
                    for kernel in KERNELS
                ]
            )
        )
