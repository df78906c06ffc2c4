# SPDX-License-Identifier: Apache-2.0
"""Collectives and kernel calls of a compiled program, read from its HLO text.

A loop's body counts once for each iteration. The number of iterations is the compiler's known trip
count, or a constant that is the only bound in the loop's condition, as for a scan, which counts
from 0 in steps of 1. Nested loops multiply.
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
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
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
    groups: tuple[tuple[int, ...], ...]  # of devices, by their index in the program

    @property
    def sent_bytes(self) -> float:
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
        """The part of `sent_bytes` that goes to other hosts, per device.

        A ring leaves a host once, and all members on the host share that traffic.
        """
        # The group that spans the most hosts is the slowest one.
        group = max(self.groups, key=lambda members: len({host_of[i] for i in members}), default=())
        hosts, n = len({host_of[i] for i in group}), len(group)
        if hosts < 2:
            return 0.0
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.sent_bytes
        # An all-to-all sends to each member directly, so all members on other hosts count.
        outside = n - n // hosts if "all-to-all" in self.kind else hosts - 1
        return self.sent_bytes * outside / (n - 1)


@dataclass(frozen=True)
class TpuKernel:
    """A call of a Pallas kernel, by the name of its instruction, with the shapes it reads."""

    name: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and sizes: ("bf16", (24576, 2880))


@dataclass
class Computation:
    """A computation's collectives and kernels, and its calls with their counts.

    A count is a number, or the name of the condition that bounds it.
    """

    collectives: list[Collective] = field(default_factory=list)
    kernels: list[TpuKernel] = field(default_factory=list)
    calls: list[tuple[str, int | str]] = field(default_factory=list)
    branches: list[tuple[str, ...]] = field(default_factory=list)
    bound: int | None = None  # of a condition: the constant bound of its count
    is_less: bool = False  # the result is a less-than comparison of two arguments


def count_collectives(text: str, devices: int, unknown: int = 0) -> Counter[Collective]:
    """Collectives of a compiled program, each with its number of executions in one run.

    `unknown` is the number of iterations of outermost loops whose count the compiler does not know.
    Such loops inside others count 0: they exchange the tokens that did not fit the experts' first
    round (jaxmoe/parallel/rounds.py), and balanced routing leaves none. Of a conditional's branches
    the one that sends more counts. A reduce-scatter that the compiler writes as an all-reduce and a
    slice counts as that all-reduce.
    """
    return _count_calls(
        text, devices, unknown, lambda computation: computation.collectives, sent_bytes
    )


def count_tpu_kernels(text: str, devices: int, unknown: int = 0) -> Counter[TpuKernel]:
    """Calls of Pallas TPU kernels, each with its number of executions, as `count_collectives`."""
    return _count_calls(
        text, devices, unknown, lambda computation: computation.kernels, lambda x: x.total()
    )


def _count_calls(
    text: str,
    devices: int,
    unknown: int,
    items_of: Callable[[Computation], list[T]],
    weight: Callable[[Counter[T]], float],
) -> Counter[T]:
    computations, entry = _computations(text, devices)
    cache: dict[tuple[str, int], Counter[T]] = {}

    def count_computation(name: str, unknown_trips: int) -> Counter[T]:
        if (name, unknown_trips) not in cache:
            computation = computations.get(name, Computation())
            total = Counter(items_of(computation))
            for called, count in computation.calls:
                times = computations[count].bound if isinstance(count, str) else count
                inner = (
                    count_computation(called, 0)
                    if times is None
                    else count_computation(called, unknown_trips)
                )
                _add_scaled(total, inner, unknown_trips if times is None else times)
            for sides in computation.branches:
                _add_scaled(
                    total,
                    max((count_computation(side, unknown_trips) for side in sides), key=weight),
                    1,
                )
            cache[name, unknown_trips] = total
        return cache[name, unknown_trips]

    return count_computation(entry, unknown)


def sent_bytes(counted: Mapping[Collective, int]) -> float:
    """Bytes that one device sends."""
    return float(sum(collective.sent_bytes * times for collective, times in counted.items()))


def _add_scaled(total: Counter[T], counts: Counter[T], times: int) -> None:
    for item, count in counts.items():
        total[item] += count * times


def _computations(text: str, devices: int) -> tuple[dict[str, Computation], str]:
    computations: dict[str, Computation] = {}
    entry, current, sizes, constants = "", Computation(), dict[str, float](), dict[str, int]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current, sizes, constants = Computation(), {}, {}
            computations[head[2]] = current
            entry = head[2] if head[1] else entry
        elif instruction := _LINE.match(line):
            shape, suffix = _split_shape(instruction[3])
            sizes[instruction[2]] = _shape_bytes(shape)
            opcode, _, after = suffix.partition("(")
            if shape.startswith("s32[]") and (value := re.match(r"constant\((\d+)\)", suffix)):
                constants[instruction[2]] = int(value[1])
            _read_instruction(current, opcode.strip(), after, sizes, devices)
            if 'custom_call_target="tpu_custom_call"' in after:
                current.kernels.append(TpuKernel(instruction[2], _operands(after)))
            if instruction[1]:
                inner = _root_computation(opcode.strip(), after, computations)
                bound = (constants[x] for x in _NAMES.findall(after) if x in constants)
                current.bound = next(bound, inner.bound) if inner.is_less else inner.bound
                current.is_less = inner.is_less and current.bound is None
    return computations, entry


def _root_computation(opcode: str, after: str, match: Mapping[str, Computation]) -> Computation:
    """The computation that makes a result: the fused one of a fusion, else this instruction."""
    if opcode == "fusion":
        return match.get(_CALLED.findall(after)[0], Computation())
    return Computation(is_less=opcode == "compare" and "direction=LT" in after)


def _read_instruction(
    computation: Computation, opcode: str, after: str, sizes: Mapping[str, float], devices: int
) -> None:
    """Add one instruction to the computation."""
    if opcode.endswith(("-done", "-update")):  # counted at its -start
        return
    kind = opcode.removesuffix("-start")
    if kind in KINDS:
        operands, _, suffix = after.partition(")")
        size = sum(sizes.get(name, 0) for name in _NAMES.findall(operands))
        computation.collectives.append(Collective(kind, size, _parse_groups(suffix, devices)))
        return
    times: int | str = 1
    if opcode == "while":
        trips = _TRIPS.search(after)
        times = int(trips[1]) if trips else _CONDITION.findall(after)[0]
    computation.calls += [(name, times) for name in _CALLED.findall(after)]
    if sides := _BRANCHES.findall(after):
        names = [
            x.strip().lstrip("%") for listed, single in sides for x in (listed or single).split(",")
        ]
        computation.branches.append(tuple(names))


def _operands(after: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dtypes and sizes of a custom call's operands."""
    constraints = _OPERANDS.search(after)
    shapes = re.findall(r"([a-z]\w*)\[([\d,]*)\]", constraints[1] if constraints else "")
    return tuple((dtype, tuple(int(x) for x in dims.split(",") if x)) for dtype, dims in shapes)


def _split_shape(text: str) -> tuple[str, str]:
    """Split a line into the result's shape, which may be a tuple, and the remaining text."""
    if not text.startswith("("):
        shape, _, suffix = text.partition(" ")
        return shape, suffix
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 2 :]
    return text, ""


def _shape_bytes(shape: str) -> float:
    """Bytes of an array or of all arrays of a tuple."""
    total = 0.0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", dtype)  # as in f8e4m3fn
        width = int(bits[0]) / 8 if bits else float(dtype == "pred")
        total += width * math.prod(int(x) for x in dims.split(",") if x)
    return total


def _parse_groups(suffix: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Parse the groups of devices of a collective; no groups means all devices.

    The forms are pairs, axes of a mesh (whose devices may be permuted),
    [groups,size]<=[dims]T(order), and lists. Raises ValueError for another form.
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", suffix):
        return tuple(_parse_braces(pairs[1]))
    if mesh := _MESH.search(suffix):
        groups = _mesh_groups(mesh[1], mesh[4])
        if mesh[2] is None:
            return groups
        devices_of = _device_order(mesh[2], mesh[3])  # by the place in the mesh
        return tuple(tuple(devices_of[place] for place in group) for group in groups)
    if short := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", suffix):
        return _group_rows(
            np.array(_device_order(short[2], short[3])).reshape(_parse_ints(short[1]))
        )
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", suffix):
        return tuple(_parse_braces(listed[1]))
    if "replica_groups={}" not in suffix and "replica_groups=" in suffix:
        form = suffix[suffix.index("replica_groups=") :][:80]
        raise ValueError(f"the devices of a collective must be in a known form; got {form}")
    return (tuple(range(devices)),)


@cache
def _mesh_groups(mesh: str, axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups along axes of a mesh, `'a'=2,'b'=8` and `'a','b':(2)4`.

    `'b':(2)4` is the part of size 4 of b's coordinate that follows a major part of size 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    parts = [
        (name, int(major or 1), int(size or sizes[name]))
        for name, major, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes)
    ]
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = defaultdict(list)
    for device, position in enumerate(np.ndindex(*sizes.values())):
        key, order = dict(zip(sizes, position, strict=True)), []
        for name, major, size in parts:
            minor = sizes[name] // (major * size)
            coordinate = position[list(sizes).index(name)] // minor % size
            key[name] -= coordinate * minor
            order.append(coordinate)
        groups[tuple(key.values())].append((tuple(order), device))
    return tuple(tuple(device for _, device in sorted(group)) for group in groups.values())


def _device_order(dims: str, transposed: str | None) -> list[int]:
    """Devices in the order that `[dims]T(transposed)` stands for."""
    shape = _parse_ints(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(_parse_ints(transposed)) if transposed else ids).reshape(-1).tolist()


def _group_rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in ids)


def _parse_braces(text: str) -> Iterator[tuple[int, ...]]:
    for group in re.findall(r"\{([\d,]+)", text):
        yield tuple(_parse_ints(group))


def _parse_ints(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]
