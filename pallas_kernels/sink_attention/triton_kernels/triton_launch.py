# SPDX-License-Identifier: Apache-2.0
"""Tile sizes, scalars and constants of a launch.

Equal tiles give equal bits. No compile-time constant depends on a length, so that a prefill and a
decode step run the same program. For the same reason there is no autotuning.

Next: triton_kernel.py.
"""

from importlib.util import find_spec
from typing import Any, NamedTuple

UNIT = 8  # strides are passed in units of so many elements; see triton_kernel.py
DTYPES = ("bfloat16", "float16", "float32")
HEADS = (16, 32, 64, 128)  # supported head sizes: powers of two that fit


class TritonTiles(NamedTuple):
    """Rows (queries times the heads of a group) and keys of a tile, and compiler options."""

    rows: int
    keys: int
    warps: int
    stages: int


# Chosen so that ptxas reports no spills on sm_80, sm_90 and sm_100 (8 warps share the registers of
# a tile) and a block takes at most 99 KiB, the shared memory of smaller cards. Tiles of 128 rows
# read k and v half as often as tiles of 64. float32 does not use tensor cores (its products are
# IEEE, not TF32); its tiles are the largest that fit. Keys are (bytes of an element, head size).
_FORWARD = {
    (2, 64): TritonTiles(128, 64, 8, 3),
    (2, 128): TritonTiles(64, 64, 8, 2),
    (4, 64): TritonTiles(64, 32, 8, 2),
    (4, 128): TritonTiles(16, 32, 4, 2),
}
_DQ = {
    (2, 64): TritonTiles(128, 64, 8, 2),
    (2, 128): TritonTiles(64, 64, 8, 2),
    (4, 64): TritonTiles(64, 32, 8, 2),
    (4, 128): TritonTiles(32, 32, 8, 2),
}
_DKV = {  # the kernel holds a key block and loops over rows
    (2, 64): TritonTiles(64, 128, 8, 3),
    (2, 128): TritonTiles(32, 64, 8, 2),
    (4, 64): TritonTiles(32, 32, 4, 2),
    (4, 128): TritonTiles(32, 32, 8, 2),
}


def triton_forward_tiles(H: int, itemsize: int) -> TritonTiles:
    """Tiles of the forward kernel, equal for prefill and decode: a row's bits depend on them."""
    return _FORWARD[itemsize, max(H, 64)]


def triton_dq_tiles(H: int, itemsize: int) -> TritonTiles:
    """Tiles of the kernel of dq."""
    return _DQ[itemsize, max(H, 64)]


def triton_dkv_tiles(H: int, itemsize: int) -> TritonTiles:
    """Tiles of the kernel of dk and dv."""
    return _DKV[itemsize, max(H, 64)]


def find_missing_package(*packages: str) -> str | None:
    """A message that names the first package that is not installed, or None."""
    for package in packages:
        if find_spec(package) is None:
            return f"needs {package}: pip install {package}"
    return None


def triton_shape_unsupported(H: int, dtype: str) -> str | None:
    """The reason why the kernels do not support this head size or dtype, or None."""
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of {', '.join(DTYPES)}"
    return None if H in HEADS else f"head size {H} is not one of {', '.join(map(str, HEADS))}"


def negated_lengths(T: int, S: int) -> tuple[int, int]:
    """(minus_T, minus_S), the lengths as the kernels take them."""
    return -T, -S


def strides_in_units(*of_arrays: tuple[int, int, int]) -> tuple[int, ...]:
    """Batch, time and head strides in units of UNIT elements, from strides in elements."""
    flat = [x for strides_in_units in of_arrays for x in strides_in_units]
    if any(x % UNIT for x in flat):
        raise ValueError(
            f"strides of q, k and v must be multiples of {UNIT} elements; got {of_arrays}. "
            "Call .contiguous()."
        )
    return tuple(x // UNIT for x in flat)


def kernel_constants(
    K: int, G: int, H: int, window: int, scale: float, tiles: TritonTiles
) -> dict[str, Any]:
    """The kernels' compile-time constants by name. The scale must be above 0."""
    return dict(
        K=K,
        G=G,
        H=H,
        WINDOW=window,
        SCALE=scale,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
    )


def count_blocks(length: int, size: int) -> int:
    """Number of blocks of `size` that cover `length`, at least 1."""
    return max(1, -(-length // size))
