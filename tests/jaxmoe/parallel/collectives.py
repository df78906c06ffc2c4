# SPDX-License-Identifier: Apache-2.0
"""What travels between devices, read from a compiled program's text."""

import math
import re

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
