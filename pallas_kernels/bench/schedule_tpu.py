# SPDX-License-Identifier: Apache-2.0
"""What libtpu's own schedule says of a kernel: cycles of each loop, and what each unit does.

A TPU core is a statically scheduled VLIW: one bundle a cycle, every slot decided by the compiler.
libtpu writes the packed bundles after register allocation (the final ones fold delays away and
undercount by some 6 %) and, row by row, which units each occupies. A loop is a backward branch;
its own cycles are those outside the loops within it. Loops that only copy are not told apart. Not
in it: waiting for memory (DMA).

Format: libtpu 0.0.42 to 0.0.48, undocumented; what cannot be read is an error, not a guess.
Next: `turns.py`, how often each loop runs; `schedule.py`, which compiles and prints.
"""

import re
from pathlib import Path
from typing import NamedTuple

DELAY = 4  # bundles behind a branch that run before it takes effect
TINY = 16  # bundles: shorter loops, and those that compute nothing, only start or await copies
FILES = r"(packed-bundles-post-ra|pre-delay_hlo-static-per-bundle-utilization)"
FLAGS = f"--xla_jf_dump_to={{}} --xla_jf_dump_llo_pass_label_regex={FILES}"
GHZ = {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}  # so that the vendor's peak comes out


class Loop(NamedTuple):
    """Bundles first … last, and the loops directly within, in program order."""

    first: int
    last: int
    inner: tuple["Loop", ...]

    def gaps(self) -> list[tuple[int, int]]:
        """[start, stop) before, between and behind the inner loops: one more than there are."""
        starts = [self.first, *(x.last + 1 for x in self.inner)]
        return list(zip(starts, [*(x.first for x in self.inner), self.last + 1], strict=True))


class TpuSchedule(NamedTuple):
    """One Pallas kernel. rows[c][u]: the slots of unit u that cycle c takes, of capacity[u]."""

    kernel: str
    units: tuple[str, ...]
    capacity: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    body: Loop  # the whole kernel, run once
    skips: tuple[tuple[int, int], ...]  # [start, stop) that a forward branch may jump over

    def cycles(self, loop: Loop) -> int:
        """Of one turn, without the loops within."""
        return sum(stop - start for start, stop in loop.gaps())

    def slots(self, loop: Loop, unit: str) -> int:
        """That one turn takes, without the loops within."""
        at = self.units.index(unit)
        return sum(row[at] for start, stop in loop.gaps() for row in self.rows[start:stop])

    def share(self, loop: Loop, unit: str) -> float:
        """Of the unit's slots."""
        slots = self.cycles(loop) * self.capacity[self.units.index(unit)]
        return self.slots(loop, unit) / slots if slots else 0.0

    def ms(self, turns: "Turns | None", chip: str) -> float | None:
        """Without waiting for memory; None where the loops are not those that `turns` counts."""
        cycles = None if turns is None else self._all_cycles(self.body, turns)
        return None if cycles is None else cycles / GHZ[chip] * 1e-6

    def _all_cycles(self, loop: Loop, turns: "Turns") -> float | None:
        if len(loop.inner) != len(turns.inner):
            return None
        total = 0.0
        for gap, count in zip(loop.gaps(), turns.gaps, strict=True):
            always, sometimes, *products = count if isinstance(count, tuple) else (count, count)
            plain, fed = self._skipped(*gap)
            if products and len(products) != len(fed):
                return None
            some = [stop - start for start, stop in fed] if products else []
            total += (gap[1] - gap[0] - plain - sum(some)) * always + plain * sometimes
            total += sum(x * n for x, n in zip(some, products, strict=True))
        for x, y in zip(loop.inner, turns.inner, strict=True):
            cycles = self._all_cycles(x, y)
            if cycles is None:
                return None
            total += cycles
        return total

    def _skipped(self, start: int, stop: int) -> tuple[int, list[tuple[int, int]]]:
        """What branches within the gap jump over: bundles without matrix work, pieces with it."""
        mxu = self.units.index("MXU")
        spans = sorted(x for x in self.skips if start + DELAY < x[0] and x[1] <= stop)
        fed: list[tuple[int, int]] = []
        plain: set[int] = set()
        for a, b in spans:
            if not any(row[mxu] for row in self.rows[a:b]):
                plain |= set(range(a, b))
            elif not fed or a >= fed[-1][1]:  # the outermost ones
                fed.append((a, b))
        return len(plain - {i for a, b in fed for i in range(a, b)}), fed

    def main_loops(self) -> list[Loop]:
        """The innermost loops that feed the matrix unit, in program order."""
        found = [x for x, _ in walk(self.body) if not x.inner and self.slots(x, "MXU")]
        return found or [self.body]


class Turns(NamedTuple):
    """How often each gap of a loop is run, in all, and the same of the loops within.

    Or three things of a gap: that, how often what a branch may jump over is run, and the same of
    each piece of those that feeds the matrix unit.
    """

    gaps: tuple[float | tuple[float, ...], ...]
    inner: tuple["Turns", ...] = ()


def walk(loop: Loop, depth: int = 0) -> list[tuple[Loop, int]]:
    """The loop and all within, each with its depth, in program order."""
    return [(loop, depth), *(y for x in loop.inner for y in walk(x, depth + 1))]


def read(folder: Path) -> list[TpuSchedule]:
    """The Pallas kernels that libtpu left in the folder, in the order of their compilation.

    Raises: ValueError where a file is not of the format that is known.
    """
    found = []
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
            raise ValueError(f"libtpu must leave bundles and utilization of {name}; one is missing")
        found.append(parse(name, bundles[0].read_text(errors="replace"), used[0].read_text()))
    return found


def parse(kernel: str, bundles: str, utilization: str) -> TpuSchedule:
    """The schedule in the two files of one kernel."""
    head, _, body = utilization.partition("== UTILIZATION:")
    lines = head.strip().splitlines()[-2:]
    rows = tuple(tuple(map(int, line.split())) for line in body.strip().splitlines())
    places, back, skips = [], [], []
    for line in bundles.splitlines():
        at = re.match(r" *(0x[0-9a-f]+|0) +(?:[A-Z]{2})?:", line)
        if at:
            places.append(int(at[1], 16))
        if places:
            targets = [int(x) for x in re.findall(r"sbr\.rel.*?bundleno = (\d+)", line)]
            here = places[-1]
            back += [(x, here + DELAY) for x in targets if x <= here]
            skips += [(here + DELAY + 1, x) for x in targets if x > here + DELAY + 1]
    if len(lines) < 2 or places != list(range(len(rows))) or not rows:
        raise ValueError(
            f"libtpu's schedule of {kernel} must have a row of utilization for each bundle; got "
            f"{len(rows)} and {len(places)}"
        )
    units = tuple(x.strip() for x in lines[0].split(","))
    last = len(rows) - 1
    computing = [i for i, unit in enumerate(units) if unit in ("MXU", "VALU", "XLU", "EUP")]
    loops = {(a, min(b, last)) for a, b in back if b - a >= TINY}
    loops = {x for x in loops if any(row[i] for row in rows[x[0] : x[1] + 1] for i in computing)}
    spans = sorted(loops, key=lambda x: (x[0], -x[1]))
    tree = _nest(0, last, spans)
    return TpuSchedule(kernel, units, tuple(map(int, lines[1].split())), rows, tree, tuple(skips))


def _nest(first: int, last: int, spans: list[tuple[int, int]]) -> Loop:
    """`spans` in order of their start, the longer first; all lie within first … last."""
    inner, at = [], 0
    while at < len(spans):
        a, b = spans[at]
        within = [x for x in spans[at + 1 :] if x[0] <= b]
        if any(x[1] > b for x in within):
            raise ValueError(f"loops at bundles {a} and {within[0][0]} must nest; they overlap")
        inner.append(_nest(a, b, within))
        at += 1 + len(within)
    return Loop(first, last, tuple(inner))
