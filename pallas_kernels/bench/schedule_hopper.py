# SPDX-License-Identifier: Apache-2.0
"""How long one turn of a Hopper kernel's main loop keeps each pipe, read from its machine code.

Mosaic GPU leaves the kernel's instructions (`*.sass_ctrl`). A turn of one warpgroup puts one warp
on each quarter of a core; the table is in cycles of such a quarter, for all warpgroups that
compute. The largest column bounds the turn from below; waiting for memory, for each other and for
results is not in it, so a table is for comparing kernels and says no time.
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
    "ALU": (2, "FMNMX F2FP ISETP FSETP SEL FSEL LOP3 PRMT IADD3 IADD LEA SHF MOV IMNMX VIADD "
               "VIMNMX PLOP3"),
    "LSU": (4, "LDS STS LDSM STSM SHFL LDG STG RED ATOMS ATOMG"),
}  # fmt: skip
PIPE_OF = {op: (pipe, cycles) for pipe, (cycles, ops) in PIPES.items() for op in ops.split()}
COLUMNS = ("tensor", "MUFU", "ALU", "FMA", "IMAD", "LSU", "issue")
# registers a thread of a computing warpgroup asks for, by how many of them share a core
WARPGROUPS = {112: 4, 136: 3, 152: 3, 160: 3, 232: 2, 240: 2}


class HopperKernel(NamedTuple):
    """A kernel's innermost loops that feed the tensor cores: instructions, in program order."""

    kernel: str
    warpgroups: int  # that compute
    loops: tuple[tuple[str, ...], ...]

    def pipes(self, loop: tuple[str, ...]) -> dict[str, int]:
        """Cycles of one turn of all warpgroups, by COLUMNS."""
        found = Counter({"issue": len(loop)})
        for text in loop:
            found["tensor"] += tensor(text)
            pipe, cycles = PIPE_OF.get(text.split()[0].split(".")[0], ("", 0))
            found[pipe] += cycles
        return {x: self.warpgroups * found[x] for x in COLUMNS}


def tensor(text: str) -> int:
    """Cycles of the tensor cores: 64·n·k products, 2048 a cycle; 0 for other instructions."""
    found = re.match(r"HGMMA\.64x(\d+)x(\d+)", text)
    return 64 * int(found[1]) * int(found[2]) // 2048 if found else 0


def read(folder: Path) -> list[HopperKernel]:
    """The kernels in the folder's folders, in the order of their compilation.

    Raises: ValueError where there is none.
    """
    found = [
        parse(x.stem, x.read_text(errors="replace")) for x in sorted(folder.glob("*/*.sass_ctrl"))
    ]
    if not found:
        raise ValueError("Mosaic GPU must leave *.sass_ctrl of its kernels; there is none")
    return found


def parse(kernel: str, text: str) -> HopperKernel:
    """The loops in one kernel's machine code."""
    code: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        at = re.match(r"\s*[-\d&]+:.:.:.:\w\w\s+/\*\w+\*/\s+(@!?U?P\w+ +)?(\S.*)", line)
        if at:
            branch = re.match(r"BRA.*\((\.L_x_\d+)\)", at[2])
            if branch and at[1]:  # a loop's end has a condition; the way back from a wait none
                jumps.append((len(code), branch[1]))
            code.append(at[2])
    spans = [(labels[x], here) for here, x in jumps if labels.get(x, here + 1) <= here]
    spans = [x for x in spans if any(map(tensor, code[x[0] : x[1] + 1]))]
    inner = [x for x in spans if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in spans)]
    most = re.search(r"USETMAXREG\.TRY_ALLOC.*0x(\w+)", text)
    groups = WARPGROUPS.get(int(most[1], 16), 2) if most else 1
    return HopperKernel(kernel, groups, tuple(tuple(code[a : b + 1]) for a, b in inner))


def show(case: str, kernel: HopperKernel) -> list[str]:
    """Lines for people."""
    groups = f"{kernel.warpgroups} computing warpgroup" + "s" * (kernel.warpgroups > 1)
    lines = [f"{case}  {kernel.kernel}: {groups}"]
    if not kernel.loops:
        return [*lines, "  no loop feeds the tensor cores"]
    lines.append(f"  {'main loop':<28}" + "".join(f"{x:>8}" for x in COLUMNS))
    for loop in kernel.loops:
        products = Counter(x.split()[0].removeprefix("HGMMA.").split(".F32")[0]
                           for x in loop if tensor(x))  # fmt: skip
        name = " ".join(f"{n}·{shape}" for shape, n in products.items())
        lines.append(f"  {name:<28}" + "".join(f"{n:>8}" for n in kernel.pipes(loop).values()))
    return lines
