# SPDX-License-Identifier: Apache-2.0
"""Rows times their group's four-bit matrix on Hopper: the forward pass, dlhs, the fused SwiGLU.

These kernels are those of `pallas_gpu_rows.py` with one more warpgroup, the decoder. It decodes
each tile of codes to bfloat16 tiles in shared memory, once for the three warpgroups that multiply
and up to three steps ahead of them, because tensor cores read their right operand only from shared
memory. A byte holds rows d and D/2 + d of a matrix. In the forward pass the rows are summed over: a
step takes 32 rows from each half, and the matching columns of lhs. In dlhs the rows are columns of
the result: a tile is 64 of them and the 64 that are half a matrix further.

Cost: every tile of 192 rows decodes its codes again. A step of decoding takes 242 instructions a
warp, and its products take the tensor cores 768 cycles. By this count, not measured on a GPU,
groups of 192 rows hide the decoding and groups of 64 or fewer wait for it. Decoding to device
memory would avoid the repetition, but would need all weights in bfloat16, 3.8 times their bytes,
which is what these kernels avoid.

Next: mxfp4_decode.py.
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
from pallas_kernels.dispatch import count_gpu_cores
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_tiles as tiles
from pallas_kernels.grouped_matmul.hopper.mxfp4_decode import PIECE, decode_piece
from pallas_kernels.grouped_matmul.hopper.pallas_gpu_rows import (
    Swiglu,
    consume_tiles,
    count_adapter_steps,
    locate_tile,
    pad_adapter,
    select_fetch,
    split_adapter_refs,
)
from pallas_kernels.grouped_matmul.mxfp4 import GROUP, Mxfp4, Mxfp4Part, split_part

_WG = hopper.WARPGROUP_ROWS
_ROWS = tiles.CONSUMERS * _WG
# Five warpgroups start with 96 registers a thread, so their total may not exceed 5·96.
_PRODUCER_REGISTERS, _DECODER_REGISTERS, _CONSUMER_REGISTERS = 24, 40, 136
# A stage has 44 KiB. Three in flight cover 2300 cycles: the latency of memory and the decoding.
_STAGES = 4
_SWIZZLED_32 = hopper.Tiling((8, GROUP)), hopper.Swizzle(64)  # two-byte tiles in rows of 32


class Mxfp4Plan(NamedTuple):
    """The static parameters of one kernel."""

    steps: int  # of the contraction
    columns: int  # of the result, or the distance between its two column tiles
    width: int  # of a column tile
    transposed: bool  # the result's columns are the rows of the matrices
    swiglu: Swiglu | None
    interpret: bool
    adapter_steps: int = 0  # further steps of the contraction, over the adapter's rank

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return tiles.CONSUMERS

    @property
    def column_tiles(self) -> int:
        """Column tiles of the result, or pairs of them."""
        return pl.cdiv(self.columns, self.width)

    @property
    def parts(self) -> int:
        """Column tiles computed together: gate and up, or the two halves of the bytes."""
        return 2 if self.swiglu or self.transposed else 1

    @property
    def product_columns(self) -> int:
        """Columns of a product: those of all its column tiles."""
        return self.parts * self.width


def multiply_rows_mxfp4_hopper(
    lhs_MD: Float[Array, "M D"], rhs_EDF: Mxfp4 | Mxfp4Part, group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F"] | None, transposed: bool, interpret: bool,
    adapter: tuple[Array, ...] = (),
) -> Float[Array, "M _"]:  # fmt: skip
    """out[m] = lhs[m] @ rhs[e of m] + bias[e of m], or with each matrix transposed.

    `adapter` = (low_MR, b_ERF), R a multiple of STEP, adds low[m] @ b[e of m] to the accumulators.
    """
    (_, D, F), extra = rhs_EDF.shape, count_adapter_steps(adapter)
    if transposed:
        plan = Mxfp4Plan(F // tiles.STEP, D // 2, tiles.STEP, True, None, interpret, extra)
    else:
        plan = Mxfp4Plan(D // (2 * GROUP), F, min(F, 2 * PIECE), False, None, interpret, extra)
    return _run_packed_kernel(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter)[0]


def multiply_swiglu_mxfp4_hopper(
    lhs_MD: Float[Array, "M D"], rhs_EDF: Mxfp4 | Mxfp4Part, group_sizes_E: Int[Array, " E"],
    bias_EF: Float[Array, "E F2"] | None, swiglu: Swiglu, interpret: bool,
    adapter: tuple[Array, ...] = (),
) -> tuple[Float[Array, "M _"], ...]:  # fmt: skip
    """The activated product [M, F] and, with `swiglu.save`, the product [M, 2F].

    `adapter` is that of `multiply_rows_mxfp4_hopper`.
    """
    (_, D, F2), extra = rhs_EDF.shape, count_adapter_steps(adapter)
    plan = Mxfp4Plan(D // (2 * GROUP), F2 // 2, tiles.PIECE, False, swiglu, interpret, extra)
    return tuple(_run_packed_kernel(plan, lhs_MD, rhs_EDF, group_sizes_E, bias_EF, adapter))


def _run_packed_kernel(plan, lhs_MD, rhs_EDF, sizes_E, bias_EF, adapter):
    rhs_EDF, matrix = split_part(rhs_EDF)
    M, dtype = lhs_MD.shape[0], lhs_MD.dtype
    n_matrices, D, _ = rhs_EDF.shape
    out_columns = D if plan.transposed else plan.columns
    lhs = tiles.pad_rows(lhs_MD, _ROWS)
    adapter = pad_adapter(adapter, _ROWS, plan.transposed)
    if adapter and plan.swiglu:  # interleave, so that a tile's gate and up columns are adjacent
        low, b = adapter
        b = b.reshape(*b.shape[:2], 2, -1, plan.width).swapaxes(2, 3).reshape(b.shape)
        adapter = low, b
    table, count = tiles.row_tiles(sizes_E, M, lhs.shape[0], _ROWS)
    # Group E, the rows past the sum, has a bias of 0 and no product.
    bias = () if bias_EF is None else (jnp.pad(bias_EF.astype(jnp.float32), ((0, 1), (0, 0))),)
    out_type = [jax.ShapeDtypeStruct((lhs.shape[0], out_columns), dtype)]
    if plan.swiglu and plan.swiglu.save:
        out_type.append(jax.ShapeDtypeStruct((lhs.shape[0], 2 * plan.columns), dtype))
    if matrix is not None:
        count = jnp.append(count, matrix.astype(jnp.int32))
    scales = rhs_EDF.scales_EDF.reshape(n_matrices, 2, D // (2 * GROUP), -1)  # of either half
    C = plan.consumers
    if plan.transposed:
        shapes = dict(lhs=(1, _ROWS, tiles.STEP), rhs=(1, plan.product_columns, tiles.STEP))
        packed = dict(codes=(1, plan.width, tiles.STEP), scales=(1, 2, 2, tiles.STEP))
        # The second column tile begins at D/2 + d, which need not be a multiple of 64.
        layout, store_layout = hopper.swizzle_transforms(), _SWIZZLED_32
    else:
        shapes = dict(lhs=(2, _ROWS, GROUP), rhs=(2, GROUP, plan.product_columns))
        packed = dict(codes=(plan.parts, GROUP, plan.width), scales=(plan.parts, 2, 1, plan.width))
        layout, store_layout = _SWIZZLED_32, hopper.swizzle_transforms()
    memory = {k: plgpu.SMEM((_STAGES, *v), dtype, transforms=layout) for k, v in shapes.items()}
    memory |= {k: plgpu.SMEM((_STAGES, *v), jnp.uint8) for k, v in packed.items()}
    piece = (C, _WG, tiles.PIECE)
    kernel = hopper.make_kernel(
        partial(_packed_kernel, plan=plan, n_groups=sizes_E.shape[0], bias=bool(bias)),
        out_type=out_type,
        scratch=[
            dict(
                memory,
                tile=plgpu.SMEM((1, *piece), dtype, transforms=store_layout),
                partial=plgpu.SMEM(piece, dtype),
                coded=plgpu.Barrier(num_arrivals=2 * packed["codes"][0], num_barriers=_STAGES),
                full=plgpu.Barrier(num_arrivals=C * shapes["lhs"][0] + 1, num_barriers=_STAGES),
                free=plgpu.Barrier(num_arrivals=C, num_barriers=_STAGES),
            )
        ],
        programs=count_gpu_cores(),
        num_threads=C + 2,
        name="grouped_swiglu_mxfp4" if plan.swiglu else "grouped_matmul_mxfp4",
        interpret=plan.interpret,
    )
    outs = kernel(table, count, lhs, rhs_EDF.nibbles_EDF, scales, *adapter, *bias)
    return outs if lhs is lhs_MD else [x[:M] for x in outs]


def _packed_kernel(
    table_ref, count_ref, lhs_ref, codes_ref, scales_ref, *refs, plan, n_groups, bias
):
    adapter, refs = split_adapter_refs(plan, refs)
    bias_ref, (*out_refs, s) = refs[0] if bias else None, refs[1:] if bias else refs
    n_rows, n_tiles = count_ref[0], count_ref[0] * plan.column_tiles
    warpgroup = lax.axis_index("warpgroup")
    locate, ring = partial(locate_tile, plan, table_ref, n_rows, n_groups), tiles.operand_ring(s)

    @pl.when(warpgroup == plan.consumers)
    def _run_producer():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        def fetch_tile(tile, n_done):
            group, start, lo, hi, first, steps = locate(tile)
            matrix = group + count_ref[1] if count_ref.shape[0] == 2 else group

            def copy_lhs(ref, inner, slot, i):
                """Copy the rows of warpgroups that have valid rows; small groups need no others."""
                barrier = s["full"].at[slot]
                for row in range(0, _ROWS, _WG):
                    rows, has_rows = pl.ds(row, _WG), (lo < row + _WG) & (hi > row)

                    @pl.when(has_rows)
                    def _(row=row, rows=rows):
                        destination = s["lhs"].at[slot, i, rows]
                        source = ref.at[pl.ds(start + row, _WG), inner]
                        plgpu.copy_gmem_to_smem(source, destination, barrier)

                    # The barrier expects an arrival for the rows of each warpgroup, copied or not.
                    @pl.when(jnp.logical_not(has_rows))
                    def _():
                        plgpu.barrier_arrive(barrier)

            def copy_rhs(source, destination, slot):
                plgpu.copy_gmem_to_smem(source, destination, s["coded"].at[slot])

            def fetch_step(k, slot):
                codes, scales = s["codes"].at[slot], s["scales"].at[slot]
                if plan.transposed:
                    inner, scaled = pl.ds(k * tiles.STEP, tiles.STEP), pl.ds(first // GROUP, 2)
                    rows = pl.ds(first, plan.width)
                    copy_rhs(codes_ref.at[matrix, rows, inner], codes.at[0], slot)
                    copy_rhs(scales_ref.at[matrix, :, scaled, inner], scales.at[0], slot)
                    copy_lhs(lhs_ref, inner, slot, 0)
                    return
                for part in range(plan.parts):
                    columns = pl.ds(first + part * plan.columns, plan.width)
                    rows, scaled = pl.ds(k * GROUP, GROUP), pl.ds(k, 1)
                    copy_rhs(codes_ref.at[matrix, rows, columns], codes.at[part], slot)
                    copy_rhs(scales_ref.at[matrix, :, scaled, columns], scales.at[part], slot)
                for half in range(2):
                    inner = pl.ds((half * plan.steps + k) * GROUP, GROUP)
                    copy_lhs(lhs_ref, inner, slot, half)

            def fetch_adapter(k, slot):
                """Fetch a step of the adapter, which needs no decoding.

                `coded` must get as many arrivals as `fetch_step` makes.
                """
                low_ref, b_ref = adapter
                if plan.transposed:
                    inner = pl.ds(k * tiles.STEP, tiles.STEP)
                    for part in range(plan.parts):
                        columns = pl.ds(first + part * plan.columns, plan.width)
                        span = pl.ds(part * plan.width, plan.width)
                        copy_rhs(b_ref.at[group, columns, inner], s["rhs"].at[slot, 0, span], slot)
                    copy_lhs(low_ref, inner, slot, 0)
                    return
                for half in range(2):
                    inner = pl.ds(k * tiles.STEP + half * GROUP, GROUP)
                    columns = pl.ds(first * plan.parts, plan.product_columns)
                    copy_rhs(b_ref.at[group, inner, columns], s["rhs"].at[slot, half], slot)
                    copy_lhs(low_ref, inner, slot, half)
                for _ in range(2 * plan.parts - 2):
                    plgpu.barrier_arrive(s["coded"].at[slot])

            fetch = select_fetch(plan, fetch_step, fetch_adapter)
            return tiles.fetch_steps(ring, n_done, steps, fetch)

        ring.drain(tiles.fold_core_tiles(n_tiles, fetch_tile))

    @pl.when(warpgroup == plan.consumers + 1)
    def _run_decoder():
        plgpu.set_max_registers(_DECODER_REGISTERS, action="decrease")

        def decode_tile(tile, n_done):
            *_, steps = locate(tile)

            def decode_slot(k, _):
                slot = ring.slot_of(n_done + k)
                plgpu.barrier_wait(s["coded"].at[slot])
                if plan.adapter_steps:
                    pl.when(k < plan.steps)(lambda: _decode_step(s, plan, slot))
                else:
                    _decode_step(s, plan, slot)
                # Tensor cores see decoded values in shared memory only after this fence.
                plgpu.commit_smem()
                plgpu.barrier_arrive(s["full"].at[slot])
                return None

            lax.fori_loop(0, steps, decode_slot, None)
            return n_done + steps

        tiles.fold_core_tiles(n_tiles, decode_tile)

    @pl.when(warpgroup < plan.consumers)
    def _run_consumer():
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        own_rows = pl.ds(warpgroup * _WG, _WG)

        def load_operands(_, slot):
            rhs = [s["rhs"].at[slot, i] for i in range(s["rhs"].shape[1])]
            rhs = [x.transpose((1, 0)) for x in rhs] if plan.transposed else rhs
            return [(s["lhs"].at[slot, i, own_rows], x) for i, x in enumerate(rhs)]

        def multiply_tile(n_done, steps):
            (y,) = ring.multiply_steps((plan.product_columns,), n_done, steps, load_operands)
            return [y[:, i : i + plan.width] for i in range(0, plan.product_columns, plan.width)]

        consume_tiles(s, plan, locate, n_tiles, multiply_tile, bias_ref, out_refs)


def _decode_step(s, plan, slot):
    """Decode a step's codes to its tiles of rhs, 32 rows and 64 columns at a time."""
    parts, height, width = s["codes"].shape[1:]
    row_of = tiles.STEP if plan.transposed else GROUP
    for part in range(parts):
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
                        index = (slot, 0, pl.ds(half * height + row, GROUP), columns)
                    else:
                        index = (slot, half, rows, pl.ds(part * width + column, PIECE))
                    s["rhs"][index] = value
