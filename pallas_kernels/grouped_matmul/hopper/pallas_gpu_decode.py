# SPDX-License-Identifier: Apache-2.0
"""Four-bit codes to bfloat16 in a warpgroup's registers, 3.8 instructions for each value.

Mosaic turns operations on small integers into many on single values. Here pairs of neighbouring
bytes become 32-bit words, so that one integer operation serves two values, and what scales them is
bfloat16 arithmetic, two values an instruction, which keeps subnormals. The interpreter runs the
same integers, and soft_bfloat16.py for that arithmetic. Next: pallas_gpu_tiles.py.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxtyping import Array

from pallas_kernels import hopper
from pallas_kernels.grouped_matmul.hopper import soft_bfloat16
from pallas_kernels.grouped_matmul.mxfp4 import GROUP

PIECE = 64  # columns decoded at once, of 32 rows
# A thread has 4 columns of 4 rows. Which ones depends on how many columns a row of a swizzled tile
# has, so that the 16 threads that store at once write 128 bytes in a row.
_TILES = {32: ((8, PIECE), (4, 32), (4,)), 64: ((8, PIECE), (2, 64), (4,))}
_WARPS = {32: (-5, -4), 64: (-5,)}
_CODES: dict[int, Any] = {
    row: plgpu.Layout.TILED(
        plgpu.Tiling(_TILES[row]), warp_dims=_WARPS[row], lane_dims=(-3, -2), vector_dim=-1
    )
    for row in _TILES
}

# (byte & keep) · factor & then, of 16 bits: a bfloat16 from a byte, no product overflows.
# A code's sign goes to bit 15 and its size to bits 6–8, which makes it fp4(code) · 2^−126.
LOW = (0x000F, 0x1040, 0x81C0)
HIGH = (0x00F0, 0x0104, 0x81C0)
SCALE = (0x00FF, 0x0080, 0x7F80)  # 2^(s − 127); 0 and 255 are 0 and infinite


def decode_piece(codes_ref: Any, scale_refs: Any, row: int, interpret: bool) -> tuple[Array, Array]:
    """The values [32, 64] of the low and of the high half of bytes, each with its scales [64].

    They are for tiles whose swizzled rows have `row` columns.
    Numerics: exact, subnormals included; infinite past the largest value; scale 255 gives NaN.
    """
    if interpret:
        values = _interpreted(codes_ref[...], (LOW, HIGH))
        scales = [_interpreted(x[...], (SCALE,))[0] for x in scale_refs]
        low, high = (_scaled(*x, None, soft_bfloat16) for x in zip(values, scales, strict=True))
        return low, high
    layout, by_column = _CODES[row], _CODES[row].reduce(0)
    values = _from_bytes(hopper.load_slice(codes_ref, (), layout), (LOW, HIGH), layout)
    scales = (
        _from_bytes(hopper.load_slice(x, (), by_column), (SCALE,), by_column)[0] for x in scale_refs
    )
    low, high = (_scaled(x, s, layout, jnp) for x, s in zip(values, scales, strict=True))
    return low, high


def _scaled(x: Array, scale: Array, layout: Any, arithmetic: Any) -> Array:
    """x · 2^126 · scale, by column, both as the rules make them."""
    scale = arithmetic.maximum(scale, jnp.bfloat16(2.0**-127))  # 0 is a scale too
    nothing = arithmetic.multiply(scale, jnp.bfloat16(0.0))  # NaN of an infinite one
    scale, nothing = (hopper.spread(by_column, (GROUP, PIECE), 1) for by_column in (scale, nothing))
    if layout is not None:
        scale, nothing = (plgpu.layout_cast(by_row, layout) for by_row in (scale, nothing))
    x = arithmetic.multiply(x, jnp.bfloat16(2.0**126))
    return arithmetic.add(arithmetic.multiply(x, scale), nothing)


def _from_bytes(
    x: Array, rules: tuple[tuple[int, int, int], ...], layout: Any
) -> tuple[Array, ...]:
    """Bytes to bfloat16 by each of the rules."""

    def run(_, x):
        outs = []
        for rule in rules:
            registers = np.empty(x.registers.shape, dtype=object)
            for at, register in np.ndenumerate(x.registers):
                registers[at] = by_rule(rule, register)
            outs.append(
                mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
            )
        return tuple(outs)

    kind = plgpu.ShapeDtypeStruct(x.shape, jnp.bfloat16, layout=layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=(kind,) * len(rules))(run)
    return inlined(x)


def by_rule(rule: tuple[int, int, int], register: Any) -> Any:
    """A register of bytes to one of as many bfloat16, two in each operation."""

    def splat(kind, value):
        value = ir.IntegerAttr.get(kind.element_type, value)
        return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, value))

    n = register.type.shape[0]
    words = ir.VectorType.get((n // 2,), ir.IntegerType.get_signless(32))
    # A zero after each byte: a word holds two of 16 bits.
    zeros = splat(register.type, 0)
    pairs = vector.shuffle(register, zeros, [j for i in range(n) for j in (i, n + i)])
    keep, factor, then = (splat(words, value) for value in _for_two(rule))
    pairs = arith.andi(vector.bitcast(words, pairs), keep)
    pairs = arith.andi(arith.muli(pairs, factor), then)
    return vector.bitcast(ir.VectorType.get((n,), ir.BF16Type.get()), pairs)


def _interpreted(x: Array, rules: tuple[tuple[int, int, int], ...]) -> list[Array]:
    """`by_rule` of neighbouring bytes, the same words by the same integers."""
    two = x.astype(jnp.int32).reshape(*x.shape[:-1], -1, 2)
    pairs = two[..., 0] | two[..., 1] << 16
    words = ((pairs & keep) * factor & then for keep, factor, then in (_for_two(x) for x in rules))
    return [lax.bitcast_convert_type(word, jnp.bfloat16).reshape(x.shape) for word in words]


def _for_two(rule: tuple[int, int, int]) -> tuple[int, int, int]:
    """A rule for words of two halves."""
    keep, factor, then = rule
    return _both(keep), factor, _both(then)


def _both(half: int) -> int:
    """A 32-bit word, signed, of two equal halves."""
    return int(np.uint32(half * 0x10001).astype(np.int32))
