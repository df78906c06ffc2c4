# SPDX-License-Identifier: Apache-2.0
"""Kernels by their schedules: which call is which, its turns, and what that makes of a bound."""

import os

import jax
import numpy as np
import pytest

import jaxmoe.plan.schedules as module
from jaxmoe.config_file import load_config, override
from jaxmoe.plan import report
from jaxmoe.plan.chips import CHIPS
from jaxmoe.plan.collectives import TpuKernel, count_tpu_kernels
from jaxmoe.plan.roofline import step_bounds, step_work
from jaxmoe.plan.schedules import KernelTime, libtpu_dump_folder, time_kernels
from jaxmoe.rl.from_config import algorithm_from_config
from jaxmoe.run.memory import layer_flops
from pallas_kernels.bench import loop_counts
from pallas_kernels.bench.schedule_tpu import Loop, LoopCounts, TpuSchedule

LONG = override(
    load_config("gptoss20b.py"),
    "data.max_prompt_tokens=8192",
    "rollout.max_new_tokens=16384",
    "rollout.sequences_per_step=64",
    "optim.tokens_per_microbatch=196608",
)
M = LONG.model
TEXT = """
%pair (p: (s32[], bf16[3])) -> (s32[], bf16[3]) {
  %p = (s32[], bf16[3]{0}) parameter(0)
  %jvp_grouped_matmul_.7 = bf16[12,5]{1,0} custom-call(%a, %b, %c), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[3]{0:T(128)}, bf16[12,7]{1,0}, bf16[2,7,5]{2,1,0}}, backend_config={}
}

ENTRY %main (x: bf16[3]) -> bf16[3] {
  %x = (s32[], bf16[3]{0}) parameter(0)
  %sort.1 = bf16[3]{0} custom-call(%x), custom_call_target="Sort"
  ROOT %y = bf16[3]{0} while(%x), condition=%c, body=%pair, backend_config={"known_trip_count":{"n":"6"}}
}"""  # noqa: E501


def test_kernel_calls_are_counted_in_loops_with_reads():
    operands = ("s32", (3,)), ("bf16", (12, 7)), ("bf16", (2, 7, 5))
    assert count_tpu_kernels(TEXT, 1) == {TpuKernel("jvp_grouped_matmul_.7", operands): 6}


@pytest.fixture
def plain_turns(monkeypatch):
    """One turn of a kernel without a loop for each thousand queries or rows of its case."""

    def count_loops_of(op, case):
        questions.append((op, case))
        return {name: LoopCounts((case[1] // 1000,)) for name in names}

    names = [
        "sink_attention_forward",
        "sink_attention_forward_window",
        "sink_attention_backward_window",
        "sink_attention_backward_keys0",
        "sink_attention_backward_keys16384",
        "grouped_swiglu",
        "grouped_matmul",
        "grouped_dlhs",
        "grouped_drhs",
        "token_logprobs",
    ]
    questions = []
    monkeypatch.setattr(
        loop_counts, "attention_counts", lambda case: count_loops_of("attention", case[1:])
    )
    monkeypatch.setattr(loop_counts, "count_loops", count_loops_of)
    return questions


def call(name, *shapes):
    return TpuKernel(name, (("s32", (4,)), *(("bf16", shape) for shape in shapes)))


T, D, F = LONG.context, M.d_model, M.d_expert
ASKED = T * M.experts_per_token  # rows that ask a device's 8 experts, of a buffer twice as large
PAIRS = T * (T + 1) // 2
CALLS = {  # with the floating-point operations of each
    call("sink_attention_forward.20", (1, 8, 8, 64, T)): 4 * 64 * 64 * PAIRS,
    call("jvp_sink_attention_forward_window_.3"): 4 * 64 * 64 * (128 * T - 128 * 127 // 2),
    call("transpose_sink_attention_backward_window_.3"): 10 * 64 * 64 * (128 * T - 128 * 127 // 2),
    call("sink_attention_backward_keys0.1"): 10
    * 64
    * 64
    * (16384 * 16385 // 2 + (T - 16384) * 16384),
    call("sink_attention_backward_keys16384.1"): 10 * 64 * 64 * (T - 16384) * (T - 16383) // 2,
    call("jvp_grouped_swiglu_.16", (2 * ASKED, D), (8, D, 2 * F)): 4 * ASKED * D * F,
    call("grouped_swiglu.4.refs_0_", (2 * ASKED, D), (8, D, 2 * F)): 4 * ASKED * D * F,
    call("grouped_matmul.4", (2 * ASKED, F), (8, F, D)): 2 * ASKED * D * F,
    call("transpose_jvp_grouped_dlhs__.4", (2 * ASKED, 2 * F), (8, D, 2 * F)): 4 * ASKED * D * F,
    call("transpose_jvp_grouped_drhs__.4", (2 * ASKED, F), (2 * ASKED, D)): 2 * ASKED * D * F,
    call("token_logprobs.4", (T - 1, D), (D, 5888)): 2 * (T - 1) * D * 5888,
}


def test_kernel_calls_are_recognised_by_name_and_shapes(plain_turns):
    for one, flops in CALLS.items():
        call = module._count_call(LONG, one)
        assert call is not None and call[1] == flops, one.name
    cases = dict(plain_turns)
    assert cases["attention"][:6] == (1, T, T, 64, 8, 64)
    assert cases["grouped_swiglu"][1:4] == (2 * ASKED, D, 2 * F)
    assert cases["grouped_swiglu"].group_sizes == (ASKED // 8,) * 8
    assert cases["token_logprobs"].vocab_size == 5888


@pytest.mark.parametrize(
    "one",
    [
        call("token_logprobs_dlogits.4", (T, D), (D, 5888)),
        call("decode_attention.4", (8, 8, 64)),
        call("grouped_matmul.4", (2 * ASKED, F), (32, F, D)),  # others' experts
        call("grouped_matmul.4", (ASKED - 1, F), (8, F, D)),  # a part of the tokens
    ],
    ids=lambda one: one.name,
)
def test_what_is_not_known_is_not_guessed(plain_turns, one):
    assert module._count_call(LONG, one) is None


def test_attention_over_sharded_tokens_is_unknown(plain_turns):
    ring = override(LONG, "mesh.expert=1", "mesh.sequence=4")
    assert module._count_call(ring, next(iter(CALLS))) is None


def schedule(kernel, cycles):
    rows = ((1,),) * cycles
    return TpuSchedule(kernel, ("MXU",), (1,), rows, Loop(0, cycles - 1, ()), ())


def test_seconds_are_cycles_times_calls_under_the_peak(plain_turns, monkeypatch, tmp_path):
    one, quick, unread, other = (
        call("token_logprobs.4", (3000, D), (D, 5888)),
        call("token_logprobs.5", (2000, D), (D, 7)),
        call("token_logprobs.6", (2000, D), (D, 7)),
        call("token_logprobs_dlogits.4"),
    )
    schedules = [schedule("token_logprobs.4", 350_000), schedule("token_logprobs.5", 1)]
    monkeypatch.setattr(module, "read_tpu_schedules", lambda folder: schedules)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("chip",))
    calls = {one: 5, quick: 7, unread: 11, other: 13}
    chip = CHIPS["v6e"]
    kernel_time = time_kernels(LONG, mesh, calls, tmp_path, "v6e", chip)
    flops = 2 * D * (3000 * 5888 * 5 + 2000 * 7 * 7)
    seconds = 5 * 3 * 350_000 / 1.75e9 + 7 * 2 * D * 2000 * 7 / chip.flops
    assert kernel_time.seconds == pytest.approx(seconds)
    assert (kernel_time.flops, kernel_time.calls, kernel_time.other_calls) == (flops, 12, 24)


def test_kernels_count_by_schedule_and_others_at_peak():
    chip, work = CHIPS["v5p"], step_work(LONG, algorithm_from_config(LONG))
    attention = layer_flops(LONG).attention * 64 / 8
    kernels = KernelTime(3 * attention / chip.flops, attention, 24, 5)
    plain, with_kernels = (
        step_bounds(work, {}, chip, [0] * 8),
        step_bounds(work, {}, chip, [0] * 8, kernels),
    )
    assert with_kernels.arithmetic - plain.arithmetic == pytest.approx(2 * attention / chip.flops)
    lines = list(report.bound_lines(work, with_kernels, chip, "", kernels))
    (line,) = [line for line in lines if "of it kernels" in line]
    assert line.endswith("by the schedules of 24 calls, 33% of the peak; 5 others at the peak")
    assert not any("schedules" in line for line in report.bound_lines(work, plain, chip, ""))


def test_libtpu_gets_the_folder_and_preserves_user_flags(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--mine")
    with libtpu_dump_folder() as folder:
        assert os.environ["LIBTPU_INIT_ARGS"].startswith(f"--mine --xla_jf_dump_to={folder} ")
        assert folder.is_dir()
    assert os.environ["LIBTPU_INIT_ARGS"] == "--mine" and not folder.exists()
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    with libtpu_dump_folder():
        assert "LIBTPU_INIT_ARGS" in os.environ
    assert "LIBTPU_INIT_ARGS" not in os.environ
