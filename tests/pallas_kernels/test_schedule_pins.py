# SPDX-License-Identifier: Apache-2.0
"""Upper limits of the cycles of main loops: a regression shows without a chip.

The limits are for the compilers named here, plus 5 %; other versions schedule differently. Print
today's with `python -m benchmarks.kernels OP --compile CHIP --schedule`.
"""

import functools
import importlib.metadata
import re

import jax
import pytest

from benchmarks.kernels import schedule
from pallas_kernels.ahead_of_time import TPUS
from pallas_kernels.bench import schedule_tpu
from tests.compilers import skip_without_compiler

pytestmark = [pytest.mark.aot, pytest.mark.filterwarnings("default")]

LIBTPU = "0.0.48"
ROOM = 1.05
# chip, operation, case: kernel: cycles of one iteration of each main loop, in program order
PINS = {
    ("v6e", "grouped_swiglu", "gate_up_20b"): {
        "grouped_swiglu": (3354, 3792, 1821, 1989, 1048, 1127),
        "grouped_drhs": (3242, 1751, 1744),
        "grouped_dlhs": (6235, 3290, 3162),
    },
    ("v6e", "grouped_swiglu_rounded", "gate_up_20b"): {
        "grouped_swiglu": (3353, 3791, 1821, 1989, 1048, 1127),
        "grouped_drhs": (3242, 1751, 1744),
        "grouped_dlhs": (6234, 3289, 3162),
    },
    ("v6e", "grouped_matmul_rounded", "down_20b"): {
        "grouped_matmul": (3356, 1825, 1054),
        "grouped_drhs": (3264, 1755, 1751),
        "grouped_dlhs": (3419, 1881, 1756),
    },
    ("v5p", "sink_attention", "full_20b"): {
        "sink_attention_forward": (9074, 10292),
        "sink_attention_backward": (7475, 7475),
    },
    ("v5p", "sink_attention", "window_20b"): {
        "sink_attention_forward_window": (7010,),
        "sink_attention_backward_window": (7481,),
    },
    ("v6e", "sink_attention", "full_20b"): {
        "sink_attention_forward": (12593, 14491),
        "sink_attention_backward": (18663, 20248),
    },
    ("v6e", "sink_attention", "window_20b"): {
        "sink_attention_forward_window": (5377,),
        "sink_attention_backward_window": (5700,),
    },
    ("v6e", "token_logprobs", "gptoss20b"): {"token_logprobs": (7748,)},
}
# chip, operation, case: kernel: cycles in which 256 rows of a block of columns are decoded
DECODING = {
    ("v6e", "grouped_swiglu_rounded", "gate_up_20b"): {"grouped_swiglu": 397, "grouped_dlhs": 407},
    ("v6e", "grouped_matmul_rounded", "down_20b"): {"grouped_matmul": 397, "grouped_dlhs": 407},
}
PIPES = {  # chip, operation, case: kernel: what the busiest pipe but the tensor cores' takes
    ("h200", "sink_attention", "full_20b"): {
        "sink_attention_forward": (2241, 1824, 1584),
        "sink_attention_dkv": (870, 514),
        "sink_attention_dq": (1448, 1170, 1024),
    },
    ("h200", "sink_attention", "window_20b"): {
        "sink_attention_forward": (1932, 1664, 1208),
        "sink_attention_dkv": (934, 514),
        "sink_attention_dq": (854, 720, 512),
    },
    # Of the products; the warpgroup that decodes has another loop.
    ("h200", "grouped_swiglu_rounded", "gate_up_20b"): {
        "grouped_swiglu_mxfp4": (207,),
        "grouped_matmul_mxfp4": (159,),
        "grouped_matmul_weights": (846,),
    },
    ("h200", "grouped_matmul_rounded", "down_20b"): {
        "grouped_matmul_mxfp4": (207,),
        "grouped_matmul_weights": (846,),
    },
}


def marked(pins):
    """Half a minute each; CI looks at one of a TPU and one of Hopper, `-m aot` at all."""
    measured = (("v5p", "window_20b"), ("h200", "full_20b"))
    return [
        pytest.param(chip, op, case, marks=() if (chip, case) in measured else pytest.mark.slow)
        for chip, op, case in pins
    ]


@functools.cache
def kernels(chip, op, case):
    skip_without_compiler(chip)
    target = "benchmarks.kernels.schedule:make_programs"
    return schedule.compile_in_child(chip, target, op, case, "bfloat16").kernels


def named(loops, name):
    """The first kernel of that name, of a forward pass if there is one."""
    return next(x for x in loops if re.search(rf"(^|_){name}_*([._]\d+)?$", x.kernel))


def skip_other_libtpu(chip):
    assert chip in TPUS
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith(LIBTPU):
        pytest.skip(f"cycles are pinned for libtpu {LIBTPU}; this is {version}")


@pytest.mark.parametrize("chip, op, case", marked(PINS))
def test_a_tpu_kernels_main_loops_are_no_slower(chip, op, case):
    skip_other_libtpu(chip)
    for name, pinned in PINS[chip, op, case].items():
        kernel = named(kernels(chip, op, case), name)
        cycles = tuple(kernel.cycles(loop) for loop in kernel.main_loops())
        assert len(cycles) == len(pinned), (name, cycles)
        assert all(a <= ROOM * b for a, b in zip(cycles, pinned, strict=True)), (name, cycles)


@pytest.mark.parametrize("chip, op, case", marked(DECODING))
def test_a_tpu_kernel_decodes_four_bits_no_slower(chip, op, case):
    skip_other_libtpu(chip)
    for name, pinned in DECODING[chip, op, case].items():
        kernel = named(kernels(chip, op, case), name)
        innermost = [x for x, _ in schedule_tpu.walk_loops(kernel.body) if not x.inner]
        (decoding,) = [x for x in innermost if not kernel.slots(x, "MXU")]
        assert kernel.cycles(decoding) <= ROOM * pinned, (name, kernel.cycles(decoding))


@pytest.mark.parametrize("chip, op, case", marked(PIPES))
def test_a_hopper_kernels_main_loops_are_no_slower(chip, op, case):
    if jax.__version_info__[:2] != (0, 11):
        pytest.skip(f"cycles are pinned for jax 0.11; this is {jax.__version__}")
    for name, pinned in PIPES[chip, op, case].items():
        kernel = named(kernels(chip, op, case), name)
        pipes = [kernel.pipes(loop) for loop in kernel.loops]
        cycles = tuple(max(n for pipe, n in x.items() if pipe != "tensor") for x in pipes)
        assert len(cycles) == len(pinned), (name, cycles)
        assert all(a <= ROOM * b for a, b in zip(cycles, pinned, strict=True)), (name, cycles)
