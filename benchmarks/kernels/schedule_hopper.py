# SPDX-License-Identifier: Apache-2.0
"""Cycles of one iteration of a Hopper kernel's main loop on each pipe, from its machine code.

Mosaic GPU writes the kernel's instructions to a file (`*.sass_ctrl`). A warpgroup puts one warp on
each quarter of a core; the table is in cycles of such a quarter, for all computing warpgroups. The
largest column is a lower bound of the iteration. Waiting for memory, for other warps and for
results is not included, so the table compares kernels but is not a time.
"""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# cycles that one warp instruction holds its pipe, of a quarter core
PIPES = {
    "MUFU": (8, "MUFU"),  # exp2, log, reciprocal: 4 lanes a cycle
    "FMA": (1, "FFMA FMUL FADD HFMA2 HADD2 HMUL2"),
    "IMAD": (2, "IMAD"),
    "ALU": (
        2,
        "FMNMX F2FP ISETP FSETP SEL FSEL LOP3 PRMT IADD3 IADD LEA SHF MOV IMNMX VIADD VIMNMX PLOP3",
    ),
    "LSU": (4, "LDS STS LDSM STSM SHFL LDG STG RED ATOMS ATOMG"),
}
PIPE_OF = {op: (pipe, cycles) for pipe, (cycles, ops) in PIPES.items() for op in ops.split()}
COLUMNS = ("tensor", "MUFU", "ALU", "FMA", "IMAD", "LSU", "issue")
# registers a thread of a computing warpgroup asks for, by how many of them share a core
WARPGROUPS = {112: 4, 136: 3, 152: 3, 160: 3, 232: 2, 240: 2}


class HopperKernel(NamedTuple):
    """A kernel's innermost loops with tensor core instructions, in program order."""

    kernel: str
    warpgroups: int  # computing ones
    loops: tuple[tuple[str, ...], ...]

    def pipes(self, loop: tuple[str, ...]) -> dict[str, int]:
        """Cycles of one iteration of all warpgroups, by COLUMNS."""
        cycles_by_pipe = Counter({"issue": len(loop)})
        for text in loop:
            cycles_by_pipe["tensor"] += tensor_cycles(text)
            pipe, cycles = PIPE_OF.get(text.split()[0].split(".")[0], ("", 0))
            cycles_by_pipe[pipe] += cycles
        return {x: self.warpgroups * cycles_by_pipe[x] for x in COLUMNS}


def tensor_cycles(text: str) -> int:
    """Tensor core cycles of an instruction: 64·n·k products, 2048 a cycle; 0 for others."""
    shape = re.match(r"HGMMA\.64x(\d+)x(\d+)", text)
    return 64 * int(shape[1]) * int(shape[2]) // 2048 if shape else 0


def read_hopper_kernels(folder: Path) -> list[HopperKernel]:
    """Read the kernels in the folder's subfolders, in the order of their compilation.

    Raises: ValueError when there is none.
    """
    kernels = [
        parse_hopper_kernel(x.stem, x.read_text(errors="replace"))
        for x in sorted(folder.glob("*/*.sass_ctrl"))
    ]
    if not kernels:
        raise ValueError("Mosaic GPU must write *.sass_ctrl of its kernels; there is no such file")
    return kernels


def parse_hopper_kernel(kernel: str, text: str) -> HopperKernel:
    """Find the loops in one kernel's machine code."""
    code: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        instruction = re.match(r"\s*[-\d&]+:.:.:.:\w\w\s+/\*\w+\*/\s+(@!?U?P\w+ +)?(\S.*)", line)
        if instruction:
            branch = re.match(r"BRA.*\((\.L_x_\d+)\)", instruction[2])
            if branch and instruction[1]:  # a loop's end is conditional; a wait's branch is not
                jumps.append((len(code), branch[1]))
            code.append(instruction[2])
    spans = [(labels[x], end) for end, x in jumps if labels.get(x, end + 1) <= end]
    spans = [x for x in spans if any(map(tensor_cycles, code[x[0] : x[1] + 1]))]
    inner = [x for x in spans if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in spans)]
    register_request = re.search(r"USETMAXREG\.TRY_ALLOC.*0x(\w+)", text)
    groups = WARPGROUPS.get(int(register_request[1], 16), 2) if register_request else 1
    return HopperKernel(kernel, groups, tuple(tuple(code[a : b + 1]) for a, b in inner))


def format_hopper_kernel(case: str, kernel: HopperKernel) -> list[str]:
    """The lines of a kernel's table."""
    groups = f"{kernel.warpgroups} computing warpgroup" + "s" * (kernel.warpgroups > 1)
    lines = [f"{case}  {kernel.kernel}: {groups}"]
    if not kernel.loops:
        return [*lines, "  no loop uses the tensor cores"]
    lines.append(f"  {'main loop':<28}" + "".join(f"{x:>8}" for x in COLUMNS))
    for loop in kernel.loops:
        products = Counter(
            x.split()[0].removeprefix("HGMMA.").split(".F32")[0] for x in loop if tensor_cycles(x)
        )
        name = " ".join(f"{n}·{shape}" for shape, n in products.items())
        lines.append(f"  {name:<28}" + "".join(f"{n:>8}" for n in kernel.pipes(loop).values()))
    return lines
