# SPDX-License-Identifier: Apache-2.0
"""Four-bit codes become bfloat16 in a Hopper's registers.

A value takes 3.8 instructions. Mosaic compiles operations on small integers to many operations on
single values. Here pairs of neighbouring bytes become 32-bit words, so that one integer operation
serves two values; the scaling is bfloat16 arithmetic, two values an instruction, which keeps
subnormals. The interpreter runs the same integer operations. Next: soft_bfloat16.py, which it uses
for the arithmetic.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxtyping import Array

from pallas_kernels import hopper
from pallas_kernels.grouped_matmul.hopper import soft_bfloat16
from pallas_kernels.grouped_matmul.mxfp4 import GROUP

PIECE = 64  # columns decoded at once, of 32 rows
# A thread has 4 columns of 4 rows. The assignment depends on the columns in a row of a swizzled
# tile, so that the 16 threads that store at once write 128 consecutive bytes.
_TILES = {32: ((8, PIECE), (4, 32), (4,)), 64: ((8, PIECE), (2, 64), (4,))}
_WARPS = {32: (-5, -4), 64: (-5,)}
_CODES: dict[int, Any] = {
    row: plgpu.Layout.TILED(
        plgpu.Tiling(_TILES[row]), warp_dims=_WARPS[row], lane_dims=(-3, -2), vector_dim=-1
    )
    for row in _TILES
}

# (in_mask, factor, out_mask): (byte & in_mask) · factor & out_mask are a bfloat16's bits, without
# overflow. A code's sign goes to bit 15, its magnitude to bits 6–8: fp4(code) · 2^−126.
LOW = (0x000F, 0x1040, 0x81C0)
HIGH = (0x00F0, 0x0104, 0x81C0)
SCALE = (0x00FF, 0x0080, 0x7F80)  # 2^(s − 127); s = 0 gives 0 and 255 gives infinity


def decode_step(s: Any, plan: Any, code_slot: Any, slot: Any) -> None:
    """Decode a step's codes to its tiles of rhs, 32 rows and 64 columns at a time."""
    parts, height, width = s["codes"].shape[1:]
    row_of = PIECE if plan.transposed else GROUP
    decoded = []
    for part in range(parts):
        for row in range(0, height, GROUP):
            for column in range(0, width, PIECE):
                rows, columns = pl.ds(row, GROUP), pl.ds(column, PIECE)
                scales = [
                    s["scales"].at[code_slot, part, half, row // GROUP, columns] for half in (0, 1)
                ]
                codes = s["codes"].at[code_slot, part, rows, columns]
                values = decode_piece(codes, scales, row_of, plan.interpret)
                for half, value in enumerate(values):
                    if plan.transposed:
                        index = (slot, 0, pl.ds(half * height + row, GROUP), columns)
                    else:
                        index = (slot, half, rows, pl.ds(part * width + column, PIECE))
                    decoded.append((s["rhs"].at[index], value))
    # Behind all loads, since a load does not move before a store.
    for ref, value in decoded:
        store_piece(ref, value, row_of, plan.interpret)


def decode_piece(codes_ref: Any, scale_refs: Any, row: int, interpret: bool) -> tuple[Array, Array]:
    """Decode the low and the high halves of bytes [32, 64], each half with its scales [64].

    The values are laid out for tiles whose swizzled rows have `row` columns.
    Numerics: exact, subnormals included; infinite past the largest value; scale 255 gives NaN.
    """
    if interpret:
        values = _interpret_byte_rules(codes_ref[...], (LOW, HIGH))
        scales = [_interpret_byte_rules(x[...], (SCALE,))[0] for x in scale_refs]
        low, high = (_rescale(*x, None, soft_bfloat16) for x in zip(values, scales, strict=True))
        return low, high
    layout, by_column = _CODES[row], _CODES[row].reduce(0)
    values = _convert_bytes(hopper.load_slice(codes_ref, (), layout), (LOW, HIGH), layout)
    scales = (
        _convert_bytes(hopper.load_slice(x, (), by_column), (SCALE,), by_column)[0]
        for x in scale_refs
    )
    low, high = (_rescale(x, s, layout, jnp) for x, s in zip(values, scales, strict=True))
    return low, high


def store_piece(ref: Any, value: Array, row: int, interpret: bool) -> None:
    """Store a decoded piece to its place in a tile whose swizzled rows have `row` columns.

    Without the barriers of all four warps that Mosaic puts before and after a store: whoever
    overwrites or reads the tile waits for a barrier that comes behind all stores of a step.
    """
    if interpret:
        ref[...] = value
        return
    swizzle = 2 * row
    kind = plgpu.RefType((hopper.Tiling((8, row)), hopper.Swizzle(swizzle)))

    def store(_, ref, x):
        x.store_tiled(ref, swizzle=swizzle)

    inlined: Any = plgpu.inline_mgpu(arg_types=(kind, _CODES[row]))(store)
    inlined(ref, value)


def _rescale(x: Array, scale: Array, layout: Any, arithmetic: Any) -> Array:
    """x · 2^126 · scale, by column, with x and scale as the byte rules make them."""
    scale = arithmetic.maximum(scale, jnp.bfloat16(2.0**-127))  # byte 0 means 2^−127, not 0
    nan_mask = arithmetic.multiply(scale, jnp.bfloat16(0.0))  # NaN where scale is infinite
    scale, nan_mask = (
        hopper.broadcast_along(by_column, (GROUP, PIECE), 1) for by_column in (scale, nan_mask)
    )
    if layout is not None:
        scale, nan_mask = (plgpu.layout_cast(by_row, layout) for by_row in (scale, nan_mask))
    x = arithmetic.multiply(x, jnp.bfloat16(2.0**126))
    return arithmetic.add(arithmetic.multiply(x, scale), nan_mask)


def _convert_bytes(
    x: Array, rules: tuple[tuple[int, int, int], ...], layout: Any
) -> tuple[Array, ...]:
    """Convert bytes to bfloat16, once by each of the rules."""

    def convert(_, x):
        outs = []
        for rule in rules:
            registers = np.empty(x.registers.shape, dtype=object)
            for index, register in np.ndenumerate(x.registers):
                registers[index] = apply_byte_rule(rule, register)
            outs.append(
                mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
            )
        return tuple(outs)

    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, layout=layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=(kind,) * len(rules))(convert)
    return inlined(x)


def apply_byte_rule(rule: tuple[int, int, int], register: Any) -> Any:
    """Convert a register of bytes to one of as many bfloat16, two values per operation."""

    def splat_constant(kind, value):
        value = ir.IntegerAttr.get(kind.element_type, value)
        return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, value))

    n = register.type.shape[0]
    words = ir.VectorType.get((n // 2,), ir.IntegerType.get_signless(32))
    # A zero after each byte, so that a 32-bit word holds two values of 16 bits.
    zeros = splat_constant(register.type, 0)
    pairs = vector.shuffle(register, zeros, [j for i in range(n) for j in (i, n + i)])
    in_mask, factor, out_mask = (splat_constant(words, value) for value in _widen_rule(rule))
    pairs = arith.andi(vector.bitcast(words, pairs), in_mask)
    pairs = arith.andi(arith.muli(pairs, factor), out_mask)
    return vector.bitcast(ir.VectorType.get((n,), ir.BF16Type.get()), pairs)


def _interpret_byte_rules(x: Array, rules: tuple[tuple[int, int, int], ...]) -> list[Array]:
    """`apply_byte_rule` in the interpreter: the same integer operations on the same words."""
    two = x.astype(jnp.int32).reshape(*x.shape[:-1], -1, 2)
    pairs = two[..., 0] | two[..., 1] << 16
    words = (
        (pairs & in_mask) * factor & out_mask
        for in_mask, factor, out_mask in (_widen_rule(x) for x in rules)
    )
    return [lax.bitcast_convert_type(word, jnp.bfloat16).reshape(x.shape) for word in words]


def _widen_rule(rule: tuple[int, int, int]) -> tuple[int, int, int]:
    """The rule for 32-bit words of two values: both masks repeated."""
    in_mask, factor, out_mask = rule
    return _repeat_half(in_mask), factor, _repeat_half(out_mask)


def _repeat_half(half: int) -> int:
    """A signed 32-bit word whose two halves are `half`."""
    return int(np.uint32(half * 0x10001).astype(np.int32))
