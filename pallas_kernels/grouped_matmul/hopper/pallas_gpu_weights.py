# SPDX-License-Identifier: Apache-2.0
"""drhs and dbias on Hopper: lhsᵀ dout over each group's rows.

The contraction runs over rows, so a group's first and last step contain rows of its neighbours.
These are zeroed in shared memory before the tensor cores read them, in lhs and in dout, since
0 · NaN is NaN. One extra row of tiles per group adds up dout's columns for dbias while other cores
multiply; it reads data that they have just brought into the cache.
Next: pallas_kernels/grouped_matmul/pallas_gpu.py.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, DTypeLike, Float, Int, Int32

from pallas_kernels import hopper
from pallas_kernels.dispatch import count_gpu_cores
from pallas_kernels.grouped_matmul.hopper import pallas_gpu_tiles as tiles

_WG = hopper.WARPGROUP_ROWS
ROWS = tiles.CONSUMERS * _WG


class WeightsPlan(NamedTuple):
    """The static parameters of one kernel."""

    groups: int
    row_tiles: int  # of drhs[e]
    columns: int  # tiles
    width: int  # of a tile
    bias: bool
    interpret: bool


def weight_gradients_hopper(
    lhs_MD: Float[Array, "M D"],
    dout_MF: Float[Array, "M F"],
    group_sizes_E: Int[Array, " E"],
    rhs_dtype: DTypeLike,
    bias: bool,
    interpret: bool,
) -> tuple[Float[Array, "E D F"], Float[Array, "E F"] | None]:
    """drhs[e] = Σ_{m in e} lhs[m]ᵀ dout[m] and, in float32, dbias[e] = Σ_{m in e} dout[m]."""
    (M, D), F, E = lhs_MD.shape, dout_MF.shape[1], group_sizes_E.shape[0]
    lhs, dout = tiles.pad_rows(lhs_MD, tiles.STEP), tiles.pad_rows(dout_MF, tiles.STEP)
    width = tiles.tile_width(F)
    plan = WeightsPlan(E, pl.cdiv(D, ROWS), F // width, width, bias, interpret)
    out_type = [jax.ShapeDtypeStruct((E, D, F), rhs_dtype)]
    if bias:
        out_type.append(jax.ShapeDtypeStruct((E, F), jnp.float32))
    stages, dtype = tiles.STAGES, lhs.dtype
    scratch: dict[str, Any] = dict(
        lhs=plgpu.SMEM((stages, tiles.STEP, ROWS), dtype, transforms=hopper.swizzle_transforms()),
        dout=plgpu.SMEM((stages, tiles.STEP, width), dtype, transforms=hopper.swizzle_transforms()),
        tile=plgpu.SMEM(
            (2, tiles.CONSUMERS, _WG, tiles.PIECE),
            rhs_dtype,
            transforms=hopper.swizzle_transforms(jnp.dtype(rhs_dtype).itemsize),
        ),
        sums=plgpu.SMEM((tiles.CONSUMERS, tiles.PIECE), jnp.float32) if bias else None,
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=tiles.CONSUMERS, num_barriers=stages),
        sync=plgpu.Barrier(num_arrivals=tiles.CONSUMERS),
    )
    kernel = plgpu.kernel(
        partial(_weights_kernel, plan=plan),
        out_type=out_type,
        scratch_types=[scratch],
        grid=(count_gpu_cores(),),
        grid_names=("core",),
        num_threads=tiles.CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul_weights",
        interpret=hopper.interpret_params(interpret),
    )
    drhs, *dbias = kernel(_group_bounds(group_sizes_E, M), lhs, dout)
    return drhs, dbias[0] if bias else None


def _group_bounds(group_sizes_E: Int[Array, " E"], n_rows: int) -> Int32[Array, "E 2"]:
    """First row of each group, and the row after its last."""
    sizes = group_sizes_E.astype(jnp.int32)
    end = jnp.minimum(jnp.cumsum(sizes), n_rows)
    return jnp.stack([end - sizes, end], 1).astype(jnp.int32)


def _weights_kernel(bounds_ref, lhs_ref, dout_ref, drhs_ref, *refs, plan):
    *dbias_ref, s = refs
    (M, D), width = lhs_ref.shape, plan.width
    n_rows = plan.row_tiles + plan.bias  # the last row of tiles is dbias's
    count = jnp.int32(plan.groups * n_rows * plan.columns)
    warpgroup, ring = lax.axis_index("warpgroup"), tiles.operand_ring(s)

    def locate_tile(tile):
        per_group = jnp.int32(n_rows * plan.columns)
        group = lax.div(tile, per_group)
        row, column = tiles.split_tile_index(
            lax.rem(tile, per_group), jnp.int32(n_rows), plan.columns
        )
        begin, end = bounds_ref[group, 0], bounds_ref[group, 1]
        first = begin - lax.rem(begin, jnp.int32(tiles.ALIGN))
        steps = lax.div(end - first + tiles.STEP - 1, jnp.int32(tiles.STEP))
        return group, row, column * width, (begin, end, first), jnp.where(end > begin, steps, 0)

    def step_rows(k, span):
        """The first row of a step, and the range lo … hi of its rows that belong to the group."""
        begin, end, first = span
        unclamped = first + k * tiles.STEP
        start = pl.multiple_of(jnp.minimum(unclamped, M - tiles.STEP), tiles.ALIGN)
        lo = jnp.maximum(begin, unclamped) - start
        return start, lo, jnp.minimum(end, unclamped + tiles.STEP) - start

    def drhs_row(row):
        # A last tile that would pass the end moves back: two tiles write the same values there.
        return pl.multiple_of(jnp.minimum(row * ROWS, D - ROWS), tiles.PIECE)

    @pl.when(warpgroup == tiles.CONSUMERS)
    def _run_producer():
        plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")

        def fetch_tile(tile, n_done):
            _, row, column, span, steps = locate_tile(tile)

            def fetch_step(k, slot):
                rows = pl.ds(step_rows(k, span)[0], tiles.STEP)
                barrier = s["full"].at[slot]
                plgpu.copy_gmem_to_smem(
                    dout_ref.at[rows, pl.ds(column, width)], s["dout"].at[slot], barrier
                )

                @pl.when(row < plan.row_tiles)
                def _():
                    plgpu.copy_gmem_to_smem(
                        lhs_ref.at[rows, pl.ds(drhs_row(row), ROWS)], s["lhs"].at[slot], barrier
                    )

                @pl.when(row == plan.row_tiles)
                def _():
                    plgpu.barrier_arrive(barrier)

            return tiles.fetch_steps(ring, n_done, steps, fetch_step)

        ring.drain(tiles.fold_core_tiles(count, fetch_tile))

    @pl.when(warpgroup < tiles.CONSUMERS)
    def _run_consumer():
        plgpu.set_max_registers(tiles.CONSUMER_REGISTERS[tiles.CONSUMERS], action="increase")
        own_columns = pl.ds(warpgroup * _WG, _WG)

        def zero_other_rows(ref, lo, hi):
            """Load the tile with rows outside lo … hi − 1 set to 0."""
            layout = None if plan.interpret else hopper.TILE
            row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=layout)
            x = hopper.load_registers(ref, hopper.TILE, plan.interpret)
            return jnp.where((row >= lo) & (row < hi), x, jnp.zeros_like(x))

        def sync_warpgroups():
            """Wait for the other warpgroups."""
            plgpu.barrier_arrive(s["sync"])
            plgpu.barrier_wait(s["sync"])

        def mask_operands(k, slot, span):
            lo, hi = step_rows(k, span)[1:]

            @pl.when(hi - lo < tiles.STEP)
            def _():
                lhs_tile: Any = s["lhs"].at[slot, :, own_columns]
                lhs_tile[...] = zero_other_rows(lhs_tile, lo, hi)

                @pl.when(warpgroup < width // tiles.PIECE)
                def _():
                    dout_tile = s["dout"].at[slot, :, own_columns]
                    dout_tile[...] = zero_other_rows(dout_tile, lo, hi)

                plgpu.commit_smem()
                # Every warpgroup multiplies all columns of dout, of which each has cleared a part.
                sync_warpgroups()

        def sum_bias_gradient(n_done, steps, span, group, column):
            """Sum dout's columns for dbias, one piece of the columns for each warpgroup.

            Warpgroups beyond the last piece repeat it and do not write.
            """
            piece = jnp.minimum(warpgroup, jnp.int32(width // tiles.PIECE - 1)) * tiles.PIECE

            def add_step(k, total):
                ring.wait_filled(n_done + k)
                columns = s["dout"].at[ring.slot_of(n_done + k), :, pl.ds(piece, tiles.PIECE)]
                x = zero_other_rows(columns, *step_rows(k, span)[1:]).astype(jnp.float32)
                ring.release(n_done + k)
                return total + x

            zeros = hopper.fill_registers(
                (tiles.STEP, tiles.PIECE), 0.0, hopper.TILE, plan.interpret
            )
            total: Any = lax.fori_loop(0, steps, add_step, zeros)

            # Warpgroups write in turn, since a sum across warps uses one shared buffer.
            @pl.loop(0, width // tiles.PIECE)
            def _(writer):
                @pl.when(warpgroup == writer)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    s["sums"].at[warpgroup][...] = total.sum(axis=0)
                    plgpu.commit_smem()
                    columns = pl.ds(column + piece, tiles.PIECE)
                    plgpu.copy_smem_to_gmem(
                        s["sums"].at[warpgroup], dbias_ref[0].at[group, columns]
                    )

                sync_warpgroups()

        def process_tile(tile, n_done):
            group, row, column, span, steps = locate_tile(tile)

            @pl.when(row < plan.row_tiles)
            def _():
                def load_operands(k, slot):
                    mask_operands(k, slot, span)
                    return [
                        (s["lhs"].at[slot, :, own_columns].transpose((1, 0)), s["dout"].at[slot])
                    ]

                (y,) = ring.multiply_steps((width,), n_done, steps, load_operands)
                start = drhs_row(row) + warpgroup * _WG
                for i in range(0, width, tiles.PIECE):
                    value = y[:, i : i + tiles.PIECE].astype(drhs_ref.dtype)
                    destination = drhs_ref.at[group]
                    tiles.store_full_tile(
                        s, destination, value, start, column + i, i // tiles.PIECE
                    )

            if plan.bias:

                @pl.when(row == plan.row_tiles)
                def _():
                    sum_bias_gradient(n_done, steps, span, group, column)

            return n_done + steps

        tiles.fold_core_tiles(count, process_tile)
        plgpu.wait_smem_to_gmem(0)
