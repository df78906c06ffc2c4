# SPDX-License-Identifier: Apache-2.0
"""What travels between devices in a compiled program, and which kernels it calls, read from its
HLO text.

A loop's body counts as often as it is known to turn, by the compiler's word or by a constant that
is all its condition asks for, which counts from 0 in steps of 1 as a scan's does; nested loops
multiply.
Next: jaxmoe/plan/schedules.py, jaxmoe/plan/roofline.py.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import numpy as np

T = TypeVar("T")

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")
_NAMES = re.compile(r"%([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?\})\}")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Collective:
    """One instruction of a program."""

    kind: str
    operand: float  # bytes on one device
    groups: tuple[tuple[int, ...], ...]  # of devices by their place in the program

    @property
    def sent(self) -> float:
        """Bytes that a device sends, where a group of n passes them around a ring.

        gather (n − 1)·x, reduce 2·(n − 1)/n·x, reduce-scatter and all-to-all (n − 1)/n·x, else x
        """
        n = max(map(len, self.groups), default=1)
        if self.kind == "all-gather":
            return (n - 1) * self.operand
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.operand
        return (2 if self.kind == "all-reduce" else 1) * (n - 1) / n * self.operand

    def to_other_hosts(self, host_of: Sequence[int]) -> float:
        """Those of `sent` that each device's share of its host's network takes.

        A ring leaves a host of g members once, and their shares of the network carry it together.
        """
        group = max(self.groups, key=lambda one: len({host_of[i] for i in one}), default=())
        hosts, n = len({host_of[i] for i in group}), len(group)
        if hosts < 2:
            return 0.0
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.sent
        outside = n - n // hosts if "all-to-all" in self.kind else hosts - 1
        return self.sent * outside / (n - 1)


@dataclass(frozen=True)
class TpuKernel:
    """A call of a Pallas kernel, by the name of its instruction, with the shapes it reads."""

    name: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and sizes: ("bf16", (24576, 2880))


@dataclass
class Computation:
    """Its own collectives and kernels, and what it calls how often; or as a condition says, by its
    name."""

    own: list[Collective] = field(default_factory=list)
    kernels: list[TpuKernel] = field(default_factory=list)
    calls: list[tuple[str, int | str]] = field(default_factory=list)
    branches: list[tuple[str, ...]] = field(default_factory=list)
    below: int | None = None  # of a condition: the constant that a count must be below
    less: bool = False  # its result is whether one of its arguments is less than another


def collectives(text: str, devices: int, unknown: int = 0) -> Counter[Collective]:
    """Each collective of a compiled program and how often one run of it makes it.

    `unknown` is how often an outermost loop turns whose count the compiler does not know. One
    within it does not: those are the rounds of tokens that a first round to the experts left over
    (jaxmoe/parallel/rounds.py), and balanced routing leaves none. Of a branch's sides the one that
    sends more counts. A reduce-scatter that the compiler writes as an all-reduce and a slice counts
    as that all-reduce.
    """
    return _counted(text, devices, unknown, lambda here: here.own, sent)


def tpu_kernels(text: str, devices: int, unknown: int = 0) -> Counter[TpuKernel]:
    """Each call of a Pallas kernel for TPUs and how often one run of the program makes it, counted
    as `collectives` are."""
    return _counted(text, devices, unknown, lambda here: here.kernels, lambda x: x.total())


def _counted(
    text: str, devices: int, unknown: int, own: Callable[[Computation], list[T]],
    weight: Callable[[Counter[T]], float],
) -> Counter[T]:  # fmt: skip
    found, entry = _computations(text, devices)
    known: dict[tuple[str, int], Counter[T]] = {}

    def of(name: str, turns: int) -> Counter[T]:
        if (name, turns) not in known:
            here = found.get(name, Computation())
            total = Counter(own(here))
            for called, count in here.calls:
                times = found[count].below if isinstance(count, str) else count
                inner = of(called, 0) if times is None else of(called, turns)
                _add(total, inner, turns if times is None else times)
            for sides in here.branches:
                _add(total, max((of(side, turns) for side in sides), key=weight), 1)
            known[name, turns] = total
        return known[name, turns]

    return of(entry, unknown)


def sent(counted: Mapping[Collective, int]) -> float:
    """Bytes that one device sends."""
    return float(sum(one.sent * times for one, times in counted.items()))


def _add(total: Counter[T], more: Counter[T], times: int) -> None:
    for one, count in more.items():
        total[one] += count * times


def _computations(text: str, devices: int) -> tuple[dict[str, Computation], str]:
    found: dict[str, Computation] = {}
    entry, here, sizes, constants = "", Computation(), dict[str, float](), dict[str, int]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            here, sizes, constants = Computation(), {}, {}
            found[head[2]] = here
            entry = head[2] if head[1] else entry
        elif made := _LINE.match(line):
            shape, rest = _shape(made[3])
            sizes[made[2]] = _size(shape)
            opcode, _, after = rest.partition("(")
            if shape.startswith("s32[]") and (value := re.match(r"constant\((\d+)\)", rest)):
                constants[made[2]] = int(value[1])
            _read(here, opcode.strip(), after, sizes, devices)
            if 'custom_call_target="tpu_custom_call"' in after:
                here.kernels.append(TpuKernel(made[2], _operands(after)))
            if made[1]:
                inner = _inner(opcode.strip(), after, found)
                bound = (constants[x] for x in _NAMES.findall(after) if x in constants)
                here.below = next(bound, inner.below) if inner.less else inner.below
                here.less = inner.less and here.below is None
    return found, entry


def _inner(opcode: str, after: str, found: Mapping[str, Computation]) -> Computation:
    """What a computation's result is made by: as it stands here, or in a fusion."""
    if opcode == "fusion":
        return found.get(_CALLED.findall(after)[0], Computation())
    return Computation(less=opcode == "compare" and "direction=LT" in after)


def _read(
    here: Computation, opcode: str, after: str, sizes: Mapping[str, float], devices: int
) -> None:  # fmt: skip
    """One instruction."""
    if opcode.endswith(("-done", "-update")):  # told of the -start
        return
    kind = opcode.removesuffix("-start")
    if kind in KINDS:
        operands, _, rest = after.partition(")")
        size = sum(sizes.get(name, 0) for name in _NAMES.findall(operands))
        here.own.append(Collective(kind, size, _groups(rest, devices)))
        return
    times: int | str = 1
    if opcode == "while":
        trips = _TRIPS.search(after)
        times = int(trips[1]) if trips else _CONDITION.findall(after)[0]
    here.calls += [(name, times) for name in _CALLED.findall(after)]
    if sides := _BRANCHES.findall(after):
        names = [x.strip().lstrip("%") for many, one in sides for x in (many or one).split(",")]
        here.branches.append(tuple(names))


def _operands(after: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Of a custom call."""
    found = _OPERANDS.search(after)
    shapes = re.findall(r"([a-z]\w*)\[([\d,]*)\]", found[1] if found else "")
    return tuple((dtype, tuple(int(x) for x in dims.split(",") if x)) for dtype, dims in shapes)


def _shape(text: str) -> tuple[str, str]:
    """A result's shape, which may be a tuple, and what follows."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 2 :]
    return text, ""


def _size(shape: str) -> float:
    """Bytes of an array or of all arrays of a tuple."""
    total = 0.0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", dtype)  # as in f8e4m3fn
        width = int(bits[0]) / 8 if bits else float(dtype == "pred")
        total += width * math.prod(int(x) for x in dims.split(",") if x)
    return total


def _groups(rest: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Who exchanges with whom: pairs, axes of a mesh (whose devices may come in another order),
    [groups,size]<=[dims]T(order), or lists; nothing stands for everybody.

    Raises ValueError for another form.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", rest):
        return tuple(_numbers(pairs[1]))
    if mesh := _MESH.search(rest):
        groups = _along(mesh[1], mesh[4])
        if mesh[2] is None:
            return groups
        devices_of = _order(mesh[2], mesh[3])  # by the place in the mesh
        return tuple(tuple(devices_of[place] for place in group) for group in groups)
    if short := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return _rows(np.array(_order(short[2], short[3])).reshape(_ints(short[1])))
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", rest):
        return tuple(_numbers(listed[1]))
    if "replica_groups={}" not in rest and "replica_groups=" in rest:
        form = rest[rest.index("replica_groups=") :][:80]
        raise ValueError(f"the devices of a collective must be in a known form; got {form}")
    return (tuple(range(devices)),)


@cache
def _along(mesh: str, over: str) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh, `'a'=2,'b'=8` and `'a','b':(2)4`: of b those parts of size 4
    that 2 others are major to."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    parts = [
        (name, int(major or 1), int(size or sizes[name]))
        for name, major, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", over)
    ]
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for device, at in enumerate(np.ndindex(*sizes.values())):
        left, mine = dict(zip(sizes, at, strict=True)), []
        for name, major, size in parts:
            minor = sizes[name] // (major * size)
            place = at[list(sizes).index(name)] // minor % size
            left[name] -= place * minor
            mine.append(place)
        groups[tuple(left.values())].append((tuple(mine), device))
    return tuple(tuple(device for _, device in sorted(group)) for group in groups.values())


def _order(dims: str, transposed: str | None) -> list[int]:
    """Devices in the order that `[dims]T(transposed)` stands for."""
    shape = _ints(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(_ints(transposed)) if transposed else ids).reshape(-1).tolist()


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in ids)


def _numbers(text: str) -> Iterator[tuple[int, ...]]:
    for group in re.findall(r"\{([\d,]+)", text):
        yield tuple(_ints(group))


def _ints(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]
