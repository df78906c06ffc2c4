# SPDX-License-Identifier: Apache-2.0
"""drhs and dbias on Hopper: lhsᵀ dout over each group's own rows.

The contraction runs over rows, so a group's first and last step hold rows of its neighbours. They
are zeroed in shared memory on both sides, since 0 · NaN is NaN, before the tensor cores read them.
One extra row of tiles per group adds up dout's columns for dbias while other cores multiply: it
reads what they have just brought into the cache. Next: pallas_kernels/grouped_matmul/pallas_gpu.py.
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
    """What is static of one kernel."""

    groups: int
    row_tiles: int  # of drhs[e]
    columns: int  # tiles
    width: int  # of a tile
    bias: bool
    interpret: bool


def weights_by_group(
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
    width = tiles.width_of(F)
    plan = WeightsPlan(E, pl.cdiv(D, ROWS), F // width, width, bias, interpret)
    out_type = [jax.ShapeDtypeStruct((E, D, F), rhs_dtype)]
    if bias:
        out_type.append(jax.ShapeDtypeStruct((E, F), jnp.float32))
    stages, dtype = tiles.STAGES, lhs.dtype
    scratch: dict[str, Any] = dict(
        lhs=plgpu.SMEM((stages, tiles.STEP, ROWS), dtype, transforms=hopper.swizzle_transforms()),
        dout=plgpu.SMEM((stages, tiles.STEP, width), dtype, transforms=hopper.swizzle_transforms()),
        whole=plgpu.SMEM(
            (2, tiles.CONSUMERS, _WG, tiles.PIECE),
            rhs_dtype,
            transforms=hopper.swizzle_transforms(jnp.dtype(rhs_dtype).itemsize),
        ),
        sums=plgpu.SMEM((tiles.CONSUMERS, tiles.PIECE), jnp.float32) if bias else None,
        here=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=tiles.CONSUMERS, num_barriers=stages),
        together=plgpu.Barrier(num_arrivals=tiles.CONSUMERS),
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
    drhs, *dbias = kernel(_bounds(group_sizes_E, M), lhs, dout)
    return drhs, dbias[0] if bias else None


def _bounds(group_sizes_E: Int[Array, " E"], n_rows: int) -> Int32[Array, "E 2"]:
    """First row of each group, and the row after its last."""
    sizes = group_sizes_E.astype(jnp.int32)
    end = jnp.minimum(jnp.cumsum(sizes), n_rows)
    return jnp.stack([end - sizes, end], 1).astype(jnp.int32)


def _weights_kernel(bounds_ref, lhs_ref, dout_ref, drhs_ref, *refs, plan):
    *dbias_ref, s = refs
    (M, D), width = lhs_ref.shape, plan.width
    n_rows = plan.row_tiles + plan.bias  # the last one for dbias
    count = jnp.int32(plan.groups * n_rows * plan.columns)
    warpgroup, ring = lax.axis_index("warpgroup"), tiles.ring_of(s)

    def place(tile):
        per_group = jnp.int32(n_rows * plan.columns)
        group = lax.div(tile, per_group)
        row, column = tiles.in_chunks(lax.rem(tile, per_group), jnp.int32(n_rows), plan.columns)
        begin, end = bounds_ref[group, 0], bounds_ref[group, 1]
        first = begin - lax.rem(begin, jnp.int32(tiles.ALIGN))
        steps = lax.div(end - first + tiles.STEP - 1, jnp.int32(tiles.STEP))
        return group, row, column * width, (begin, end, first), jnp.where(end > begin, steps, 0)

    def rows_of(k, span):
        """Where a step starts, and from and to which of its rows are the group's."""
        begin, end, first = span
        wanted = first + k * tiles.STEP
        start = pl.multiple_of(jnp.minimum(wanted, M - tiles.STEP), tiles.ALIGN)
        lo = jnp.maximum(begin, wanted) - start
        return start, lo, jnp.minimum(end, wanted + tiles.STEP) - start

    def drhs_row(row):
        return pl.multiple_of(jnp.minimum(row * ROWS, D - ROWS), tiles.PIECE)

    @pl.when(warpgroup == tiles.CONSUMERS)
    def _producer():
        plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")

        def one(tile, done):
            _, row, column, span, steps = place(tile)

            def fetch(k, slot):
                rows = pl.ds(rows_of(k, span)[0], tiles.STEP)
                here = s["here"].at[slot]
                plgpu.copy_gmem_to_smem(
                    dout_ref.at[rows, pl.ds(column, width)], s["dout"].at[slot], here
                )

                @pl.when(row < plan.row_tiles)
                def _():
                    plgpu.copy_gmem_to_smem(
                        lhs_ref.at[rows, pl.ds(drhs_row(row), ROWS)], s["lhs"].at[slot], here
                    )

                @pl.when(row == plan.row_tiles)
                def _():
                    plgpu.barrier_arrive(here)

            return tiles.produce(ring, done, steps, fetch)

        ring.drain(tiles.each_tile(count, one))

    @pl.when(warpgroup < tiles.CONSUMERS)
    def _consumer():
        plgpu.set_max_registers(tiles.CONSUMER_REGISTERS[tiles.CONSUMERS], action="increase")
        mine = pl.ds(warpgroup * _WG, _WG)

        def keep(ref, lo, hi):
            """The values of the group's rows, 0 for others."""
            layout = None if plan.interpret else hopper.TILE
            row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=layout)
            x = hopper.load_registers(ref, hopper.TILE, plan.interpret)
            return jnp.where((row >= lo) & (row < hi), x, jnp.zeros_like(x))

        def together():
            """Wait for the other warpgroups."""
            plgpu.barrier_arrive(s["together"])
            plgpu.barrier_wait(s["together"])

        def mask(k, slot, span):
            lo, hi = rows_of(k, span)[1:]

            @pl.when(hi - lo < tiles.STEP)
            def _():
                own: Any = s["lhs"].at[slot, :, mine]
                own[...] = keep(own, lo, hi)

                @pl.when(warpgroup < width // tiles.PIECE)
                def _():
                    shared = s["dout"].at[slot, :, mine]
                    shared[...] = keep(shared, lo, hi)

                plgpu.commit_smem()
                together()

        def add_up(done, steps, span, group, column):
            """dbias: each warpgroup its piece of the columns (those too many, the last one)."""
            piece = jnp.minimum(warpgroup, jnp.int32(width // tiles.PIECE - 1)) * tiles.PIECE

            def add(k, total):
                ring.wait_filled(done + k)
                columns = s["dout"].at[ring.slot_of(done + k), :, pl.ds(piece, tiles.PIECE)]
                x = keep(columns, *rows_of(k, span)[1:]).astype(jnp.float32)
                ring.release(done + k)
                return total + x

            nothing = hopper.fill_registers(
                (tiles.STEP, tiles.PIECE), 0.0, hopper.TILE, plan.interpret
            )
            total: Any = lax.fori_loop(0, steps, add, nothing)

            # One after the other: sums across warps meet in one place in shared memory.
            @pl.loop(0, width // tiles.PIECE)
            def _(turn):
                @pl.when(warpgroup == turn)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    s["sums"].at[warpgroup][...] = total.sum(axis=0)
                    plgpu.commit_smem()
                    columns = pl.ds(column + piece, tiles.PIECE)
                    plgpu.copy_smem_to_gmem(
                        s["sums"].at[warpgroup], dbias_ref[0].at[group, columns]
                    )

                together()

        def one(tile, done):
            group, row, column, span, steps = place(tile)

            @pl.when(row < plan.row_tiles)
            def _():
                def operands(k, slot):
                    mask(k, slot, span)
                    return [(s["lhs"].at[slot, :, mine].transpose((1, 0)), s["dout"].at[slot])]

                (y,) = ring.multiply_steps((width,), done, steps, operands)
                start = drhs_row(row) + warpgroup * _WG
                for i in range(0, width, tiles.PIECE):
                    value = y[:, i : i + tiles.PIECE].astype(drhs_ref.dtype)
                    to = drhs_ref.at[group]
                    tiles.store_whole(s, to, value, start, column + i, i // tiles.PIECE)

            if plan.bias:

                @pl.when(row == plan.row_tiles)
                def _():
                    add_up(done, steps, span, group, column)

            return done + steps

        tiles.each_tile(count, one)
        plgpu.wait_smem_to_gmem(0)
