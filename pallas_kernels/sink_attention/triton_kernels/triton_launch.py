# SPDX-License-Identifier: Apache-2.0
"""Tile sizes, scalars and constants of a launch.

The same tiles give the same bits. Nothing that is compiled depends on a length, so that a prefill
and a decode step run one program; no autotuning for the same reason. Next: triton_kernel.py.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

UNIT = 8  # strides are passed in units of so many elements; triton_kernel.py says why
DTYPES = ("bfloat16", "float16", "float32")
HEADS = (16, 32, 64, 128)  # head sizes: powers of two that a tensor core takes and that fit


class TritonTiles(NamedTuple):
    """Rows (queries times the heads of a group) and keys of a tile, and how it is compiled."""

    rows: int
    keys: int
    warps: int
    stages: int


# Chosen so that ptxas spills nothing on sm_80, sm_90 and sm_100, for which 8 warps share the
# registers of a tile, and so that a block takes at most 99 KiB, all that smaller cards have. Tiles
# of 128 rows read k and v half as often as tiles of 64. float32 has no tensor cores here (its
# products are IEEE, not TF32) and takes whatever fits. The two numbers are the bytes of an element
# and the head size.
_FORWARD = {
    (2, 64): TritonTiles(128, 64, 8, 3), (2, 128): TritonTiles(64, 64, 8, 2),
    (4, 64): TritonTiles(64, 32, 8, 2), (4, 128): TritonTiles(16, 32, 4, 2),
}  # fmt: skip
_DQ = {
    (2, 64): TritonTiles(128, 64, 8, 2), (2, 128): TritonTiles(64, 64, 8, 2),
    (4, 64): TritonTiles(64, 32, 8, 2), (4, 128): TritonTiles(32, 32, 8, 2),
}  # fmt: skip
_DKV = {  # key blocks stay, rows pass by
    (2, 64): TritonTiles(64, 128, 8, 3), (2, 128): TritonTiles(32, 64, 8, 2),
    (4, 64): TritonTiles(32, 32, 4, 2), (4, 128): TritonTiles(32, 32, 8, 2),
}  # fmt: skip


def forward_tiles(H: int, itemsize: int) -> TritonTiles:
    """Of the forward kernel; a row's bits depend on them, so prefill and decode share them."""
    return _FORWARD[itemsize, max(H, 64)]


def dq_tiles(H: int, itemsize: int) -> TritonTiles:
    """Of the kernel of dq."""
    return _DQ[itemsize, max(H, 64)]


def dkv_tiles(H: int, itemsize: int) -> TritonTiles:
    """Of the kernel of dk and dv."""
    return _DKV[itemsize, max(H, 64)]


def missing(*packages: str) -> str | None:
    """Which of the packages must be installed first; None when all are there."""
    for package in packages:
        if find_spec(package) is None:
            return f"needs {package}: pip install {package}"
    return None


def unsupported(H: int, dtype: str) -> str | None:
    """Why the kernels do not take this head size or dtype, in one phrase; None when they do."""
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of {', '.join(DTYPES)}"
    return None if H in HEADS else f"head size {H} is not one of {', '.join(map(str, HEADS))}"


def lengths(T: int, S: int) -> tuple[int, int]:
    """minus_T and minus_S."""
    return -T, -S


def strides(*of_arrays: tuple[int, int, int]) -> tuple[int, ...]:
    """Batch, time and head strides, given in elements, as the kernels take them."""
    flat = [x for strides in of_arrays for x in strides]
    if any(x % UNIT for x in flat):
        raise ValueError(
            f"strides of q, k and v must be multiples of {UNIT} elements; got {of_arrays}. "
            "Call .contiguous()."
        )
    return tuple(x // UNIT for x in flat)


def constants(
    K: int, G: int, H: int, window: int, scale: float, tiles: TritonTiles
) -> dict[str, Any]:
    """The kernels' constants, by name. The kernels need a positive scale."""
    return dict(
        K=K, G=G, H=H, WINDOW=window, SCALE=scale, ROWS=tiles.rows,
        KEYS=tiles.keys,
    )  # fmt: skip


def blocks(length: int, size: int) -> int:
    """How many blocks of the size hold the length; at least one."""
    return max(1, -(-length // size))
