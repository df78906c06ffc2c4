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
from pallas_kernels.sink_attention import cases
from pallas_kernels.sink_attention.triton_kernels import triton_launch

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


def compile_kernel(name, arch, case_name, dtype):
    """A kernel compiled by `triton.compile` alone, and the report of ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from pallas_kernels.sink_attention.triton_kernels import triton_kernel

    case = cases.get_attention_case(case_name)
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
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": False}
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
        parts = pool.map(lambda x: figures(json.dumps(x)), halves)
    return {tuple(key): value for part in parts for key, value in part}


@pytest.fixture
def compiled():
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton")
    return lambda *key: made_of(tuple(EXTRA if key[1:] in EXTRA else PROGRAMS))[key]


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


if __name__ == "__main__":
    compiled_kernels = [
        ((kernel, arch, name, dtype), compile_kernel(kernel, arch, name, dtype))
        for arch, name, dtype in json.loads(sys.argv[1])
        for kernel in KERNELS
    ]
    print(json.dumps(compiled_kernels))
