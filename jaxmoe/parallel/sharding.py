# SPDX-License-Identifier: Apache-2.0
"""Which mesh axis cuts which logical axis of a parameter.

Two mesh axes, (fsdp, expert): the model width goes over the first, experts, heads and the
vocabulary over the second, so each matrix is cut over both (2,880 does not divide by 256).
"""

import math
from collections.abc import Mapping, Sequence

RULES: Mapping[str, str] = {
    "embed": "fsdp",
    "expert": "expert",
    "heads": "expert",
    "kv": "expert",
    "vocab": "expert",
}


def partition(axes: Sequence[str | None], sizes: Mapping[str, int]) -> tuple[str | None, ...]:
    """The mesh axis of each dimension, None where it is not cut; no mesh axis is used twice."""
    taken: set[str] = set()
    names: list[str | None] = []
    for axis in axes:
        name = RULES.get(axis) if axis is not None else None
        name = None if name in taken or name is None or sizes[name] == 1 else name
        taken |= {name} if name is not None else set()
        names.append(name)
    return tuple(names)


def local_shape(
    shape: Sequence[int], axes: Sequence[str | None], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """What one device holds of a parameter, its last piece padded where it does not divide."""
    names = partition(axes, sizes)
    return tuple(
        dim if name is None else math.ceil(dim / sizes[name])
        for dim, name in zip(shape, names, strict=True)
    )
