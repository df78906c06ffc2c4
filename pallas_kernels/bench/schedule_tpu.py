# SPDX-License-Identifier: Apache-2.0
"""libtpu's schedule of a kernel: cycles of each loop, and the use of each unit.

A TPU core is a statically scheduled VLIW: one bundle a cycle, every slot decided by the compiler.
libtpu writes the packed bundles after register allocation (the final bundles have delays folded
away and undercount by some 6 %) and, row by row, the units that each occupies. A loop is a backward
branch; its cycles exclude those of its inner loops. Loops that only copy are not distinguished.
Waiting for memory (DMA) is not included.

Format: libtpu 0.0.42 to 0.0.48, undocumented; a file that cannot be read is an error.
Next: `loop_counts.py`, how often each loop runs; benchmarks/kernels/schedule.py prints both.
"""

import re
from pathlib import Path
from typing import NamedTuple

BRANCH_DELAY = 4  # bundles after a branch that run before it takes effect
MIN_LOOP_BUNDLES = 16  # shorter loops, and loops that compute nothing, start or await copies
FILES = r"(packed-bundles-post-ra|pre-delay_hlo-static-per-bundle-utilization)"
FLAGS = f"--xla_jf_dump_to={{}} --xla_jf_dump_llo_pass_label_regex={FILES}"
GHZ = {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}  # by the vendor's peak


class Loop(NamedTuple):
    """Bundles first … last, and the loops directly inside, in program order."""

    first: int
    last: int
    inner: tuple["Loop", ...]

    def gaps(self) -> list[tuple[int, int]]:
        """[start, stop) before, between and after the inner loops: one more than inner loops."""
        starts = [self.first, *(x.last + 1 for x in self.inner)]
        return list(zip(starts, [*(x.first for x in self.inner), self.last + 1], strict=True))


class TpuSchedule(NamedTuple):
    """A Pallas kernel's schedule: cycle c uses rows[c][u] of the capacity[u] slots of unit u."""

    kernel: str
    units: tuple[str, ...]
    capacity: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    body: Loop  # the complete kernel, run once
    skips: tuple[tuple[int, int], ...]  # [start, stop) that a forward branch may skip

    def cycles(self, loop: Loop) -> int:
        """Cycles of one iteration, without inner loops."""
        return sum(stop - start for start, stop in loop.gaps())

    def slots(self, loop: Loop, unit: str) -> int:
        """Slots that one iteration uses, without inner loops."""
        column = self.units.index(unit)
        return sum(row[column] for start, stop in loop.gaps() for row in self.rows[start:stop])

    def share(self, loop: Loop, unit: str) -> float:
        """Fraction of the unit's slots that one iteration uses, without inner loops."""
        slots = self.cycles(loop) * self.capacity[self.units.index(unit)]
        return self.slots(loop, unit) / slots if slots else 0.0

    def ms(self, counts: "LoopCounts | None", chip: str) -> float | None:
        """Milliseconds without waiting for memory; None if the loops differ from those counted."""
        cycles = None if counts is None else self._all_cycles(self.body, counts)
        return None if cycles is None else cycles / GHZ[chip] * 1e-6

    def _all_cycles(self, loop: Loop, counts: "LoopCounts") -> float | None:
        if len(loop.inner) != len(counts.inner):
            return None
        total = 0.0
        for gap, count in zip(loop.gaps(), counts.gaps, strict=True):
            n_always, n_skippable, *products = count if isinstance(count, tuple) else (count, count)
            plain, fed = self._skipped_bundles(*gap)
            if products and len(products) != len(fed):
                return None
            product_bundles = [stop - start for start, stop in fed] if products else []
            total += (
                gap[1] - gap[0] - plain - sum(product_bundles)
            ) * n_always + plain * n_skippable
            total += sum(x * n for x, n in zip(product_bundles, products, strict=True))
        for x, y in zip(loop.inner, counts.inner, strict=True):
            cycles = self._all_cycles(x, y)
            if cycles is None:
                return None
            total += cycles
        return total

    def _skipped_bundles(self, start: int, stop: int) -> tuple[int, list[tuple[int, int]]]:
        """Skipped by branches in the gap: bundles without matrix work, and spans with it."""
        mxu = self.units.index("MXU")
        spans = sorted(x for x in self.skips if start + BRANCH_DELAY < x[0] and x[1] <= stop)
        fed: list[tuple[int, int]] = []
        plain: set[int] = set()
        for a, b in spans:
            if not any(row[mxu] for row in self.rows[a:b]):
                plain |= set(range(a, b))
            elif not fed or a >= fed[-1][1]:  # the outermost ones
                fed.append((a, b))
        return len(plain - {i for a, b in fed for i in range(a, b)}), fed

    def main_loops(self) -> list[Loop]:
        """The innermost loops with matrix unit instructions, in program order."""
        product_loops = [
            x for x, _ in walk_loops(self.body) if not x.inner and self.slots(x, "MXU")
        ]
        return product_loops or [self.body]


class LoopCounts(NamedTuple):
    """Total executions of each gap of a loop, and the same for its inner loops.

    A gap may have a tuple instead of a number: its executions, those of the bundles that a branch
    may skip, and those of each skipped span with matrix unit instructions.
    """

    gaps: tuple[float | tuple[float, ...], ...]
    inner: tuple["LoopCounts", ...] = ()


def walk_loops(loop: Loop, depth: int = 0) -> list[tuple[Loop, int]]:
    """The loop and all loops inside, each with its depth, in program order."""
    return [(loop, depth), *(y for x in loop.inner for y in walk_loops(x, depth + 1))]


def read_tpu_schedules(folder: Path) -> list[TpuSchedule]:
    """Read the Pallas kernels that libtpu wrote to the folder, in the order of their compilation.

    Raises: ValueError when a file does not have the known format.
    """
    schedules = []
    for analysis in sorted(folder.glob("*-schedule-analysis_packed-bundles-post-ra.txt")):
        stem = re.sub(r"-\d+-schedule-analysis_packed-bundles-post-ra.txt", "", analysis.name)
        name = stem.split("-", 1)[1]
        calls = re.findall(r'%(\S+) = .*custom_call_target="tpu_custom_call"', analysis.read_text())
        if name == "TLP" or not calls:
            continue
        files = [x for x in folder.iterdir() if x.name.startswith(f"{stem}-")]
        bundles = [x for x in files if re.search(r"-\d+-packed-bundles-post-ra.txt$", x.name)]
        used = [x for x in files if x.name.endswith("-per-bundle-utilization.txt")]
        if not bundles or not used:
            raise ValueError(f"libtpu must write bundles and utilization of {name}; one is missing")
        schedules.append(
            parse_tpu_schedule(name, bundles[0].read_text(errors="replace"), used[0].read_text())
        )
    return schedules


def parse_tpu_schedule(kernel: str, bundles: str, utilization: str) -> TpuSchedule:
    """Parse the two files of one kernel."""
    head, _, body = utilization.partition("== UTILIZATION:")
    lines = head.strip().splitlines()[-2:]
    rows = tuple(tuple(map(int, line.split())) for line in body.strip().splitlines())
    addresses, back_edges, skips = [], [], []
    for line in bundles.splitlines():
        address = re.match(r" *(0x[0-9a-f]+|0) +(?:[A-Z]{2})?:", line)
        if address:
            addresses.append(int(address[1], 16))
        if addresses:
            targets = [int(x) for x in re.findall(r"sbr\.rel.*?bundleno = (\d+)", line)]
            current = addresses[-1]
            back_edges += [(x, current + BRANCH_DELAY) for x in targets if x <= current]
            skips += [
                (current + BRANCH_DELAY + 1, x) for x in targets if x > current + BRANCH_DELAY + 1
            ]
    if len(lines) < 2 or addresses != list(range(len(rows))) or not rows:
        raise ValueError(
            f"libtpu's schedule of {kernel} must have a row of utilization for each bundle; got "
            f"{len(rows)} and {len(addresses)}"
        )
    units = tuple(x.strip() for x in lines[0].split(","))
    last = len(rows) - 1
    computing = [i for i, unit in enumerate(units) if unit in ("MXU", "VALU", "XLU", "EUP")]
    loops = {(a, min(b, last)) for a, b in back_edges if b - a >= MIN_LOOP_BUNDLES}
    loops = {x for x in loops if any(row[i] for row in rows[x[0] : x[1] + 1] for i in computing)}
    spans = sorted(loops, key=lambda x: (x[0], -x[1]))
    tree = _nest_loops(0, last, spans)
    return TpuSchedule(kernel, units, tuple(map(int, lines[1].split())), rows, tree, tuple(skips))


def _nest_loops(first: int, last: int, spans: list[tuple[int, int]]) -> Loop:
    """Nest the spans, which lie in first … last and are sorted by start, the longer first."""
    inner, i = [], 0
    while i < len(spans):
        a, b = spans[i]
        nested = [x for x in spans[i + 1 :] if x[0] <= b]
        if any(x[1] > b for x in nested):
            raise ValueError(f"loops at bundles {a} and {nested[0][0]} must nest, but they overlap")
        inner.append(_nest_loops(a, b, nested))
        i += 1 + len(nested)
    return Loop(first, last, tuple(inner))
