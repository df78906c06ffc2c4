# SPDX-License-Identifier: Apache-2.0
"""What travels between devices, read from a compiled program's text."""

import math
import re
from functools import cache

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "ragged-all-to-all",
    "all-to-all",
    "collective-permute",
)
BYTES = {"pred": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "u64": 8}
_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ", re.M)
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
_CALL = re.compile(rf" ({'|'.join(KINDS)})(?:-start)?\((.*?)\)")


def list_collectives(text: str) -> list[tuple[str, int]]:
    """(kind, bytes) of each collective of the entry: what is in loops is left out.

    Bytes are of the larger of what a device gives and gets; of a ragged all-to-all, one side of
    which is a buffer with room, of the smaller.
    """
    lines = text.splitlines()
    shapes = {}
    for line in lines:
        if sizes := _DEFINED.match(line):
            shapes[sizes[1]] = line[sizes.end() :]
    first = next(i for i, line in enumerate(lines) if line.startswith("ENTRY"))
    sizes = []
    for line in lines[first : lines.index("}", first)]:
        call = _CALL.search(line)
        if call is None:
            continue
        kind = call[1]
        operand_sizes = [_array_bytes(shapes[name]) for name in re.findall(r"%([\w.-]+)", call[2])]
        if kind == "ragged-all-to-all":
            sizes.append((kind, min(operand_sizes[:2])))
            continue
        all_sizes = sum(_list_sizes(line[: call.start()]))
        result_sizes = all_sizes - sum(operand_sizes) if f"{kind}-start" in line else all_sizes
        sizes.append((kind, max(result_sizes, sum(operand_sizes))))
    return sizes


def _array_bytes(shape: str) -> int:
    """Return the bytes of the first array of a shape."""
    return _list_sizes(shape)[0]


def _list_sizes(text: str) -> list[int]:
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
        matches = [_OPERATION.match(line) for line in lines]
        if name and head.endswith("{"):
            bodies[name[1]] = [(match[1], match[2], match[3]) for match in matches if match]

    def list_called(text_after: str) -> list[str]:
        inside = [
            x for group in _BRANCHES.findall(text_after) for x in re.findall(r"[\w.-]+", group)
        ]
        return [name for name in _CALLED.findall(text_after) + inside if name in bodies]

    @cache
    def is_sending(name: str) -> bool:
        return any(
            k.startswith(KINDS) or any(map(is_sending, list_called(r))) for _, k, r in bodies[name]
        )

    matches = list[tuple[str, str]]()
    for operations in bodies.values():
        reads, loops = dict[str, set[str]](), list[str]()
        for name, kind, text_after in operations:
            operands = [x for x in re.findall(r"%([\w.-]+)", text_after) if x in reads]
            reads[name] = {name}.union(*(reads[x] for x in operands))
            nested = any(map(is_sending, list_called(text_after)))
            if nested or kind.startswith(KINDS):
                matches += [(loop, name) for loop in loops if loop not in reads[name]]
            if nested:
                loops.append(name)
    return matches
