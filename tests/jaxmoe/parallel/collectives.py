# SPDX-License-Identifier: Apache-2.0
"""What travels between devices, read from a compiled program's text."""

import math
import re
from functools import cache

KINDS = (
    "all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all", "all-to-all",
    "collective-permute",
)  # fmt: skip
BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "u64": 8}
_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ", re.M)
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
_CALL = re.compile(rf" ({'|'.join(KINDS)})(?:-start)?\((.*?)\)")


def collectives(text: str) -> list[tuple[str, int]]:
    """(kind, bytes) of each collective of the entry: what is in loops is left out.

    Bytes are of the larger of what a device gives and gets; of a ragged all-to-all, one side of
    which is a buffer with room, of the smaller.
    """
    lines = text.splitlines()
    shapes = {}
    for line in lines:
        if found := _DEFINED.match(line):
            shapes[found[1]] = line[found.end() :]
    first = next(i for i, line in enumerate(lines) if line.startswith("ENTRY"))
    found = []
    for line in lines[first : lines.index("}", first)]:
        call = _CALL.search(line)
        if call is None:
            continue
        kind = call[1]
        gave = [_array(shapes[name]) for name in re.findall(r"%([\w.-]+)", call[2])]
        if kind == "ragged-all-to-all":
            found.append((kind, min(gave[:2])))
            continue
        everything = sum(_sizes(line[: call.start()]))
        got = everything - sum(gave) if f"{kind}-start" in line else everything
        found.append((kind, max(got, sum(gave))))
    return found


def _array(shape: str) -> int:
    """Of the first array there."""
    return _sizes(shape)[0]


def _sizes(text: str) -> list[int]:
    return [
        BYTES[dtype] * math.prod(int(size) for size in dims.split(",") if size)
        for dtype, dims in _ARRAY.findall(text)
        if dtype in BYTES
    ]


_CALLED = re.compile(r"(?:body|condition|to_apply|calls|\w+_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?\s([a-z][\w-]*)\((.*)$")


def beside_loops(text: str) -> list[tuple[str, str]]:
    """(loop, what sends) of a scheduled program: a collective, or a loop with some, that comes
    after a loop with collectives and reads nothing of it.

    XLA on a CPU may then run both at once, in another order on each device.
    """
    bodies = dict[str, list[tuple[str, str, str]]]()
    for block in re.split(r"\n(?=\S)", text):
        head, *lines = block.splitlines()
        name = re.match(r"(?:ENTRY )?%?([\w.-]+) ", head)
        found = [_OPERATION.match(line) for line in lines]
        if name and head.endswith("{"):
            bodies[name[1]] = [(one[1], one[2], one[3]) for one in found if one]

    def called(rest: str) -> list[str]:
        inside = [x for group in _BRANCHES.findall(rest) for x in re.findall(r"[\w.-]+", group)]
        return [name for name in _CALLED.findall(rest) + inside if name in bodies]

    @cache
    def sends(name: str) -> bool:
        return any(k.startswith(KINDS) or any(map(sends, called(r))) for _, k, r in bodies[name])

    found = list[tuple[str, str]]()
    for operations in bodies.values():
        reads, loops = dict[str, set[str]](), list[str]()
        for name, kind, rest in operations:
            given = [x for x in re.findall(r"%([\w.-]+)", rest) if x in reads]
            reads[name] = {name}.union(*(reads[x] for x in given))
            nested = any(map(sends, called(rest)))
            if nested or kind.startswith(KINDS):
                found += [(loop, name) for loop in loops if loop not in reads[name]]
            if nested:
                loops.append(name)
    return found
