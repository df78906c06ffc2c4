# SPDX-License-Identifier: Apache-2.0
"""What travels between devices, read from a compiled program's text."""

import re

KINDS = (
    "all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all", "all-to-all",
    "collective-permute",
)  # fmt: skip
BITS = {"pred": 8, "s8": 8, "u8": 8, "s32": 32, "u32": 32, "f32": 32, "bf16": 16, "f16": 16}
_CALL = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\((.*?)\)")


def collectives(text: str) -> list[tuple[str, int]]:
    """(kind, bytes) of each collective that runs once: in the entry, not in a loop's body.

    Bytes are of the larger of what one device gives and gets, but of ragged-all-to-alls the
    smaller: one side is a buffer with room.
    """
    found = []
    for line in _entry(text):
        call = _CALL.search(line)
        if call is None:
            continue
        result, kind, start, operands = call.groups()
        got, gave = _bytes(result), _bytes(operands)
        if kind == "ragged-all-to-all":
            sizes = [_array(x) for x in _ARRAY.findall(operands)][:2]
            found.append((kind, min(sizes) if sizes else got))
            continue
        found.append((kind, max(got - gave, gave) if start else max(got, gave)))
    return found


def _entry(text: str) -> list[str]:
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("ENTRY"))
    last = next(i for i, line in enumerate(lines) if i > first and line == "}")
    return lines[first:last]


_ARRAY = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")


def _array(found: tuple[str, str]) -> int:
    bits = BITS[found[0]]
    for size in filter(None, found[1].split(",")):
        bits *= int(size)
    return bits // 8


def _bytes(shapes: str) -> int:
    return sum(_array(x) for x in _ARRAY.findall(shapes) if x[0] in BITS)
