# SPDX-License-Identifier: Apache-2.0
"""Rows times their group's four-bit matrix on Hopper: the forward pass, dlhs, the fused SwiGLU.

As `pallas_gpu_rows.py`, with one warpgroup more. It turns each tile of codes into bfloat16 tiles in
shared memory, once for the three warpgroups that multiply and up to three steps ahead of them:
tensor cores read their right operand from nowhere else. A byte holds rows d and D/2 + d of a
matrix. Where rows are summed over, a step takes 32 of both halves of the rows, and of both halves
of lhs' columns; where they are columns of the result (dlhs), a tile is 64 of them and the 64 that
are half a matrix further.

The regime: every tile of 192 rows decodes its codes again. A step of decoding is 242 instructions a
warp, its products take the tensor cores 768 cycles: by that count, which no chip has confirmed,
groups of 192 rows hide it and groups of 64 or fewer wait for it. Decoding to device memory would
save it for groups of many tiles at the price of all the weights in bfloat16, 3.8 times their bytes,
which is what these kernels are there to avoid.

Codes become bfloat16 in registers, 3.8 instructions for each value. Mosaic turns operations on
small integers into many on single values. Here pairs of neighbouring bytes become 32-bit words, so
that one integer operation serves two values, and what scales them is bfloat16 arithmetic, two
values an instruction, which keeps subnormals. The interpreter runs the same integers, and
soft_bfloat16.py for that arithmetic. Next: pallas_gpu_tiles.py.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.dispatch import count_gpu_cores
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_tiles as tiles
from pallas_kernels.grouped_matmul.hopper import soft_bfloat16
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_rows import (
    Swiglu,
    consume,
    either,
    padded_beside,
    place,
    split_beside,
    steps_of,
)
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4, Mxfp4Part, split_part

_WG = hopper.WARPGROUP_ROWS
_ROWS = tiles.CONSUMERS * _WG
# Five warpgroups start with 96 registers a thread: no more than 5·96 in all may be asked for.
_PRODUCER_REGISTERS, _DECODER_REGISTERS, _CONSUMER_REGISTERS = 24, 40, 136
_STAGES = 4  # 44 KiB each: three in flight cover 2300 cycles, a trip to memory and the decoding
_SWIZZLED_32 = hopper.Tiling((8, GROUP)), hopper.Swizzle(64)  # two-byte tiles in rows of 32

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


class Mxfp4Plan(NamedTuple):
    """What is static of one kernel."""

    steps: int  # of the contraction
    columns: int  # of the result, or between its two column tiles
    width: int  # of a column tile
    transposed: bool  # the result's columns are the rows of the matrices
    swiglu: Swiglu | None
    interpret: bool
    narrow: int = 0  # steps more, of what stands beside the matrices

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return tiles.CONSUMERS

    @property
    def column_tiles(self) -> int:
        """Tiles or pairs of tiles."""
        return pl.cdiv(self.columns, self.width)

    @property
    def parts(self) -> int:
        """Column tiles that one tile of rows makes at once: gate and up, or both of a byte's."""
        return 2 if self.swiglu or self.transposed else 1

    @property
    def total(self) -> int:
        """Columns of a product."""
        return self.parts * self.width


def packed_rows_by_group(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Mxfp4 | Mxfp4Part,
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F"] | None,
    transposed: bool,
    interpret: bool,
    beside: tuple[Array, ...] = (),
) -> Float[Array, "M _"]:
    """out[m] = lhs[m] @ rhs[e of m] + bias[e of m], or with each matrix transposed.

    `beside` = (low_MR, b_ERF), R a multiple of STEP, adds low[m] @ b[e of m] in the accumulators.
    """
    (_, D, F), more = rhs_EDF.shape, steps_of(beside)
    if transposed:
        plan = Mxfp4Plan(F // tiles.STEP, D // 2, tiles.STEP, True, None, interpret, more)
    else:
        plan = Mxfp4Plan(D // (2 * GROUP), F, min(F, 2 * PIECE), False, None, interpret, more)
    return _run(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, beside)[0]


def packed_swiglu_by_group(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Mxfp4 | Mxfp4Part,
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F2"] | None,
    swiglu: Swiglu,
    interpret: bool,
    beside: tuple[Array, ...] = (),
) -> tuple[Float[Array, "M _"], ...]:
    """The activated product [M, F] and, if it is to be saved, the product [M, 2F].

    `beside` is as that of `packed_rows_by_group`.
    """
    (_, D, F2), more = rhs_EDF.shape, steps_of(beside)
    plan = Mxfp4Plan(D // (2 * GROUP), F2 // 2, tiles.PIECE, False, swiglu, interpret, more)
    return tuple(_run(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, beside))


def _run(plan, lhs_MD, rhs_EDF, sizes_E, bias_EF, beside):
    rhs_EDF, matrix = split_part(rhs_EDF)
    M, dtype = lhs_MD.shape[0], lhs_MD.dtype
    held, D, _ = rhs_EDF.shape
    out_columns = D if plan.transposed else plan.columns
    lhs = tiles.pad_rows(lhs_MD, _ROWS)
    beside = padded_beside(beside, _ROWS, plan.transposed)
    if beside and plan.swiglu:  # a tile's columns of gate and of up stand side by side
        low, b = beside
        b = b.reshape(*b.shape[:2], 2, -1, plan.width).swapaxes(2, 3).reshape(b.shape)
        beside = low, b
    table, count = tiles.row_tiles(sizes_E, M, lhs.shape[0], _ROWS)
    # Group E, the rows past the sum, has a bias of 0 and no product.
    bias = () if bias_EF is None else (jnp.pad(bias_EF.astype(jnp.float32), ((0, 1), (0, 0))),)
    out_type = [jax.ShapeDtypeStruct((lhs.shape[0], out_columns), dtype)]
    if plan.swiglu and plan.swiglu.save:
        out_type.append(jax.ShapeDtypeStruct((lhs.shape[0], 2 * plan.columns), dtype))
    if matrix is not None:
        count = jnp.append(count, matrix.astype(jnp.int32))
    scales = rhs_EDF.scales_EDF.reshape(held, 2, D // (2 * GROUP), -1)  # of either half
    C = plan.consumers
    if plan.transposed:
        shapes = dict(lhs=(1, _ROWS, tiles.STEP), rhs=(1, plan.total, tiles.STEP))
        packed = dict(codes=(1, plan.width, tiles.STEP), scales=(1, 2, 2, tiles.STEP))
        layout, leaving = (
            hopper.swizzle_transforms(),
            _SWIZZLED_32,
        )  # D/2 + d need be no multiple of 64
    else:
        shapes = dict(lhs=(2, _ROWS, GROUP), rhs=(2, GROUP, plan.total))
        packed = dict(codes=(plan.parts, GROUP, plan.width), scales=(plan.parts, 2, 1, plan.width))
        layout, leaving = _SWIZZLED_32, hopper.swizzle_transforms()
    memory = {k: plgpu.SMEM((_STAGES, *v), dtype, transforms=layout) for k, v in shapes.items()}
    memory |= {k: plgpu.SMEM((_STAGES, *v), jnp.uint8) for k, v in packed.items()}
    piece = (C, _WG, tiles.PIECE)
    kernel = plgpu.kernel(
        partial(_packed_kernel, plan=plan, n_groups=sizes_E.shape[0], bias=bool(bias)),
        out_type=out_type,
        scratch_types=[
            dict(
                memory,
                whole=plgpu.SMEM((1, *piece), dtype, transforms=leaving),
                part=plgpu.SMEM(piece, dtype),
                coded=plgpu.Barrier(num_arrivals=2 * packed["codes"][0], num_barriers=_STAGES),
                here=plgpu.Barrier(num_arrivals=C * shapes["lhs"][0] + 1, num_barriers=_STAGES),
                free=plgpu.Barrier(num_arrivals=C, num_barriers=_STAGES),
            )
        ],
        grid=(count_gpu_cores(),),
        grid_names=("core",),
        num_threads=C + 2,
        thread_name="warpgroup",
        kernel_name="grouped_swiglu_mxfp4" if plan.swiglu else "grouped_matmul_mxfp4",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpret_params(plan.interpret),
    )
    outs = kernel(table, count, lhs, rhs_EDF.nibbles_EDF, scales, *beside, *bias)
    return outs if lhs is lhs_MD else [x[:M] for x in outs]


def _packed_kernel(
    table_ref, count_ref, lhs_ref, codes_ref, scales_ref, *refs, plan, n_groups, bias
):
    beside, refs = split_beside(plan, refs)
    bias_ref, (*out_refs, s) = refs[0] if bias else None, refs[1:] if bias else refs
    n_rows, n_tiles = count_ref[0], count_ref[0] * plan.column_tiles
    warpgroup = lax.axis_index("warpgroup")
    where, ring = partial(place, plan, table_ref, n_rows, n_groups), tiles.ring_of(s)

    @pl.when(warpgroup == plan.consumers)
    def _producer():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        def one(tile, done):
            group, start, lo, hi, first, steps = where(tile)
            matrix = group + count_ref[1] if count_ref.shape[0] == 2 else group

            def copy_lhs(ref, inner, slot, i):
                """Only of warpgroups with rows that count: a small group would wait for all."""
                here = s["here"].at[slot]
                for before in range(0, _ROWS, _WG):
                    rows, some = pl.ds(before, _WG), (lo < before + _WG) & (hi > before)

                    @pl.when(some)
                    def _(before=before, rows=rows):
                        there = s["lhs"].at[slot, i, rows]
                        of = ref.at[pl.ds(start + before, _WG), inner]
                        plgpu.copy_gmem_to_smem(of, there, here)

                    @pl.when(jnp.logical_not(some))
                    def _():
                        plgpu.barrier_arrive(here)

            def copy(source, to, slot):
                plgpu.copy_gmem_to_smem(source, to, s["coded"].at[slot])

            def fetch(k, slot):
                codes, scales = s["codes"].at[slot], s["scales"].at[slot]
                if plan.transposed:
                    inner, scaled = pl.ds(k * tiles.STEP, tiles.STEP), pl.ds(first // GROUP, 2)
                    rows = pl.ds(first, plan.width)
                    copy(codes_ref.at[matrix, rows, inner], codes.at[0], slot)
                    copy(scales_ref.at[matrix, :, scaled, inner], scales.at[0], slot)
                    copy_lhs(lhs_ref, inner, slot, 0)
                    return
                for part in range(plan.parts):
                    columns = pl.ds(first + part * plan.columns, plan.width)
                    rows, scaled = pl.ds(k * GROUP, GROUP), pl.ds(k, 1)
                    copy(codes_ref.at[matrix, rows, columns], codes.at[part], slot)
                    copy(scales_ref.at[matrix, :, scaled, columns], scales.at[part], slot)
                for half in range(2):
                    inner = pl.ds((half * plan.steps + k) * GROUP, GROUP)
                    copy_lhs(lhs_ref, inner, slot, half)

            def fetch_narrow(k, slot):
                """What it brings needs no decoding; `coded` has as many arrivals as by `fetch`."""
                low_ref, b_ref = beside
                if plan.transposed:
                    inner = pl.ds(k * tiles.STEP, tiles.STEP)
                    for part in range(plan.parts):
                        columns = pl.ds(first + part * plan.columns, plan.width)
                        mine = pl.ds(part * plan.width, plan.width)
                        copy(b_ref.at[group, columns, inner], s["rhs"].at[slot, 0, mine], slot)
                    copy_lhs(low_ref, inner, slot, 0)
                    return
                for half in range(2):
                    inner = pl.ds(k * tiles.STEP + half * GROUP, GROUP)
                    columns = pl.ds(first * plan.parts, plan.total)
                    copy(b_ref.at[group, inner, columns], s["rhs"].at[slot, half], slot)
                    copy_lhs(low_ref, inner, slot, half)
                for _ in range(2 * plan.parts - 2):
                    plgpu.barrier_arrive(s["coded"].at[slot])

            return tiles.produce(ring, done, steps, either(plan, fetch, fetch_narrow))

        ring.drain(tiles.each_tile(n_tiles, one))

    @pl.when(warpgroup == plan.consumers + 1)
    def _decoder():
        plgpu.set_max_registers(_DECODER_REGISTERS, action="decrease")

        def one(tile, done):
            *_, steps = where(tile)

            def step(k, _):
                slot = ring.slot_of(done + k)
                plgpu.barrier_wait(s["coded"].at[slot])
                if plan.narrow:
                    pl.when(k < plan.steps)(lambda: _decode(s, plan, slot))
                else:
                    _decode(s, plan, slot)
                plgpu.commit_smem()
                plgpu.barrier_arrive(s["here"].at[slot])
                return None

            lax.fori_loop(0, steps, step, None)
            return done + steps

        tiles.each_tile(n_tiles, one)

    @pl.when(warpgroup < plan.consumers)
    def _consumer():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        mine = pl.ds(warpgroup * _WG, _WG)

        def operands(_, slot):
            rhs = [s["rhs"].at[slot, i] for i in range(s["rhs"].shape[1])]
            rhs = [x.transpose((1, 0)) for x in rhs] if plan.transposed else rhs
            return [(s["lhs"].at[slot, i, mine], x) for i, x in enumerate(rhs)]

        def multiply(done, steps):
            (y,) = ring.multiply_steps((plan.total,), done, steps, operands)
            return [y[:, i : i + plan.width] for i in range(0, plan.total, plan.width)]

        consume(s, plan, where, n_tiles, multiply, bias_ref, out_refs)


def _decode(s, plan, slot):
    """A step's codes, 32 rows and 64 columns at a time, to its tiles of the right operand."""
    n_parts, height, width = s["codes"].shape[1:]
    row_of = tiles.STEP if plan.transposed else GROUP
    for part in range(n_parts):
        for row in range(0, height, GROUP):
            for column in range(0, width, PIECE):
                rows, columns = pl.ds(row, GROUP), pl.ds(column, PIECE)
                scales = [
                    s["scales"].at[slot, part, half, row // GROUP, columns] for half in (0, 1)
                ]
                codes = s["codes"].at[slot, part, rows, columns]
                values = decode_piece(codes, scales, row_of, plan.interpret)
                for half, value in enumerate(values):
                    if plan.transposed:
                        at = (slot, 0, pl.ds(half * height + row, GROUP), columns)
                    else:
                        at = (slot, half, rows, pl.ds(part * width + column, PIECE))
                    s["rhs"][at] = value


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
    scale, nothing = (
        hopper.broadcast_along(by_column, (GROUP, PIECE), 1) for by_column in (scale, nothing)
    )
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
