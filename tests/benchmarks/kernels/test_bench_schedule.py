# SPDX-License-Identifier: Apache-2.0
"""The compilers' schedules are read right, and what cannot be read is an error."""

import json
import re
import sys

import pytest

from benchmarks.kernels import __main__ as bench
from benchmarks.kernels import schedule, schedule_hopper
from pallas_kernels.bench import loop_counts, schedule_tpu
from pallas_kernels.bench.ops import OPS
from pallas_kernels.bench.schedule_tpu import Loop, LoopCounts

UNITS = "MXU, XLU, VALU, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU"
BRANCHES = {  # the bundle of a branch, and where it goes: two loops in one, then copies
    25: 5,
    55: 35,
    75: 64,
    85: 2,
    3: 30,
}


def files(n=100):
    """Bundles with a loop 2 … 89 around loops 5 … 29, 35 … 59 and, of copies, 64 … 79."""
    lines = ["= control target key start"]
    for i in range(n):
        label = "LB" if i == 5 else "  "
        lines.append(f"{hex(i) if i else '     0'} {label}: {{ %s = sadd.s32 1, 2 }}")
        if i in BRANCHES:
            lines.append(
                f"   > {{ %1 = sbr.rel (!%p0) target bundleno = {BRANCHES[i]} (0x1), %p }}"
            )
    used = [[2 * (5 <= i < 30), 0, 4 * (not 64 <= i < 80), 0, 1, 1, 0, 1, 1] for i in range(n)]
    rows = "\n".join(" ".join(map(str, row)) for row in used)
    return "\n".join(lines), f"x\n{UNITS}\n2 2 4 1 3 3 2 2 2\n== UTILIZATION:\n{rows}\n"


def test_loops_nest_and_count_their_cycles():
    schedule = schedule_tpu.parse_tpu_schedule("k", *files())
    inner = (Loop(5, 29, ()), Loop(35, 59, ()))
    assert schedule.body == Loop(0, 99, (Loop(2, 89, inner),))  # copies and waits are no loop
    assert [schedule.cycles(x) for x, _ in schedule_tpu.walk_loops(schedule.body)] == [
        12,
        38,
        25,
        25,
    ]
    assert schedule.main_loops() == [inner[0]]
    assert schedule.share(inner[0], "MXU") == 1.0 and schedule.share(inner[1], "MXU") == 0.0
    assert schedule.share(inner[1], "VLOAD") == pytest.approx(1 / 3)
    assert schedule.slots(inner[0], "VSTORE:SPILL") == 25


def test_a_time_takes_exact_loop_counts():
    schedule = schedule_tpu.parse_tpu_schedule("k", *files())
    counted = LoopCounts(
        (1, 1), (LoopCounts((10, 10, 10), (LoopCounts((70,)), LoopCounts((30,)))),)
    )
    cycles = 12 + 10 * 38 + 70 * 25 + 30 * 25
    assert schedule.ms(counted, "v6e") == pytest.approx(cycles / 1.75e6)
    assert (
        schedule.ms(LoopCounts((1, 1), (LoopCounts((10, 10), (LoopCounts((70,)),)),)), "v6e")
        is None
    )
    assert schedule.ms(None, "v6e") is None


def test_branches_may_be_counted_apart():
    schedule = schedule_tpu.parse_tpu_schedule("k", *files())
    assert schedule.skips == ((8, 30),)  # over a loop, and so over none of its gaps
    schedule = schedule._replace(skips=((66, 69),))
    counted = LoopCounts(
        (1, 1), (LoopCounts((10, 10, (10, 2)), (LoopCounts((70,)), LoopCounts((30,)))),)
    )
    cycles = 12 + 10 * 38 - 8 * 3 + 70 * 25 + 30 * 25
    assert schedule.ms(counted, "v6e") == pytest.approx(cycles / 1.75e6)


def test_a_schedule_of_another_format_is_refused():
    bundles, used = files()
    with pytest.raises(
        ValueError, match="k must have a row of utilization for each bundle; got 99"
    ):
        schedule_tpu.parse_tpu_schedule("k", bundles, used.rstrip().rpartition("\n")[0])
    with pytest.raises(ValueError, match="for each bundle; got 0 and 0"):
        schedule_tpu.parse_tpu_schedule("k", "", "")
    crossing = bundles.replace("bundleno = 35", "bundleno = 10")
    with pytest.raises(ValueError, match="loops at bundles 5 and 10 must nest"):
        schedule_tpu.parse_tpu_schedule("k", crossing, used)


SASS = """
.L_x_1:
  -:-:-:-:01  /*0000*/  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
  0&1:-:-:Y:02  /*0010*/  MUFU.EX2 R1, R2 ;
  -:-:-:-:01  /*0020*/  FFMA R1, R2, R3, R4 ;
  -:-:-:-:01  /*0030*/  @P0 BRA (.L_x_1) ;
  -:-:-:-:01  /*0040*/  USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xa0 ;
.L_x_2:
  -:-:-:-:01  /*0050*/  FFMA R1, R2, R3, R4 ;
  -:-:-:-:01  /*0060*/  @P0 BRA (.L_x_2) ;
"""


def test_the_pipes_of_a_hopper_loop_are_counted():
    kernel = schedule_hopper.parse_hopper_kernel("k", SASS)
    assert len(kernel.loops) == 1  # the other one feeds no tensor core
    want = {
        "tensor": 64 * 128 * 16 // 2048,
        "MUFU": 8,
        "ALU": 0,
        "FMA": 1,
        "IMAD": 0,
        "LSU": 0,
        "issue": 4,
    }
    assert kernel.pipes(kernel.loops[0]) == {k: 3 * n for k, n in want.items()}
    lines = schedule_hopper.format_hopper_kernel("case", kernel)
    assert "3 computing warpgroups" in lines[0] and "1·64x128x16" in lines[2]


def test_a_hopper_kernel_without_schedule_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must write .*sass_ctrl"):
        schedule_hopper.read_hopper_kernels(tmp_path)


@pytest.mark.parametrize(
    "typed, message",
    [
        ("sink_attention --schedule", "--schedule must stand with --compile CHIP"),
        ("sink_attention --schedule --compile v9", "--compile must be one of v5e, .*; got 'v9'"),
        (
            "sink_attention --schedule --compile a100",
            "chip whose compiler writes one.*got --compile",
        ),
        ("sink_attention --schedule --compile b200 --impl triton", "whose compiler writes one"),
        (
            "sink_attention --schedule --compile v6e --impl xla",
            "got --impl xla. Type --impl mosaic",
        ),
        ("sink_attention --schedule --compile h200 --impl triton", "got --impl triton. Type"),
        ("sink_attention --schedule --compile v6e --case huge", "--case must be one of"),
    ],
)
def test_no_schedule_is_one_line(capsys, typed, message):
    with pytest.raises(SystemExit) as stop:
        bench.main(typed.split())
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_a_refused_case_leaves_the_others(capsys, monkeypatch):
    def compiled(chip, target, op, case, dtype):
        if case == "gqa8":
            raise RuntimeError("INTERNAL: too big\nwhere")
        name = "jvp_sink_attention_forward_.1"
        kernel = schedule_tpu.parse_tpu_schedule(name, *files())
        counted = LoopCounts(
            (1, 1), (LoopCounts((10, 10, 10), (LoopCounts((70,)), LoopCounts((30,)))),)
        )
        return schedule.CompilerOutput([kernel, kernel], {"sink_attention_forward": counted})

    monkeypatch.setattr(schedule, "compile_in_child", compiled)
    monkeypatch.setattr(bench, "compiler_unavailable", lambda chip: None)
    argv = ["sink_attention", "--compile", "v6e", "--schedule", "--case"]
    assert bench.main([*argv, "gqa8", "--case", "packed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "gqa8  refused: INTERNAL: too big"
    assert lines[2].endswith("100 bundles, 0.00 ms (DMA not included)")
    assert len(lines) == 5  # the kernel once; of its loops the one of 32 cycles and more
    assert bench.main([*argv, "gqa8"]) == 1
    capsys.readouterr()
    monkeypatch.setattr(schedule, "compile_in_child", lambda *_: schedule.CompilerOutput([], {}))
    assert bench.main([*argv, "packed"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "packed  refused: the compiler left no schedule of a Pallas kernel"
    ]


def test_a_compiler_that_dies_says_its_last_line(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with 1"):
        schedule.compile_in_child("v6e", "a:b")


def test_loop_counts_survive_the_child_process():
    counted = LoopCounts((1, (2.5, 0)), (LoopCounts((3,)),))
    assert schedule._counts_from_json(json.loads(json.dumps(counted))) == counted


@pytest.mark.aot  # takes seconds, and only schedules ask for it
def test_a_causal_square_is_half_seen():
    """4 × 4 blocks of 512: 6 of them whole, 4 on the diagonal, for each head."""
    case = OPS["sink_attention"].cases.get_attention_case("full_2k")
    blocks = loop_counts._block_sizes(case, True)
    (grid,) = loop_counts._attention_loops(blocks, case, 0, blocks.m).inner
    (visit,) = grid.inner
    assert grid.gaps == (8, 8) and visit.gaps == (20, 8, 20)
    assert [x.gaps for x in visit.inner] == [(2 * 6 * 2,), (2 * 4 * 2,)]


@pytest.mark.aot
def test_pieces_cover_each_groups_rows():
    case = OPS["grouped_matmul"].cases.BENCH_CASES[2]
    (grid,) = loop_counts._rows_loops(case, swiglu=False, transposed=False).inner
    assert [x.gaps[0] for x in grid.inner] == [8]  # groups of 16 rows: a short piece each
