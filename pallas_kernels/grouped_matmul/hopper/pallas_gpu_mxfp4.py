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
which is what these kernels are there to avoid. Next: pallas_gpu_decode.py, codes to values.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.dispatch import gpu_cores
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_tiles as tiles
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_decode import PIECE, decode_piece
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_rows import Swiglu, consume, place
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4

_WG = hopper.WARPGROUP_ROWS
_ROWS = tiles.CONSUMERS * _WG
# Five warpgroups start with 96 registers a thread: no more than 5·96 in all may be asked for.
_PRODUCER_REGISTERS, _DECODER_REGISTERS, _CONSUMER_REGISTERS = 24, 40, 136
_STAGES = 4  # 44 KiB each: three in flight cover 2300 cycles, a trip to memory and the decoding
_SWIZZLED_32 = hopper.Tiling((8, GROUP)), hopper.Swizzle(64)  # two-byte tiles in rows of 32


class Mxfp4Plan(NamedTuple):
    """What is static of one kernel."""

    steps: int  # of the contraction
    columns: int  # of the result, or between its two column tiles
    width: int  # of a column tile
    transposed: bool  # the result's columns are the rows of the matrices
    swiglu: Swiglu | None
    interpret: bool

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
    rhs_EDF: Mxfp4,
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F"] | None,
    transposed: bool,
    interpret: bool,
) -> Float[Array, "M _"]:
    """out[m] = lhs[m] @ rhs[e of m] + bias[e of m], or with each matrix transposed."""
    _, D, F = rhs_EDF.shape
    if transposed:
        plan = Mxfp4Plan(F // tiles.STEP, D // 2, tiles.STEP, True, None, interpret)
    else:
        plan = Mxfp4Plan(D // (2 * GROUP), F, min(F, 2 * PIECE), False, None, interpret)
    return _run(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF)[0]


def packed_swiglu_by_group(
    lhs_MD: Float[Array, "M D"],
    rhs_EDF: Mxfp4,
    group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F2"] | None,
    swiglu: Swiglu,
    interpret: bool,
) -> tuple[Float[Array, "M _"], ...]:
    """The activated product [M, F] and, if it is to be saved, the product [M, 2F]."""
    _, D, F2 = rhs_EDF.shape
    plan = Mxfp4Plan(D // (2 * GROUP), F2 // 2, tiles.PIECE, False, swiglu, interpret)
    return tuple(_run(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF))


def _run(plan, lhs_MD, rhs_EDF, sizes_E, bias_EF):
    M, dtype = lhs_MD.shape[0], lhs_MD.dtype
    n_groups, D, _ = rhs_EDF.shape
    out_columns = D if plan.transposed else plan.columns
    lhs = tiles.pad_rows(lhs_MD, _ROWS)
    table, count = tiles.row_tiles(sizes_E, M, lhs.shape[0], _ROWS)
    # Group E, the rows past the sum, has a bias of 0 and no product.
    bias = () if bias_EF is None else (jnp.pad(bias_EF.astype(jnp.float32), ((0, 1), (0, 0))),)
    out_type = [jax.ShapeDtypeStruct((lhs.shape[0], out_columns), dtype)]
    if plan.swiglu and plan.swiglu.save:
        out_type.append(jax.ShapeDtypeStruct((lhs.shape[0], 2 * plan.columns), dtype))
    scales = rhs_EDF.scales_EDF.reshape(n_groups, 2, D // (2 * GROUP), -1)  # of either half
    C = plan.consumers
    if plan.transposed:
        shapes = dict(lhs=(1, _ROWS, tiles.STEP), rhs=(1, plan.total, tiles.STEP))
        packed = dict(codes=(1, plan.width, tiles.STEP), scales=(1, 2, 2, tiles.STEP))
        layout, leaving = hopper.swizzled(), _SWIZZLED_32  # D/2 + d need be no multiple of 64
    else:
        shapes = dict(lhs=(2, _ROWS, GROUP), rhs=(2, GROUP, plan.total))
        packed = dict(codes=(plan.parts, GROUP, plan.width), scales=(plan.parts, 2, 1, plan.width))
        layout, leaving = _SWIZZLED_32, hopper.swizzled()
    memory = {k: plgpu.SMEM((_STAGES, *v), dtype, transforms=layout) for k, v in shapes.items()}
    memory |= {k: plgpu.SMEM((_STAGES, *v), jnp.uint8) for k, v in packed.items()}
    piece = (C, _WG, tiles.PIECE)
    kernel = plgpu.kernel(
        partial(_packed_kernel, plan=plan, bias=bool(bias)),
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
        grid=(gpu_cores(),),
        grid_names=("core",),
        num_threads=C + 2,
        thread_name="warpgroup",
        kernel_name="grouped_swiglu_mxfp4" if plan.swiglu else "grouped_matmul_mxfp4",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=hopper.interpreter(plan.interpret),
    )
    outs = kernel(table, count, lhs, rhs_EDF.nibbles_EDF, scales, *bias)
    return outs if lhs is lhs_MD else [x[:M] for x in outs]


def _packed_kernel(table_ref, count_ref, lhs_ref, codes_ref, scales_ref, *refs, plan, bias):
    bias_ref, (*out_refs, s) = refs[0] if bias else None, refs[1:] if bias else refs
    n_rows, n_tiles = count_ref[0], count_ref[0] * plan.column_tiles
    warpgroup = lax.axis_index("warpgroup")
    where = partial(place, plan, table_ref, n_rows, codes_ref.shape[0])

    @pl.when(warpgroup == plan.consumers)
    def _producer():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        def one(tile, done):
            group, start, lo, hi, first, steps = where(tile)

            def fetch(k, slot):
                here, coded = s["here"].at[slot], s["coded"].at[slot]

                def copy(ref, at, name, i):
                    plgpu.copy_gmem_to_smem(ref.at[at], s[name].at[slot, i], coded)

                def copy_lhs(inner, i):
                    """Only of warpgroups with rows that count: a small group would wait for all."""
                    for before in range(0, _ROWS, _WG):
                        rows, some = pl.ds(before, _WG), (lo < before + _WG) & (hi > before)

                        @pl.when(some)
                        def _(before=before, rows=rows):
                            there = s["lhs"].at[slot, i, rows]
                            of = lhs_ref.at[pl.ds(start + before, _WG), inner]
                            plgpu.copy_gmem_to_smem(of, there, here)

                        @pl.when(jnp.logical_not(some))
                        def _():
                            plgpu.barrier_arrive(here)

                if plan.transposed:
                    inner, scaled = pl.ds(k * tiles.STEP, tiles.STEP), pl.ds(first // GROUP, 2)
                    copy(codes_ref, (group, pl.ds(first, plan.width), inner), "codes", 0)
                    copy(scales_ref, (group, slice(None), scaled, inner), "scales", 0)
                    copy_lhs(inner, 0)
                    return
                for part in range(plan.parts):
                    columns = pl.ds(first + part * plan.columns, plan.width)
                    at = (group, pl.ds(k * GROUP, GROUP), columns)
                    copy(codes_ref, at, "codes", part)
                    at = (group, slice(None), pl.ds(k, 1), columns)
                    copy(scales_ref, at, "scales", part)
                for half in range(2):
                    copy_lhs(pl.ds((half * plan.steps + k) * GROUP, GROUP), half)

            return tiles.produce(s, done, steps, fetch)

        tiles.drain(s, tiles.each_tile(n_tiles, one))

    @pl.when(warpgroup == plan.consumers + 1)
    def _decoder():
        plgpu.set_max_registers(_DECODER_REGISTERS, action="decrease")

        def one(tile, done):
            *_, steps = where(tile)

            def step(k, _):
                slot = tiles.slot_of(s, done + k)
                plgpu.barrier_wait(s["coded"].at[slot])
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
            (y,) = tiles.multiply(s, (plan.total,), done, steps, operands)
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
