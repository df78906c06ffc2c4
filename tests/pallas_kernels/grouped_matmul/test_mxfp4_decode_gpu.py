# SPDX-License-Identifier: Apache-2.0
"""Every byte under every scale, as the interpreter decodes it and as a warpgroup's registers do.

The integers that ship are run here: by the interpreter in jax.numpy, and by doubles of the dialects
that emit them, on the registers that a model of the layout gives each thread.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.hopper import mxfp4_decode, soft_bfloat16

BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS, COLUMNS, SCALES = 32, mxfp4_decode.PIECE, 256
# 8 pieces of 32 rows hold every byte once a column; 4 of 64 columns have every scale.
BYTES = np.arange(256, dtype=np.uint8).reshape(8, 1, ROWS, 1) + np.zeros((4, 1, COLUMNS), np.uint8)
SCALE = np.arange(SCALES, dtype=np.uint8).reshape(1, 4, COLUMNS) + np.zeros((8, 1, 1), np.uint8)


def table():
    """[scale, code]: OCP MX 1.0 by its formula in float64, rounded once; 255 is NaN."""
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scale = np.append(2.0 ** (np.arange(255) - 127), np.nan)
    with np.errstate(over="ignore"):
        return (scale[:, None] * np.append(sizes, -sizes)).astype(BF16)


def agree(actual, scale, code):
    actual, expected = np.asarray(actual), table()[scale, code]
    is_equal = actual.view(np.uint16) == expected.view(np.uint16)
    nothing = (actual.astype(np.float32) == 0) & (expected.astype(np.float32) == 0)  # −0 becomes 0
    undefined = np.isnan(actual.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    is_wrong = ~(is_equal | nothing | undefined)
    assert not is_wrong.any(), (
        f"{is_wrong.sum()}: {scale[is_wrong][:3]} {code[is_wrong][:3]} {actual[is_wrong][:3]}"
    )


@pytest.mark.parametrize("row", [32, 64])
def test_the_interpreter_decodes_every_code_and_scale(row):
    other = (SCALE.astype(int) + 77).astype(np.uint8)  # of the high half

    def piece(codes, low, high):
        return mxfp4_decode.decode_piece(codes, [low, high], row, True)

    actual = jax.jit(jax.vmap(jax.vmap(piece)))(BYTES, SCALE, other)
    halves = (SCALE, BYTES & 15), (other, BYTES >> 4)
    for half, (scale, code) in zip(actual, halves, strict=True):
        agree(half, *np.broadcast_arrays(scale[:, :, None, :], code))


class Kind(NamedTuple):
    """A vector type of the dialect."""

    shape: tuple[int, ...]
    element_type: np.dtype


class Vector(NamedTuple):
    """A vector of the dialect in many threads at once, its own axis the last."""

    x: np.ndarray

    @property
    def type(self) -> Kind:
        return Kind(self.x.shape[-1:], self.x.dtype)


def splat(kind, value):
    return Vector(np.full(kind.shape, np.int64(value)).astype(kind.element_type))


def shuffle(a, b, order):
    return Vector(np.concatenate(np.broadcast_arrays(a.x, b.x), axis=-1)[..., order])


@pytest.fixture
def dialects(monkeypatch):
    """MLIR's as far as `apply_byte_rule` uses them, on a little-endian machine as a GPU is."""
    doubles: dict[str, Any] = {
        "ir": SimpleNamespace(
            IntegerAttr=SimpleNamespace(get=lambda _, value: value),
            IntegerType=SimpleNamespace(get_signless=lambda bits: np.dtype(f"<u{bits // 8}")),
            BF16Type=SimpleNamespace(get=lambda: BF16),
            VectorType=SimpleNamespace(get=Kind),
            DenseElementsAttr=SimpleNamespace(get_splat=lambda _, value: value),
        ),
        "arith": SimpleNamespace(
            constant=splat, andi=lambda a, b: Vector(a.x & b.x), muli=lambda a, b: Vector(a.x * b.x)
        ),
        "vector": SimpleNamespace(
            shuffle=shuffle,
            bitcast=lambda kind, a: Vector(np.ascontiguousarray(a.x).view(kind.element_type)),
        ),
    }
    for name, double in doubles.items():
        monkeypatch.setattr(mxfp4_decode, name, double)


def owners(tiles, warp_dims, lane_dims):
    """[warp, lane, register, element of it]: which number of a piece, counted by rows.

    A tile splits each of the last axes in two, the outer ones first; some of what results are
    warps and lanes, the last is a register, the others are the registers of a thread.
    Source: the docstring of TiledLayout in jax/experimental/mosaic/gpu/fragmented_array.py.
    """
    x = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    for tile in tiles:
        lead, last = x.shape[: x.ndim - len(tile)], x.shape[x.ndim - len(tile) :]
        split = [n for size, t in zip(last, tile, strict=True) for n in (size // t, t)]
        x = x.reshape(*lead, *split)
        k, n = len(lead), len(tile)
        outer, inner = (range(k + i, k + 2 * n, 2) for i in (0, 1))
        x = x.transpose(*range(k), *outer, *inner)
    dims = [d % x.ndim for d in (*warp_dims, *lane_dims)]
    other_dims = [d for d in range(x.ndim - 1) if d not in dims]
    return x.transpose(*dims, *other_dims, x.ndim - 1).reshape(4, 32, -1, x.shape[-1])


def registers_of(row):
    return owners(mxfp4_decode._TILES[row], mxfp4_decode._WARPS[row], (-3, -2))


@pytest.mark.parametrize("row", [32, 64])
def test_registers_decode_every_code_under_every_scale(dialects, row):
    positions = registers_of(row)
    assert np.array_equal(np.sort(positions.ravel()), np.arange(ROWS * COLUMNS))  # each number once
    codes = BYTES.reshape(8, 4, -1)[..., positions]
    assert codes.shape == (8, 4, 4, 32, 4, 4)  # pieces; warps, lanes; 4 registers of 4 bytes
    # a thread has the scales of its own columns, the same in each of its registers
    column = positions % COLUMNS
    assert (column == column[:, :, :1]).all()
    scales = SCALE[..., column[:, :, 0]]
    by_column = mxfp4_decode.apply_byte_rule(mxfp4_decode.SCALE, Vector(scales)).x
    arithmetic = jax.jit(lambda x, scale: mxfp4_decode._rescale(x, scale, None, soft_bfloat16))
    for rule, code in ((mxfp4_decode.LOW, codes & 15), (mxfp4_decode.HIGH, codes >> 4)):
        values = mxfp4_decode.apply_byte_rule(rule, Vector(codes)).x
        for first in range(8):  # back in order, and scaled as every piece is
            for second in range(4):
                piece, scale = np.empty(ROWS * COLUMNS, BF16), np.empty(COLUMNS, BF16)
                piece[positions] = values[first, second]
                scale[column[:, :, 0]] = by_column[first, second]
                actual = np.asarray(arithmetic(piece.reshape(ROWS, COLUMNS), scale))
                expected = np.empty(ROWS * COLUMNS, np.uint8)
                expected[positions] = code[first, second]
                agree(
                    actual, *np.broadcast_arrays(SCALE[first, second], expected.reshape(ROWS, -1))
                )


@pytest.mark.parametrize("row", [32, 64])
def test_sixteen_threads_store_128_bytes_in_order(row):
    """Without bank conflicts, whatever the swizzle does within them; tiles are 8 rows high."""
    rows, columns = np.divmod(registers_of(row), COLUMNS)
    tile = rows // 8 * (COLUMNS // row) + columns // row
    byte = 2 * (tile * 8 * row + rows % 8 * row + columns % row)
    merged = np.sort(byte.reshape(4, 2, 16, -1, 4).transpose(0, 1, 3, 2, 4).reshape(-1, 64))
    assert (np.diff(merged) == 2).all() and (merged[:, 0] % 128 == 0).all()


def test_soft_bfloat16_multiplies_as_float64_rounded_once():
    all_products = np.arange(1 << 16, dtype=np.uint16)
    multiply, rng = jax.jit(soft_bfloat16.multiply), np.random.default_rng(0)
    for turn in range(8):
        a, b = rng.permutation(all_products), rng.permutation(all_products)
        if turn % 2:  # near 1: subnormals stay and ties are met
            b = b & 0x80FF | 0x3F00
        a, b = a.view(BF16), b.view(BF16)
        with np.errstate(all="ignore"):
            expected = (a.astype(np.float64) * b.astype(np.float64)).astype(BF16)
        actual = np.asarray(multiply(jnp.asarray(a), jnp.asarray(b)))
        undefined = np.isnan(expected.astype(np.float32))
        assert np.isnan(actual[undefined].astype(np.float32)).all()
        np.testing.assert_array_equal(
            actual.view(np.uint16)[~undefined], expected.view(np.uint16)[~undefined]
        )
